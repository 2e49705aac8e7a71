"""``rans``: lossless messages whose exponents an entropy coder shortens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import native
from ...native.wire import WireFormat, aligned
from ..lossless.exponents import ROW_ALIGNMENT, ExponentCodec, copying

_BLOCK, _LANES, _CARRIED, _SYMBOLS, _FILLED = 16384, 32, 64, 256, 64


@dataclass(frozen=True)
class Rans(ExponentCodec, name="rans"):
    """The same bits in as few bytes as exponents allow, by interleaved rANS with one table of frequencies per message.

    A Gaussian takes 10.6 bits of bf16's 16, 13.5 of f16's 16, and 26.6 of f32's 32, regardless of its sigma. Other
    distributions of exponents take their entropy. ``zip`` is ten times as fast and is measured by this ratio; on slow
    networks ``rans`` is worth its time. A message has at most 16 bytes more than its elements.

    A message that contradicts itself is an error on the CPU. On CUDA, where the host does not wait, each block of
    16,384 elements that does is NaN.
    """

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        return native.CodecParams(native.RANS, (native.DTYPES[dtype],))

    def _static_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of frequencies, ends and states of blocks, bytes, and lower halves."""
        blocks = -(-numel // _BLOCK)
        told = numel - numel // _BLOCK * _CARRIED
        low = 2 * numel if dtype is torch.float32 else 0
        return _filled(2 * _SYMBOLS + 4 * blocks) + 4 * _LANES * blocks + _filled(told) + _filled(low)

    def _sum_rows(self, bodies: Tensor, out: Tensor, form: WireFormat, add: bool) -> None:
        if not bodies.is_cuda:
            return super()._sum_rows(bodies, out, form, add)
        # A warp has a block of one message at a time: so messages are decoded first, and then summed as elements.
        native.decode_sum(copying(form, out.dtype), [0], self._elements(bodies, form), out, add=add)

    def _elements(self, bodies: Tensor, form: WireFormat) -> Tensor:
        """Return the elements of messages, a row (uint8) for each, as messages of ``raw``."""
        nbytes, spec = form.numel * form.dtype.itemsize, self._known(form, form.dtype)
        rows = torch.empty(bodies.size(0), aligned(nbytes, ROW_ALIGNMENT), dtype=torch.uint8, device=bodies.device)
        # All of them at once where no gaps are between rows.
        for some, row in [(bodies, rows)] if rows.size(1) == nbytes else zip(bodies, rows, strict=True):
            native.decode(spec, form.offsets, some, row[..., :nbytes].view(form.dtype))
        return rows


def _filled(nbytes: int) -> int:
    return -(-nbytes // _FILLED) * _FILLED
