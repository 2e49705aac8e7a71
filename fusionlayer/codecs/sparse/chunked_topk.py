"""``chunked_topk``: of each chunk of a tensor the largest magnitudes, in a few bits each."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ... import native
from ...base.errors import ConfigError
from ...native.wire import Plane
from ...observe.timeline import here
from ..encoding import Encoding
from ..native import NativeCodec
from ..state import TensorState


@dataclass(frozen=True)
class ChunkedTopK(NativeCodec, name="chunked_topk"):
    """The largest magnitudes of each chunk, as a sign and one of a few levels (SparseLoCo, arXiv 2508.15706).

    Each chunk sends k = max(1, floor(density * chunk)) elements, among equals the first. A shorter last chunk sends as
    large a share, at least one. So the size of a message follows from options and numel: ranks exchange no counts, and
    a device is never waited for. Positions take 8 bits for each element that goes at the default density, where no code
    could take fewer than 7.3. The residual keeps unsent values and the loss of quantising.

    A chunk with a value that is not finite decodes to NaN, and its residual stays as it was. A chunk whose values are
    all below 2^-100 sends nothing. ``wire_format.md`` describes the planes.

    Attributes:
        density: share of the elements that are sent.
        bits: bits of a value: 2, its sign and one of two magnitudes, which are means; 3, 4 or 8, its sign and one of 4,
            8 or 128 magnitudes, evenly spaced from the smallest of the chunk to its largest; or 32, the value itself.
        chunk: elements that compete with each other; a power of two from 64 to 4096.
    """

    align: ClassVar[int] = 16
    ahead: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = True

    density: float = 1 / 64
    bits: int = 2
    chunk: int = 4096

    def __post_init__(self) -> None:
        if isinstance(self.density, bool) or not isinstance(self.density, (int, float)) or not 0 < self.density <= 1:
            raise ConfigError(f"chunked_topk codec: density={self.density!r}; expected a share above 0, at most 1")
        if type(self.bits) is not int or self.bits not in (2, 3, 4, 8, 32):
            raise ConfigError(f"chunked_topk codec: bits={self.bits!r}; expected 2, 3, 4, 8 or 32")
        if type(self.chunk) is not int or self.chunk not in (64, 128, 256, 512, 1024, 2048, 4096):
            raise ConfigError(f"chunked_topk codec: chunk={self.chunk!r}; expected a power of two from 64 to 4096")

    @property
    def block(self) -> int:
        """Elements of a chunk."""
        return self.chunk

    def target(self, numel: int) -> int:
        """Return how many of ``numel`` elements are sent; a pure function."""
        full, rest = divmod(numel, self.chunk)
        return full * self._kept + (max(1, self._kept * rest // self.chunk) if rest else 0)

    def encode_tensor(
        self, x: Tensor, payload: Tensor, state: TensorState, *, scale: float = 1.0, ranks: int = 1, seed: int = 0
    ) -> None:
        if scale == 1:
            return self.encode(x, payload, residual=state.residual)
        self._check_tensors(x, payload.unsqueeze(0))
        ((rows, _, _, form),) = self._runs(x.numel(), payload.unsqueeze(0), x.numel(), x.dtype)
        spec = self._seeded(form, x.dtype, Encoding())
        (spec.param[3],) = struct.unpack("<I", struct.pack("<f", scale))
        with here.doing("fusionlayer: encode"):
            native.encode(spec, form.offsets, x, state.residual, rows[:, form.body :])
            if self.header:
                self._seal(payload, form)

    @property
    def _kept(self) -> int:
        return max(1, math.floor(self.density * self.chunk))

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        full, rest = divmod(numel, self.chunk)
        whole, last = self._chunk_bytes(self.chunk, self._kept), (0, 0)
        if rest:
            last = self._chunk_bytes(rest, max(1, self._kept * rest // self.chunk))
        return [
            Plane("levels", 2 * -(-numel // self.chunk), torch.bfloat16),
            Plane("positions", full * whole[0] + last[0], torch.uint8),
            Plane("codes", full * whole[1] + last[1], torch.uint8),
        ]

    def _chunk_bytes(self, size: int, kept: int) -> tuple[int, int]:
        """Return the bytes of positions and codes of a chunk of ``size`` elements, of which ``kept`` are sent."""
        low = min(range(12, -1, -1), key=lambda low: kept * low + (size - 1 >> low))
        return -(-(kept + (size - 1 >> low)) // 8) + -(-kept * low // 8), -(-kept * self.bits // 8)

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        return native.CodecParams(native.CHUNKED, (self.bits, self.chunk, self._kept))
