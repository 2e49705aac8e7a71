"""``rans``: lossless messages whose exponents an entropy coder shortens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import native
from ..wire import WireFormat
from ._encoding import Encoding
from ._exponents import ExponentCodec, bring_back

__all__ = ["Rans"]

_BLOCK, _LANES, _SYMBOLS, _FILLED = 32768, 32, 256, 64


@dataclass(frozen=True)
class Rans(ExponentCodec, name="rans"):
    """The same bits in as few bytes as exponents allow, by interleaved rANS with one table of frequencies per message.

    A Gaussian takes 10.6 bits of bf16's 16, 13.5 of f16's 16, and 26.6 of f32's 32, whatever its sigma. Other
    distributions of exponents take their entropy. ``zip`` is ten times as fast and is measured by this ratio; on slow
    networks ``rans`` is worth its time. A message has at most 16 bytes more than its elements. The kernels run on the
    CPU; tensors on CUDA are copied there and back.
    """

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        return native.CodecParams(native.RANS, (native.DTYPES[dtype],))

    def _static_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of frequencies, ends and states of blocks, bytes, and lower halves."""
        blocks = -(-numel // _BLOCK)
        low = 2 * numel if dtype is torch.float32 else 0
        return _filled(2 * _SYMBOLS + 4 * blocks) + 4 * _LANES * blocks + _filled(numel) + _filled(low)

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        near, kept = bodies.cpu(), None if how.residual is None else how.residual.cpu()
        super()._encode_rows(x.cpu(), near, form, how._replace(residual=kept))
        bring_back((near, bodies), (kept, how.residual))

    def _decode_rows(self, bodies: Tensor, out: Tensor, form: WireFormat) -> None:
        near = out.cpu()
        super()._decode_rows(bodies.cpu(), near, form)
        bring_back((near, out))

    def _sum_rows(self, bodies: Tensor, out: Tensor, form: WireFormat, add: bool) -> None:
        near = out.cpu()
        super()._sum_rows(bodies.cpu(), near, form, add)
        bring_back((near, out))


def _filled(nbytes: int) -> int:
    return -(-nbytes // _FILLED) * _FILLED
