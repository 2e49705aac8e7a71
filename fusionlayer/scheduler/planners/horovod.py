"""``horovod``: fill a buffer up to a threshold, as Horovod's tensor fusion does.

Horovod looks for new tensors once in a cycle (1 ms, formerly 5 ms). The cycle does not decide which tensors may be sent
together, so plans have no cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...base.errors import ConfigError
from ...base.plan import TensorInfo
from ._base import Planner, registry
from ._costs import StepCosts


@dataclass(frozen=True)
class Horovod(Planner, name="horovod"):
    """Fuse consecutive tensors while their bytes stay within ``threshold``; a larger tensor is sent alone.

    Attributes:
        threshold: bytes of gradients in a bucket. Horovod's default is 128 MiB; the preset ``horovod_64mb`` has its
            former default, 64 MiB.
    """

    threshold: int = 128 << 20

    def __post_init__(self) -> None:
        if type(self.threshold) is not int or self.threshold < 1:
            raise ConfigError(f"horovod planner: threshold={self.threshold!r}; expected bytes, a whole number above 0")

    def cut(self, tensors: Sequence[TensorInfo], costs: StepCosts | None) -> list[list[TensorInfo]]:
        """Return runs of at most ``threshold`` bytes."""
        runs: list[list[TensorInfo]] = []
        room = 0
        for tensor in tensors:
            if not runs or tensor.nbytes > room:
                runs.append([])
                room = self.threshold
            runs[-1].append(tensor)
            room -= tensor.nbytes
        return runs


registry.add_preset("horovod_64mb", "horovod", threshold=64 << 20)
