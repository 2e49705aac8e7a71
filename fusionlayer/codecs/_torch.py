"""Codecs written in torch operations: three methods make one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ._base import Codec

__all__ = ["TorchCodec"]


class TorchCodec(Codec):
    """A codec that gives ``_planes``, ``_encode`` and ``_decode``; sums, recoding and error feedback follow."""

    @abstractmethod
    def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
        """Write ``x`` (n,), n > 0, into its planes. ``offset`` is the number of ``x[0]`` in the seed's sequence."""

    @abstractmethod
    def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
        """Fill ``out`` (n,), n > 0, from the planes of a message that was encoded from ``dtype``."""

    def _encode_rows(self, x: Tensor, bodies: Tensor, n: int, seed: int, offset: int, residual: Tensor | None) -> None:
        for i, body in enumerate(bodies if n else []):
            piece = slice(i * n, (i + 1) * n)
            part = None if residual is None else residual[piece]
            self._encode_value(x[piece], body, x.dtype, seed, offset + i * self._numbers(n), part)

    def _decode_rows(self, bodies: Tensor, out: Tensor, n: int, dtype: torch.dtype) -> None:
        for i, body in enumerate(bodies if n else []):
            self._decode(self.bare.wire(n, dtype).views(body), out[i * n : (i + 1) * n], dtype)

    def _sum_rows(self, bodies: Tensor, out: Tensor, dtype: torch.dtype, add: bool) -> None:
        total = out.float() if add else torch.zeros_like(out, dtype=torch.float32)
        part = torch.empty_like(total)
        for body in bodies:
            self._decode(self.bare.wire(out.numel(), dtype).views(body), part, dtype)
            total += part
        out.copy_(total)

    def _recode_rows(
        self,
        bodies: Tensor,
        body: Tensor,
        n: int,
        dtype: torch.dtype,
        x: Tensor | None,
        seed: int,
        offset: int,
        residual: Tensor | None,
    ) -> None:
        total = torch.zeros(n, device=body.device) if x is None else x.to(torch.float32, copy=True)
        self._sum_rows(bodies, total, dtype, add=True)
        self._encode_value(total, body, dtype, seed, offset, residual)

    def _encode_value(
        self, x: Tensor, body: Tensor, dtype: torch.dtype, seed: int, offset: int, residual: Tensor | None
    ) -> None:
        """Encode ``x`` (n,), of any type, as a message of ``dtype``."""
        planes = self.bare.wire(x.numel(), dtype).views(body)
        if residual is None:
            return self._encode(x.to(dtype), planes, seed, offset)
        wanted = x + residual
        self._encode(wanted.to(dtype), planes, seed, offset)
        sent = torch.empty_like(wanted)
        self._decode(planes, sent, dtype)
        lost = wanted - sent
        residual.copy_(torch.where(lost.isfinite(), lost, residual))
