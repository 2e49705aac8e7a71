"""The base class of codecs whose codes can be added without decoding them."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..native.wire import aligned
from .base import Codec

if TYPE_CHECKING:
    from ..transport import Transport


class HomomorphicCodec(Codec):
    """A codec whose codes stand for integers; the sum of all ranks' integers stands for the sum of their values.

    Integers of several messages may be added only if their codec comes from one ``agree``. Sums are sent in 8, 12 or 16
    bits, wide enough for the number of ranks, without header.
    """

    collective: ClassVar[str | None] = "integer_sum"

    @property
    @abstractmethod
    def largest(self) -> int:
        """The largest integer that a code stands for; the smallest is 0."""

    @abstractmethod
    def agree(
        self, x: Tensor, transport: Transport, *, seed: int = 0, residual: Tensor | None = None
    ) -> HomomorphicCodec:
        """Exchange statistics with the other ranks, and return the codec for the sum of their ``x`` by integers.

        ``integer_sum`` calls this first, on all ranks together. The returned codec holds the result of the agreement in
        fields with ``compare=False``, like that of an ``AgreeingCodec``. ``offset`` is the place in ``x``.

        Args:
            x: (n,), this rank's summand; it is not changed.
            transport: the ranks; only the calling thread uses it.
            seed: the same on all ranks.
            residual: (n,) f32 that will be sent along.
        """

    def sum_bits(self, ranks: int) -> int:
        """Return the bits of each integer in the sum of the messages of this many ranks.

        Raises:
            ConfigError: the sum would need more than 16 bits.
        """
        for bits in (8, 12, 16):
            if ranks * self.largest < 1 << bits:
                return bits
        raise ConfigError(
            f"algorithm 'integer_sum' adds {self} over at most {0xFFFF // self.largest} ranks, these are {ranks}; "
            "choose another algorithm"
        )

    def sum_bytes(self, numel: int, ranks: int) -> int:
        """Return the bytes of the sum of ``ranks`` messages of ``numel`` elements, a multiple of 128."""
        return aligned(self._count(numel) * self.sum_bits(ranks) // 8)

    @abstractmethod
    def add_codes(self, payloads: Tensor, total: Tensor, numel: int, dtype: torch.dtype) -> None:
        """Write the sum of the integers of ``payloads`` (ranks, capacity) into ``total`` (sum_bytes,) uint8.

        Each message has ``numel`` elements of ``dtype``.
        """

    @abstractmethod
    def decode_sums(self, totals: Tensor, out: Tensor, chunk: int, ranks: int) -> None:
        """Fill ``out[i * chunk : (i + 1) * chunk]`` from row i of ``totals``, a sum of ``ranks`` messages."""

    @abstractmethod
    def _count(self, numel: int) -> int:
        """Return how many integers a message of ``numel`` elements has, a multiple of 32."""
