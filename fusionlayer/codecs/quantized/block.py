"""The base class of codecs that send small numbers with a scale for each block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from ... import native
from ...native.wire import Plane
from ..native import NativeCodec

_SCALE_PLANES = {
    native.SCALE_F32: ("scales", 1, torch.float32),
    native.SCALE_DUAL: ("scales", 2, torch.float32),
    native.SCALE_E8M0: ("scales", 1, torch.uint8),
    native.SCALE_BF16: ("scales", 1, torch.bfloat16),
}


class BlockCodec(NativeCodec):
    """A codec of the core's ``FL_BLOCK``. A subclass gives its number format, its kind of scale and its block.

    A block with a value that is not finite decodes to NaN. A block whose values are all below 2^-100 decodes to zeros.
    ``wire_format.md`` describes the planes.
    """

    @property
    @abstractmethod
    def _format(self) -> str:
        """One of ``native.FORMATS``."""

    @property
    @abstractmethod
    def _scale(self) -> int:
        """One of ``native.SCALE_*``."""

    @property
    def _rotated(self) -> bool:
        """Whether blocks are rotated by a Hadamard matrix."""
        return False

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        blocks = -(-numel // self.block)
        if self._scale == native.SCALE_MESSAGE:
            scales = Plane("amax", min(numel, 1), torch.float32)
        else:
            name, count, kind = _SCALE_PLANES[self._scale]
            scales = Plane(name, count * blocks, kind)
        return [scales, Plane("codes", blocks * self.block * native.FORMAT_BITS[self._format] // 8, torch.uint8)]

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        flags = native.BLOCK_HADAMARD * self._rotated
        return native.CodecParams(native.BLOCK, (native.FORMATS[self._format], self.block, self._scale, flags))
