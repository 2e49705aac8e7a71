"""``randomk``: elements drawn at random, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...native import selection
from ..state import TensorState
from .sparsifier import Sparsifier


@dataclass(frozen=True)
class RandomK(Sparsifier, name="randomk"):
    """Sends k elements drawn at random, whatever their values (Stich, Cordonnier, Jaggi, NeurIPS 2018).

    Each element draws a number, which depends on the seed and its position alone, and the k least are sent. Ranks that
    share the seed send the same elements. NaN and Inf go alone, without others.
    """

    _flags: ClassVar[int] = selection.SPARSE_RANDOM

    def _encode_sum(
        self, x: Tensor, scale: float, wanted: Tensor, body: Tensor, state: TensorState, seed: int, offset: int
    ) -> None:
        n = wanted.numel()
        selection.accumulate(x, scale, wanted)
        spec = self._params(n).spec(n, torch.float32, seed, offset)
        self._send(wanted, body, selection.choose_drawn(spec, wanted, self.target(n)), seed, offset)
