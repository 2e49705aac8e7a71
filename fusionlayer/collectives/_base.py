"""What a collective is: a function that replaces a flat tensor by its sum over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ..codecs import Codec
from ..registry import Registry
from ..transport import Transport

__all__ = ["AllReduce", "collective", "registry", "split_evenly"]


class AllReduce(Protocol):
    """The signature of a collective."""

    def __call__(
        self, x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None
    ) -> None:
        """Replace ``x`` (n,), f32, bf16 or f16, by its sum over ranks: the same bits on every rank.

        Args:
            x: flat and contiguous, equally long on all ranks.
            codec: what travels; made the same on all ranks.
            transport: the ranks; only the calling thread uses it.
            seed: of stochastic rounding; the same on all ranks.
            residual: (n,) f32, this rank's error feedback: added to what it sends, replaced by what sending lost.
        """


registry: Registry[AllReduce] = Registry("collective", __package__)


def collective(name: str) -> Callable[[AllReduce], AllReduce]:
    """Register a function as the collective ``name``."""

    def register(function: AllReduce) -> AllReduce:
        registry.add(name, lambda: function)
        return function

    return register


def split_evenly(numel: int, parts: int, block: int) -> int:
    """Return the length of the pieces that cut ``numel`` elements into ``parts``: a positive multiple of ``block``."""
    return max(1, -(-numel // (parts * block))) * block
