"""``thc``: rotated values on a few levels that stand for integers, so that sums of codes are decoded only once."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ... import native
from ...base.errors import ConfigError
from ...base.libraries import Spec
from ...base.seeds import derive_seed
from ...native.wire import Plane, WireFormat
from ..base import Codec
from ..encoding import Encoding
from ..homomorphic import HomomorphicCodec
from ..native import RUN, NativeCodec

if TYPE_CHECKING:
    from ...transport import Transport

_BITS = 4
# The largest integer that a code stands for. "normal" is the table of THC: its 16 levels on a grid of 31 minimize the
# loss of normal values, cut off at 2.15 deviations.
_LARGEST = {"normal": 30, "uniform": 15}
# Elements that share a root mean square: whole blocks, of whatever size.
_SECTION = 1024


@dataclass(frozen=True)
class THC(HomomorphicCodec, NativeCodec, name="thc"):
    """Four bits on levels that are multiples of one step, after a randomised rotation (THC, NSDI 2024).

    Values get random signs, are rotated in blocks by a Hadamard matrix, and are divided by the root mean square of
    their 1024 elements. Values beyond ``clip`` root mean squares are cut off; the others are rounded to one of 16
    levels. Rotated values are nearly normal, so levels need not be fitted to the data. The collective ``integer_sum``,
    which more than two ranks take unless you name another one, adds integers without decoding them. For
    ``integer_sum``, ``agree`` takes the largest root mean squares of all ranks, and signs from the seed, so that a code
    stands for the same integer on all ranks. Other collectives treat it as any codec and encode sums again.

    A shorter last block is filled up with zeros; a block that is the only one is filled up to a power of two. A NaN or
    Inf makes the 1024 elements NaN among which it is.

    Attributes:
        levels: "normal", the table of THC for 4 bits and a grid of 31, or "uniform".
        rounding: "stochastic", seeded and reproducible, unbiased except for cut-off values; or "nearest".
        block_size: elements that are rotated together; a power of two from 32 to 1024.
        clip: where values are cut off, in root mean squares, 2 to 4. THC's table is made for the default, outside of
            which 1/32 of normal values lie.
        rms: (sections,) f32, the root mean squares of a tensor that ranks agreed on; ``offset`` is the place in it.
            None takes those of each message.
        signs: seed of the random signs that ranks agreed on, 32 bits.
    """

    local: ClassVar[bool] = False  # a message of less than a block is rotated in a smaller one

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
        """1024: elements that share a root mean square."""
        return _SECTION

    @property
    def largest(self) -> int:
        """30, or 15 with uniform levels."""
        return _LARGEST[self.levels]

    def agree(self, x: Tensor, transport: Transport, *, seed: int = 0, residual: Tensor | None = None) -> THC:
        """Return the codec with the largest root mean squares of all ranks' ``x``, and the signs of ``seed``."""
        rms = native.thc_rms(self.core_spec(x.numel(), x.dtype), x, residual, self._sections(x.numel()))
        transport.all_reduce_max(rms)
        return replace(self, rms=rms, signs=derive_seed(seed, 1) & 0xFFFFFFFF)

    def add_codes(self, payloads: Tensor, total: Tensor, numel: int, dtype: torch.dtype) -> None:
        """Write the sum of the integers of ``payloads`` (ranks, capacity) into ``total`` (sum_bytes,) uint8."""
        form = self.wire(numel, dtype)
        bodies = self._verified(payloads, form)
        native.add_codes(self._known(form, dtype), form.offsets, bodies, total)

    def decode_sums(self, totals: Tensor, out: Tensor, chunk: int, ranks: int) -> None:
        """Fill ``out[i * chunk : (i + 1) * chunk]`` from row i of ``totals``, by the agreed root mean squares."""
        for i, (total, piece) in enumerate(zip(totals, out.split(chunk), strict=False)):
            if piece.numel():
                spec = self._spec(piece.numel(), out.dtype, out.dtype)
                spec.param[0] |= ranks << native.THC_RANKS_SHIFT
                # A plane begins at a multiple of 16 bytes, which a copy does.
                rms = self._agreed(i * chunk, piece.numel()).clone(memory_format=torch.contiguous_format)
                native.decode_codes_sum(spec, rms, total, piece)

    def _agreed(self, first: int, numel: int) -> Tensor:
        """Return the agreed root mean squares of ``numel`` elements from number ``first`` on."""
        assert self.rms is not None, "integers of several ranks are decoded by what the ranks agreed on"
        start = first // _SECTION
        return self.rms[start : start + self._sections(numel)]

    def _sections(self, numel: int) -> int:
        return -(-numel // _SECTION)

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        codes = Plane("codes", self._count(numel) * _BITS // 8, torch.uint8)
        return [Plane("rms", self._sections(numel), torch.float32), codes]

    def _count(self, numel: int) -> int:
        block = self._rotated(numel)
        return -(-numel // block) * block

    def _rotated(self, numel: int) -> int:
        """Return how many elements of a message of ``numel`` are rotated together."""
        return min(self.block_size, max(RUN, 1 << max(numel - 1, 0).bit_length()))

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        flags = native.THC_UNIFORM * (self.levels == "uniform") | native.THC_STOCHASTIC * (self.rounding != "nearest")
        flags |= native.THC_GIVEN * (self.rms is not None)
        return native.CodecParams(native.THC, (flags, self.block_size, 0, self.signs))

    def _spec(self, numel: int, encoded: torch.dtype, dtype: torch.dtype) -> Spec:
        spec = super()._spec(numel, encoded, dtype)
        # Half steps of the levels in one root mean square. The rotation is not normalised, hence the square root.
        steps = self.largest / (self.clip * math.sqrt(self._rotated(numel)))
        (spec.param[2],) = struct.unpack("I", struct.pack("f", steps))
        return spec

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        if self.rms is not None and form.numel:
            rms = self._agreed(how.offset, x.numel()).view(len(bodies), -1)
            bodies[:, : rms.size(1) * rms.itemsize].view(rms.dtype).copy_(rms)
        super()._encode_rows(x, bodies, form, how)

    def _recode_rows(self, bodies: Tensor, body: Tensor, form: WireFormat, x: Tensor | None, how: Encoding) -> None:
        # Agreed root mean squares belong to summands. A sum is larger, so it gets root mean squares of its own.
        Codec._recode_rows(replace(self, rms=None), bodies, body, form, x, how)
