"""``thc``: rotated values on a few levels that add up as integers: all ranks' codes are summed, then decoded once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..seeds import derive_seed
from ..wire import Plane
from ._arithmetic import RUN, hadamard, pack_runs, random_bits, rounding_noise, unpack_runs
from ._homomorphic import HomomorphicCodec
from ._torch import TorchCodec

if TYPE_CHECKING:
    from ..transport import Transport
    from ._base import Codec

__all__ = ["THC"]

_BITS = 4
# The integers that codes stand for. The first are where THC's table puts its 16 levels on a grid of 31 so that normal
# values, cut off at 2.15 deviations, lose least; twice an integer minus the largest is symmetric about 0.
_INTEGERS = {
    "normal": (0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30),
    "uniform": tuple(range(16)),
}
_TINY = 2.0**-100


@dataclass(frozen=True)
class THC(HomomorphicCodec, name="thc"):
    """Four bits on levels that are multiples of one step, after a randomised rotation (THC, NSDI 2024).

    Values get random signs, are rotated in blocks by a Hadamard matrix and divided by their root mean square; what lies
    beyond ``clip`` of it is cut off, the rest is rounded to one of 16 levels. Rotated values are nearly normal, so
    levels need not be fitted to the data. ``agree`` takes the largest root mean square of all ranks and signs from the
    seed: then a code stands for the same integer on all ranks, and the collective ``integer_sum`` adds integers without
    decoding them. Other collectives treat it as any codec, and encode sums anew.

    A last block of fewer elements is filled up with zeros, where it is the only one to a power of two. A NaN or Inf
    makes all of a message NaN. The root mean square is one number for all: blocks much larger than the others are cut
    off, which error feedback makes good with time.

    Attributes:
        levels: "normal", the table of THC for 4 bits and a grid of 31, or "uniform".
        rounding: "stochastic", unbiased but for what is cut off, seeded and reproducible; or "nearest".
        block_size: elements that are rotated together; a power of two from 32 to 4096.
        clip: where values are cut off, in root mean squares, 2 to 4. THC's table is made for the default, outside of
            which 1/32 of normal values lie.
        rms: () f32, what ranks agreed on; None takes that of each message.
        signs: seed of the random signs that ranks agreed on.
    """

    local: ClassVar[bool] = False  # all of a message share the root mean square

    levels: Literal["normal", "uniform"] = "normal"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    block_size: int = 1024
    clip: float = 2.1538746940614564
    rms: Tensor | None = field(default=None, kw_only=True, compare=False, repr=False)
    signs: int = field(default=0, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.levels not in _INTEGERS:
            raise ConfigError(f"thc codec: levels={self.levels!r}; expected 'normal' or 'uniform'")
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError(f"thc codec: rounding={self.rounding!r}; expected 'stochastic' or 'nearest'")
        if type(self.block_size) is not int or self.block_size not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
            raise ConfigError(f"thc codec: block_size={self.block_size!r}; expected a power of two from 32 to 4096")
        if not isinstance(self.clip, int | float) or not 2 <= self.clip <= 4:
            raise ConfigError(f"thc codec: clip={self.clip!r}; expected 2 to 4 root mean squares")

    @property
    def block(self) -> int:
        """The block size."""
        return self.block_size

    @property
    def largest(self) -> int:
        """30, or 15 with uniform levels."""
        return _INTEGERS[self.levels][-1]

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
        """Return the codec with the largest root mean square of all ranks' ``x``, and signs of this ``seed``."""
        rms = _root_mean_square(x if residual is None else x + residual).view(1)
        transport.all_reduce_max(rms)
        return replace(self, rms=rms[0], signs=derive_seed(seed, 1))

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        codes = Plane("codes", self._count(numel) * _BITS // 8, torch.uint8)
        return [Plane("rms", min(numel, 1), torch.float32), codes]

    def _count(self, numel: int) -> int:
        block = self._rotated(numel)
        return -(-numel // block) * block

    def _rotated(self, numel: int) -> int:
        """Return how many elements of a message of ``numel`` are rotated together."""
        return min(self.block_size, max(RUN, 1 << max(numel - 1, 0).bit_length()))

    def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
        count, block, device = self._count(x.numel()), self._rotated(x.numel()), x.device
        rms = _root_mean_square(x) if self.rms is None else self.rms
        usual = rms.isfinite() & (rms >= _TINY)
        value = torch.zeros(count, device=device)
        # Divided before it is rotated: no sum of a block overflows.
        value[: x.numel()] = x.float() / torch.where(usual, rms, 1.0)
        value = hadamard(self._with_signs(value), block) * self._steps_per_rms(block)
        code = self._round(value.clamp(-self.largest, self.largest), seed, offset)
        planes[0].copy_(torch.where(rms.isfinite(), torch.where(usual, rms, 0.0), math.nan))
        planes[1].copy_(pack_runs(torch.where(usual, code, 0), _BITS))

    def _round(self, value: Tensor, seed: int, offset: int) -> Tensor:
        """Return the codes of ``value`` (m,), in half steps of the levels."""
        levels = self._levels(value.device)
        above = torch.bucketize(value, levels).clamp(1, len(levels) - 1)
        low, high = levels[above - 1], levels[above]
        up = (value - low) / (high - low) - 0.5
        if self.rounding == "nearest":
            return above - 1 + (up > 0)
        return above - 1 + (rounding_noise(seed, offset, value.numel(), value.device) < up)

    def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
        self._reconstruct(self._levels(out.device)[unpack_runs(planes[1], _BITS)], planes[0][0], out)

    def _integers(self, planes: Sequence[Tensor]) -> Tensor:
        integers = torch.tensor(_INTEGERS[self.levels], dtype=torch.int32, device=planes[1].device)
        return integers[unpack_runs(planes[1], _BITS)]

    def _decode_integers(self, integers: Tensor, count: int, out: Tensor) -> None:
        assert self.rms is not None, "integers of several ranks are decoded by what the ranks agreed on"
        usual = self.rms.isnan() | (self.rms >= _TINY)
        self._reconstruct((2 * integers - count * self.largest).float(), torch.where(usual, self.rms, 0.0), out)

    def _reconstruct(self, value: Tensor, rms: Tensor, out: Tensor) -> None:
        """Fill ``out`` (n,) from ``value`` (m,) in half steps of the levels: whole numbers, rotated exactly."""
        block = self._rotated(out.numel())
        factor = rms / (self._steps_per_rms(block) * block)
        factor = torch.where(factor.isfinite(), factor, math.nan)
        value = self._with_signs(hadamard(value, block) * factor)[: out.numel()]
        out.copy_(value + 0.0)  # -0 becomes 0

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
        # A sum is larger than what ranks agreed on for their summands: it gets a root mean square of its own.
        alone = replace(self, rms=None)
        TorchCodec._recode_rows(alone, bodies, body, n, dtype, x, seed, offset, residual)

    def _levels(self, device: torch.device) -> Tensor:
        """Return (16,) f32: the levels in half steps, -largest to largest."""
        return 2 * torch.tensor(_INTEGERS[self.levels], dtype=torch.float32, device=device) - self.largest

    def _steps_per_rms(self, block: int) -> float:
        """Return how many half steps one root mean square is, after a rotation that is not normalised."""
        return self.largest / (self.clip * math.sqrt(block))

    def _with_signs(self, value: Tensor) -> Tensor:
        """Return ``value`` (m,) with the signs of some elements changed, the same ones again and again."""
        changed = random_bits(self.signs, 0, value.numel(), value.device) < 0
        return torch.where(changed, -value, value)


def _root_mean_square(x: Tensor) -> Tensor:
    """Return () f32; 0 of no elements. Squares of f32 cannot overflow in f64."""
    return x.double().square().sum().div(max(1, x.numel())).sqrt().float()
