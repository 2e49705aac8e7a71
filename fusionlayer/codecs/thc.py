"""``thc``: rotated values on a few levels that stand for integers, so that sums of codes are decoded only once."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from .. import native
from ..errors import ConfigError
from ..seeds import derive_seed
from ..wire import Plane, WireFormat
from ._base import Codec
from ._encoding import Encoding
from ._homomorphic import HomomorphicCodec
from ._native import RUN, NativeCodec

if TYPE_CHECKING:
    from ..transport import Transport

__all__ = ["THC"]

_BITS = 4
# The largest integer that a code stands for. "normal" is the table of THC: its 16 levels lie on a grid of 31 so that
# normal values, cut off at 2.15 deviations, lose least.
_LARGEST = {"normal": 30, "uniform": 15}
_TINY = 2.0**-100


@dataclass(frozen=True)
class THC(HomomorphicCodec, NativeCodec, name="thc"):
    """Four bits on levels that are multiples of one step, after a randomised rotation (THC, NSDI 2024).

    Values get random signs, are rotated in blocks by a Hadamard matrix and are divided by their root mean square.
    Values beyond ``clip`` root mean squares are cut off; the others are rounded to one of 16 levels. Rotated values are
    nearly normal, so levels need not be fitted to the data. ``agree`` takes the largest root mean square of all ranks,
    and signs from the seed. A code then stands for the same integer on all ranks, and the collective ``integer_sum``,
    which more than two ranks take unless you name another one, adds integers without decoding them. Other collectives
    treat it as any codec and encode sums anew.

    A shorter last block is filled up with zeros; a block that is the only one is filled up to a power of two. A NaN or
    Inf makes the whole message NaN. A message has one root mean square, so blocks much larger than the others are cut
    off; error feedback makes up for that over time.

    Attributes:
        levels: "normal", the table of THC for 4 bits and a grid of 31, or "uniform".
        rounding: "stochastic", unbiased but for what is cut off, seeded and reproducible; or "nearest".
        block_size: elements that are rotated together; a power of two from 32 to 1024.
        clip: where values are cut off, in root mean squares, 2 to 4. THC's table is made for the default, outside of
            which 1/32 of normal values lie.
        rms: () f32, the root mean square that ranks agreed on; None takes that of each message.
        signs: seed of the random signs that ranks agreed on, 32 bits.
    """

    local: ClassVar[bool] = False  # all elements of a message share the root mean square

    levels: Literal["normal", "uniform"] = "normal"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    block_size: int = 1024
    clip: float = 2.1538746940614564
    rms: Tensor | None = field(default=None, kw_only=True, compare=False, repr=False)
    signs: int = field(default=0, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.levels not in _LARGEST:
            raise ConfigError(f"thc codec: levels={self.levels!r}; expected 'normal' or 'uniform'")
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError(f"thc codec: rounding={self.rounding!r}; expected 'stochastic' or 'nearest'")
        if type(self.block_size) is not int or self.block_size not in (32, 64, 128, 256, 512, 1024):
            raise ConfigError(f"thc codec: block_size={self.block_size!r}; expected a power of two from 32 to 1024")
        if not isinstance(self.clip, int | float) or not 2 <= self.clip <= 4:
            raise ConfigError(f"thc codec: clip={self.clip!r}; expected 2 to 4 root mean squares")

    @property
    def block(self) -> int:
        """The block size."""
        return self.block_size

    @property
    def largest(self) -> int:
        """30, or 15 with uniform levels."""
        return _LARGEST[self.levels]

    def agree(
        self,
        x: Tensor,
        transport: Transport,
        *,
        seed: int = 0,
        residual: Tensor | None = None,
        chunks: Sequence[int] | None = None,
        movable: bool = True,
    ) -> Codec:
        """Return the codec with the largest root mean square of all ranks' ``x``, and the signs of ``seed``."""
        return self._agree_on(_root_mean_square(x, residual), transport, seed)

    def agree_rows(self, rows: Tensor, numel: int, transport: Transport, *, seed: int = 0) -> Codec:
        """Return the codec with the largest root mean square of all ranks' rows: no row is cut off more than alone."""
        every = torch.stack([_root_mean_square(row[:numel], None) for row in rows])
        return self._agree_on(every.amax(), transport, seed)

    def _agree_on(self, rms: Tensor, transport: Transport, seed: int) -> Codec:
        largest = rms.view(1)
        transport.all_reduce_max(largest)
        return replace(self, rms=_usual(largest[0]), signs=derive_seed(seed, 1) & 0xFFFFFFFF)

    def add_codes(self, payloads: Tensor, total: Tensor, numel: int, dtype: torch.dtype) -> None:
        """Write the sum of the integers of ``payloads`` (ranks, capacity) into ``total`` (sum_bytes,) uint8."""
        form = self.wire(numel, dtype)
        bodies = self._verified(payloads, form)
        native.add_codes(self._known(form, dtype), form.offsets, bodies, total)

    def decode_sums(self, totals: Tensor, out: Tensor, chunk: int, ranks: int) -> None:
        """Fill ``out[i * chunk : (i + 1) * chunk]`` from row i of ``totals``, by the agreed root mean square."""
        assert self.rms is not None, "integers of several ranks are decoded by what the ranks agreed on"
        for total, piece in zip(totals, out.split(chunk), strict=False):
            if piece.numel():
                spec = self._spec(piece.numel(), out.dtype, out.dtype)
                spec.param[0] |= ranks << native.THC_RANKS_SHIFT
                native.decode_codes_sum(spec, self.rms, total, piece)

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        codes = Plane("codes", self._count(numel) * _BITS // 8, torch.uint8)
        return [Plane("rms", min(numel, 1), torch.float32), codes]

    def _count(self, numel: int) -> int:
        block = self._rotated(numel)
        return -(-numel // block) * block

    def _rotated(self, numel: int) -> int:
        """Return how many elements of a message of ``numel`` are rotated together."""
        return min(self.block_size, max(RUN, 1 << max(numel - 1, 0).bit_length()))

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        flags = native.THC_UNIFORM * (self.levels == "uniform") | native.THC_STOCHASTIC * (self.rounding != "nearest")
        return native.CodecParams(native.THC, (flags, self.block_size, 0, self.signs))

    def _spec(self, numel: int, encoded: torch.dtype, dtype: torch.dtype) -> native.Spec:
        spec = super()._spec(numel, encoded, dtype)
        # Half steps of the levels in one root mean square. The rotation is not normalised, hence the square root.
        steps = self.largest / (self.clip * math.sqrt(self._rotated(numel)))
        (spec.param[2],) = struct.unpack("I", struct.pack("f", steps))
        return spec

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        n = form.numel
        if not n:
            return
        for i, body in enumerate(bodies):
            rms = self.rms
            if rms is None:
                rms = _usual(_root_mean_square(x[i * n : (i + 1) * n], how.part(i * n, (i + 1) * n, 0).residual))
            body[: rms.itemsize].copy_(rms.view(1).view(torch.uint8))
        super()._encode_rows(x, bodies, form, how)

    def _recode_rows(self, bodies: Tensor, body: Tensor, form: WireFormat, x: Tensor | None, how: Encoding) -> None:
        # The agreed root mean square is that of summands. A sum is larger, so it gets a root mean square of its own.
        Codec._recode_rows(replace(self, rms=None), bodies, body, form, x, how)


def _root_mean_square(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return () f32: the root mean square of ``x + residual`` (n,)."""
    return native.root_mean_square(x.float() if residual is None else x + residual)


def _usual(rms: Tensor) -> Tensor:
    """Return ``rms`` () f32, but NaN if it is not finite and 0 if it is too small to divide by."""
    return torch.where(rms.isfinite(), torch.where(rms >= _TINY, rms, 0.0), math.nan)
