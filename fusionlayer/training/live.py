"""The distributed optimizers of this process that are not closed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from .. import context
from ..base.errors import ConfigError

if TYPE_CHECKING:
    from .reduction import GradientReduction

__all__ = ["enlist", "forget", "refuse_twice"]

_live: weakref.WeakSet[GradientReduction] = weakref.WeakSet()
# Guards _live: optimizers are made and closed on any thread, and shutdown looks at all of them.
_lock = threading.Lock()


def enlist(optimizer: GradientReduction) -> None:
    """Note that an optimizer reduces gradients."""
    with _lock:
        _live.add(optimizer)


def forget(optimizer: GradientReduction) -> None:
    """Note that an optimizer is closed."""
    with _lock:
        _live.discard(optimizer)


def _all() -> list[GradientReduction]:
    with _lock:
        return list(_live)


def refuse_twice(names: Mapping[Tensor, str], but: Optimizer | None = None) -> None:
    """Raise ``ConfigError`` if a distributed optimizer that is not closed, ``but`` one, has one of the parameters."""
    for other in _all():
        for parameter, name in names.items():
            if other is not but and parameter in other._fl_names:
                raise ConfigError(
                    f"parameter {name!r} belongs to a DistributedOptimizer already and would be reduced twice; close() "
                    "that one first"
                )


def _leave_all() -> None:
    """Let what optimizers have under way end: to get results, other ranks need this rank's part."""
    for optimizer in _all():
        optimizer._fl_leave()


context.before_shutdown(_leave_all)
