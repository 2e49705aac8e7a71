"""``horovod``: fill a buffer up to a threshold, as Horovod's tensor fusion does with what one cycle has gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ConfigError
from ...plan import TensorInfo
from ._base import Planner

__all__ = ["Horovod"]


@dataclass(frozen=True)
class Horovod(Planner, name="horovod"):
    """Fuse consecutive tensors while their bytes stay within ``threshold``; a larger tensor travels alone.

    Attributes:
        threshold: bytes of gradients in a bucket; Horovod's own default is 128 MiB (once 64 MB).
        parts: no bucket is larger than one of so many equal parts of all gradients: a model that is smaller than the
            threshold still overlaps. 1 leaves it to the threshold alone, as Horovod does.
    """

    threshold: int = 128 << 20
    parts: int = 1

    def __post_init__(self) -> None:
        if type(self.threshold) is not int or self.threshold < 1:
            raise ConfigError(f"horovod planner: threshold={self.threshold!r}; expected bytes, a whole number above 0")
        if type(self.parts) is not int or self.parts < 1:
            raise ConfigError(f"horovod planner: parts={self.parts!r}; expected a whole number above 0")

    def cut(self, tensors: Sequence[TensorInfo]) -> list[list[TensorInfo]]:
        """Return runs of at most ``threshold`` bytes and at most one of ``parts`` parts of all."""
        most = min(self.threshold, -(-sum(tensor.nbytes for tensor in tensors) // self.parts))
        runs: list[list[TensorInfo]] = []
        room = 0
        for tensor in tensors:
            if not runs or tensor.nbytes > room:
                runs.append([])
                room = most
            runs[-1].append(tensor)
            room -= tensor.nbytes
        return runs
