"""Codecs whose codes can be added without being decoded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from ..wire import aligned
from ._arithmetic import pack_runs, unpack_runs
from ._torch import TorchCodec

__all__ = ["HomomorphicCodec"]


class HomomorphicCodec(TorchCodec):
    """A codec whose codes stand for integers, and the sum of all ranks' integers for the sum of their values.

    It gives ``largest``, ``_integers`` and ``_decode_integers`` besides what a ``TorchCodec`` gives. Integers of
    several messages may be added only if one ``agree`` made the codec that encoded them. Sums travel in 8, 12 or 16
    bits, wide enough for the number of ranks, without header.
    """

    @property
    @abstractmethod
    def largest(self) -> int:
        """The largest integer that a code stands for; the smallest is 0."""

    @abstractmethod
    def _integers(self, planes: Sequence[Tensor]) -> Tensor:
        """Return (m,) int32 that the codes of a message stand for; m is a multiple of 32."""

    @abstractmethod
    def _decode_integers(self, integers: Tensor, count: int, out: Tensor) -> None:
        """Fill ``out`` (n,) from the sum of ``count`` messages' ``integers`` (m,) int32, by what was agreed on."""

    def sum_bits(self, ranks: int) -> int:
        """Return the bits of each integer in the sum of so many ranks' messages.

        Raises:
            ConfigError: it would need more than 16.
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

    def add_codes(self, payloads: Tensor, total: Tensor, numel: int, dtype: torch.dtype) -> None:
        """Write into ``total`` (sum_bytes,) uint8 the sum of the integers of ``payloads`` (ranks, capacity).

        ``numel`` and ``dtype`` are those of the messages' elements.
        """
        bodies, form = self._bodies(payloads, numel, dtype), self.bare.wire(numel, dtype)
        integers = sum(self._integers(form.views(body)) for body in bodies)
        assert isinstance(integers, Tensor)
        packed = pack_runs(integers, self.sum_bits(len(bodies)))
        total[: packed.numel()].copy_(packed)

    def decode_sums(self, totals: Tensor, out: Tensor, chunk: int, ranks: int) -> None:
        """Fill ``out[i * chunk : (i + 1) * chunk]`` from row i of ``totals``, each ``add_codes`` of ``ranks`` made."""
        bits = self.sum_bits(ranks)
        for total, piece in zip(totals, out.split(chunk), strict=False):
            if piece.numel():
                data = total[: self._count(piece.numel()) * bits // 8]
                self._decode_integers(unpack_runs(data, bits), ranks, piece)

    @abstractmethod
    def _count(self, numel: int) -> int:
        """Return how many integers a message of ``numel`` elements has, a multiple of 32."""
