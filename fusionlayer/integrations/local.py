"""``Local``: the options of local steps, in which ranks train by themselves and send how far they have come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ..errors import ConfigError, require
from ..functional import Average, ReduceOp

__all__ = ["Local", "check_sync"]


@dataclass(frozen=True)
class Local:
    """Local steps: each rank steps by itself, and after ``every`` steps all ranks sync.

    A sync sends, from each rank, the difference between the parameters that all ranks had after the last sync (the
    anchor) and its parameters now. The outer optimizer, ``torch.optim.SGD`` with Nesterov momentum, takes the average
    of the differences as the gradient of the anchor. Then all ranks go on from the new anchor, with the same bits.

    The methods make the published variants. Each is a value of this class, and every option can be given to each.

    Args:
        every: local steps between two syncs, at least 1.
        lr: learning rate of the outer optimizer; 1.0 without momentum makes the new anchor the plain average.
        momentum: of the outer optimizer, from 0 to below 1.
        codec: name of the codec of the differences, where ``DistributedOptimizer`` is given none; None: as configured.
        codec_options: of ``codec``.
        error_feedback: add what the codec lost to the next sync's difference; None: as the codec needs it.

    Raises:
        ConfigError: an option has a value that cannot be used.
    """

    every: int
    lr: float = 1.0
    momentum: float = 0.0
    codec: str | None = None
    codec_options: Mapping[str, Any] = field(default_factory=dict)
    error_feedback: bool | None = None

    def __post_init__(self) -> None:
        if self.every == "auto":
            raise ConfigError("every='auto' is not available yet; give a number of steps, such as every=4")
        _check_whole("every", self.every, 1, "local steps between two syncs")
        _check_number("lr", self.lr, 0 < _float(self.lr) < math.inf, "above 0")
        _check_number("momentum", self.momentum, 0 <= _float(self.momentum) < 1, "from 0 to below 1")

    @classmethod
    def averaging(cls, every: int = 4, **options: Any) -> Local:
        """Return local SGD: after ``every`` steps parameters become the average over ranks (arXiv 1805.09767)."""
        return cls(every=every, **options)

    @classmethod
    def diloco(cls, every: int = 30, lr: float = 0.7, momentum: float = 0.9, **options: Any) -> Local:
        """Return DiLoCo: averages are the gradients of an outer optimizer with Nesterov momentum (arXiv 2311.08105)."""
        return cls(every=every, lr=lr, momentum=momentum, **options)


def check_sync(sync: Local, op: ReduceOp, overlap_forward: object) -> None:
    """Raise ``ConfigError`` unless ``DistributedOptimizer`` may take these arguments together."""
    require(sync, Local, "sync", "fusionlayer.Local(...), such as fusionlayer.Local.averaging(every=4)")
    if op is not Average:
        raise ConfigError(f"op={op.name} with sync=fl.Local(...), which averages differences; leave op out")
    if overlap_forward is not None:
        raise ConfigError(
            "overlap_forward with sync=fl.Local(...): no step waits for gradients there; leave overlap_forward out"
        )


def _float(value: object) -> float:
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def _check_whole(name: str, value: object, least: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"sync: {name}={value!r}; expected a number of {what}, at least {least}")


def _check_number(name: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise ConfigError(f"sync: {name}={value!r}; expected a number {expected}")
