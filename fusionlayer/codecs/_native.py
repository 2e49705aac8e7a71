"""Codecs whose verbs are one call each into the codec core, on CPU and CUDA alike."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ._base import Codec

__all__ = ["NativeCodec"]


class NativeCodec(Codec):
    """A codec of ``csrc``; it gives ``_planes``, and ``_params`` or all of ``_spec``."""

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        """Return the core's codec number and parameters for messages encoded from ``dtype``."""
        raise NotImplementedError

    def _spec(
        self, numel: int, encoded: torch.dtype, dtype: torch.dtype, seed: int = 0, offset: int = 0
    ) -> native.Spec:
        """Return what the core needs for messages encoded from type ``encoded`` and elements of ``dtype``."""
        return self._params(encoded).spec(numel, dtype, seed, offset)

    def _offsets(self, numel: int, dtype: torch.dtype) -> list[int]:
        return [section.offset for section in self.bare.wire(numel, dtype).sections]

    def _encode_rows(self, x: Tensor, bodies: Tensor, n: int, seed: int, offset: int, residual: Tensor | None) -> None:
        spec = self._spec(n, x.dtype, x.dtype, seed, offset)
        native.encode(spec, self._offsets(n, x.dtype), x, residual, bodies)

    def _decode_rows(self, bodies: Tensor, out: Tensor, n: int, dtype: torch.dtype) -> None:
        native.decode(self._spec(n, dtype, out.dtype), self._offsets(n, dtype), bodies, out)

    def _sum_rows(self, bodies: Tensor, out: Tensor, dtype: torch.dtype, add: bool) -> None:
        spec = self._spec(out.numel(), dtype, out.dtype)
        native.decode_sum(spec, self._offsets(out.numel(), dtype), bodies, out, add=add)

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
        spec = self._spec(n, dtype, dtype if x is None else x.dtype, seed, offset)
        native.recode(spec, self._offsets(n, dtype), bodies, x, residual, body)
