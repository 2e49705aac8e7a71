"""``randomk``: elements drawn at random, the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import native
from ._sparse import ALL, Sparsifier
from ._state import TensorState

__all__ = ["RandomK"]

_NUMBERS = 1 << 32  # an element draws a number below this


@dataclass(frozen=True)
class RandomK(Sparsifier, name="randomk"):
    """Sends each element with probability k / n, whatever its value (Stich, Cordonnier, Jaggi, NeurIPS 2018).

    The seed and the place of an element alone decide whether it is drawn: ranks that share the seed send the same
    elements. Their number is binomial, so the message has room for six standard deviations more than k. If no element
    is drawn, the probability is raised until one is.
    """

    _flags: ClassVar[int] = native.SPARSE_RANDOM

    def capacity(self, numel: int) -> int:
        k = self.target(numel)
        return min(numel, k + math.ceil(6 * math.sqrt(k)) + 6)

    def _encode_sum(
        self, x: Tensor, scale: float, wanted: Tensor, body: Tensor, state: TensorState, seed: int, offset: int
    ) -> None:
        n = wanted.numel()
        threshold = max(1, self.target(n) * _NUMBERS // n)
        self._send(wanted, body, threshold, ALL, seed, offset, x=x, scale=scale)
        ends = self.wire(n).planes(body)[0]
        while not int(ends[-1]):
            threshold = min(2 * threshold, _NUMBERS)
            self._send(wanted, body, threshold, ALL, seed, offset)
