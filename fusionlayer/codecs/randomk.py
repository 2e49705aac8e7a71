"""``randomk``: elements drawn at random, the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import native
from ._sparse import ALL, Choice, Sparsifier
from ._state import TensorState

__all__ = ["RandomK"]

_NUMBERS = 1 << 32  # an element draws a number below this
_FEW = 64  # from this k on, no element at all is drawn with a probability below 2^-92, which is taken for never


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
        choice: Choice = threshold, ALL
        if self.target(n) >= _FEW:
            return self._send(wanted, body, choice, seed, offset, x=x, scale=scale)
        native.accumulate(x, scale, wanted)
        choice = native.choose_drawn(self._params(n).spec(n, torch.float32, seed, offset), wanted, threshold)
        self._send(wanted, body, choice, seed, offset)
