"""``topk``: the k largest magnitudes of each tensor."""

from __future__ import annotations

from dataclasses import dataclass

from .sparsifier import ThresholdSparsifier


@dataclass(frozen=True)
class TopK(ThresholdSparsifier, name="topk"):
    """Sends the k elements of the largest magnitude; among equals the first ones (Aji, Heafield, EMNLP 2017).

    It sends exactly k elements, so the message needs no slack. It sends fewer only if fewer are not zero.
    """

    slack: float = 1.0
