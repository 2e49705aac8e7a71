"""``thc`` and ``tahquant`` written down a second time, in torch operations on whole messages."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from fusionlayer.codecs import TorchCodec
from fusionlayer.codecs.native import RUN
from fusionlayer.codecs.research.tahquant import TAHQuant
from fusionlayer.codecs.research.thc import THC
from fusionlayer.native.wire import Plane

from . import arithmetic

_TINY = 2.0**-100
_NO_PIVOT = 255
SECTION = 1024  # elements of thc that share a root mean square
SECTION_TOKENS = 32  # of tahquant, among which coarse ones are chosen
INTEGERS = {"normal": (0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30), "uniform": tuple(range(16))}
# Units of the values that are rounded, in a half step of the levels; and how many of 65536 parts of a step a unit is.
_UNITS = {"normal": 65536 / 6, "uniform": 65536 / 2}
_PARTS = {"normal": 3, "uniform": 1}


def hadamard(x: Tensor, block: int) -> Tensor:
    return torch.from_numpy(arithmetic.hadamard(x.reshape(-1, block).numpy())).view(-1)


def pack_runs(codes: Tensor, bits: int) -> Tensor:
    return torch.from_numpy(arithmetic.pack_runs(codes.numpy(), bits))


def unpack_runs(data: Tensor, bits: int) -> Tensor:
    return torch.from_numpy(arithmetic.unpack_runs(data.numpy(), bits))


def random_words(seed: int, count: int) -> Tensor:
    """Return the random bits of the first of each 32 of ``count`` elements."""
    return torch.from_numpy(arithmetic.random_bits(seed, np.arange(0, count, RUN, dtype=np.uint64)).view(np.int32))


@dataclass(frozen=True)
class TorchTHC(TorchCodec):
    """What ``THC`` with the same options is."""

    codec: THC = field(default_factory=THC)

    @property
    def block(self) -> int:
        return self.codec.block

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        return self.codec._planes(numel, dtype)

    def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
        count, block, device = self.codec._count(x.numel()), self.codec._rotated(x.numel()), x.device
        rms = section_rms(x)
        if self.codec.rms is not None:
            rms = self.codec.rms[offset // SECTION :][: len(rms)]
        usual = rms.isfinite() & (rms >= _TINY)
        value = torch.zeros(count, device=device)
        # Scaled before it is rotated: no sum of a block overflows.
        units = torch.tensor(self._steps_per_rms(block), device=device) * self.units
        value[: x.numel()] = x.float() * _of_each(units / torch.where(usual, rms, 1.0), x.numel())
        code = self.round(hadamard(self._with_signs(value), block), seed, offset)
        planes[0].copy_(torch.where(rms.isfinite(), torch.where(usual, rms, 0.0), math.nan))
        planes[1].copy_(pack_runs(torch.where(_of_each(usual, count), code, 0), 4))

    def round(self, value: Tensor, seed: int, offset: int) -> Tensor:
        """Return the codes of ``value`` (m,), in units."""
        places = self.places(value.clamp(-self.units * self.codec.largest, self.units * self.codec.largest).round())
        random = torch.from_numpy(arithmetic.halves(seed, offset, value.numel())).int()
        return places + (random if self.codec.rounding == "stochastic" else 32767) >> 16

    def places(self, units: Tensor) -> Tensor:
        """Return where whole numbers of ``units`` (m,) are among the levels, in 65536 parts from each to the next."""
        levels, value = 32768 * self.grid(units.device).double(), _PARTS[self.codec.levels] * units.double()
        above = torch.bucketize(value, levels).clamp(1, len(levels) - 1)
        low, steps = levels[above - 1], (levels[above] - levels[above - 1]) / 65536
        return (65536 * (above - 1) + (value - low) / steps).round().int()

    @property
    def units(self) -> float:
        """Units of the values that are rounded, in a half step of the levels; f32."""
        return float(torch.tensor(_UNITS[self.codec.levels]))

    def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
        self._reconstruct(self.grid(out.device)[unpack_runs(planes[1], 4)], planes[0], out)

    def integers(self, planes: Sequence[Tensor]) -> Tensor:
        integers = torch.tensor(INTEGERS[self.codec.levels], dtype=torch.int32, device=planes[1].device)
        return integers[unpack_runs(planes[1], 4)]

    def decode_integers(self, integers: Tensor, count: int, out: Tensor) -> None:
        assert self.codec.rms is not None, "integers of several ranks are decoded by what the ranks agreed on"
        rms = self.codec.rms[: -(-out.numel() // SECTION)]
        self._reconstruct((2 * integers - count * self.codec.largest).float(), rms, out)

    def _reconstruct(self, value: Tensor, rms: Tensor, out: Tensor) -> None:
        """Fill ``out`` (n,) from ``value`` (m,) in half steps of the levels: whole numbers, rotated exactly."""
        block = self.codec._rotated(out.numel())
        factor = rms / (self._steps_per_rms(block) * block)
        factor = torch.where(factor.isfinite(), factor, math.nan)
        value = self._with_signs(hadamard(value, block) * _of_each(factor, value.numel()))[: out.numel()]
        out.copy_(value + 0.0)  # -0 becomes 0

    def grid(self, device: torch.device) -> Tensor:
        """Return (16,) f32: the levels in half steps, -largest to largest."""
        return 2 * torch.tensor(INTEGERS[self.codec.levels], dtype=torch.float32, device=device) - self.codec.largest

    def _steps_per_rms(self, block: int) -> float:
        """Return how many half steps one root mean square is, after a rotation that is not normalised."""
        return self.codec.largest / (self.codec.clip * math.sqrt(block))

    def _with_signs(self, value: Tensor) -> Tensor:
        """Return ``value`` (m,) with the signs of some elements changed, the same ones again and again."""
        words = random_words(self.codec.signs, value.numel()).view(-1, 1)
        changed = words >> torch.arange(RUN, device=value.device) & 1
        return torch.where(changed.view(-1) == 1, -value, value)


def _of_each(of_sections: Tensor, numel: int) -> Tensor:
    """Return what each of ``numel`` elements has of its section."""
    return of_sections.repeat_interleave(SECTION)[:numel]


def section_rms(x: Tensor) -> Tensor:
    """Return (sections,) f32: NaN where a value is not finite, 0 where the mean square is of no use."""
    each = torch.nn.functional.pad(x.float(), (0, -x.numel() % SECTION)).view(-1, SECTION).double()
    amax = each.abs().amax(1)
    usual = amax.isfinite() & (amax >= _TINY)
    # By numpy: torch's exp2 and sqrt come from MKL, which rounds them otherwise on some processors.
    unit = torch.from_numpy(np.ldexp(1.0, torch.frexp(torch.where(usual, amax, 1.0))[1].numpy() - 9))
    squares = torch.where(usual.unsqueeze(1), each / unit.unsqueeze(1), 0.0).round().square().sum(1)
    elements = torch.full_like(squares, SECTION)
    elements[-1:] = x.numel() - SECTION * (len(elements) - 1)
    rms = torch.from_numpy(np.sqrt((squares.float() / elements.float()).numpy())) * unit.float()
    return torch.where(amax.isfinite(), torch.where(usual & (rms >= _TINY), rms, 0.0), math.nan)


@dataclass(frozen=True)
class TorchTAHQuant(TorchCodec):
    """What ``TAHQuant`` with the same options is."""

    codec: TAHQuant = field(default_factory=TAHQuant)

    @property
    def block(self) -> int:
        return self.codec.block

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        return self.codec._planes(numel, dtype)

    def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
        chosen, pivots, offsets, steps, codes = planes
        tokens, coarse = self.codec._tokens(x.numel())
        value = torch.zeros(tokens * self.codec.channels, device=x.device)
        value[: x.numel()] = x
        fine_bits = torch.full((tokens,), self.codec.bits, device=x.device)
        if coarse:
            marks = torch.zeros(-(-tokens // RUN) * RUN, dtype=torch.int32, device=x.device)
            marks[:tokens] = self._choose(entropy(value.view(tokens, -1)))
            chosen.copy_(pack_runs(marks, 1))
            fine_bits -= marks[:tokens]

        tiles = value.view(-1, self.codec.tile)
        tiles, pivot = self._rotate(tiles)
        most = (1 << fine_bits.repeat_interleave(self.codec.channels // self.codec.tile)) - 1
        low, high = tiles.amin(1), tiles.amax(1)
        usual = torch.maximum(high, -low) >= _TINY  # false for NaN
        start = bf16_below(torch.where(usual, low, 0.0) + 0.0)  # -0 becomes 0
        step = bf16_above((torch.where(usual, high, 0.0) - start.float()) / most)
        finite = low.isfinite() & high.isfinite() & start.isfinite() & step.isfinite()
        start, step = (torch.where(finite, each, math.nan) for each in (start, step))
        inverse = torch.where(finite & (step > 0), 1.0 / step.float().clamp(min=2.0**-126), 0.0)
        code = ((tiles - torch.where(finite, start.float(), 0.0)[:, None]) * inverse[:, None]).round()
        code = torch.minimum(code.nan_to_num(0.0).clamp(min=0), most[:, None])

        pivots.copy_(torch.where(finite, pivot, _NO_PIVOT))
        offsets.copy_(start)
        steps.copy_(step)
        self._pack(code.to(torch.int32).view(tokens, -1), fine_bits, codes)

    def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
        chosen, pivots, offsets, steps, codes = planes
        tokens, coarse = self.codec._tokens(out.numel())
        marks = unpack_runs(chosen, 1)[:tokens] if coarse else torch.zeros(tokens, device=out.device)
        code = self._unpack(codes, marks).view(-1, self.codec.tile)
        start, step = (torch.where(each.isfinite(), each.float(), math.nan) for each in (offsets, steps))
        value = self._rotate_back(code * step[:, None] + start[:, None], pivots.long())
        out.copy_(value.view(-1)[: out.numel()])

    def _rotate(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``tiles`` (k, tile), those with a pivot rotated, and the places of the pivots, (k,)."""
        largest = tiles.abs().topk(2, 1)
        stands_out = (largest.values[:, 0] >= 2 * largest.values[:, 1]) & (largest.values[:, 0] > 0)
        pivot = torch.where(stands_out, largest.indices[:, 0], 0)
        rotated = hadamard(_swapped(tiles, pivot).view(-1), self.codec.tile).view_as(tiles) * (
            1 / math.sqrt(self.codec.tile)
        )
        return torch.where(stands_out[:, None], rotated, tiles), torch.where(stands_out, pivot, _NO_PIVOT)

    def _rotate_back(self, tiles: Tensor, pivot: Tensor) -> Tensor:
        stands_out = pivot < self.codec.tile
        rotated = hadamard(tiles.reshape(-1), self.codec.tile).view_as(tiles) * (1 / math.sqrt(self.codec.tile))
        return torch.where(stands_out[:, None], _swapped(rotated, torch.where(stands_out, pivot, 0)), tiles)

    def _sections(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first token of each section, the one behind its last, and how many of its tokens are coarse."""
        for first in range(0, tokens, SECTION_TOKENS):
            stop = min(first + SECTION_TOKENS, tokens)
            before, until = (math.floor(Fraction(str(self.codec.coarse)) * token) for token in (first, stop))
            yield first, stop, until - before

    def _choose(self, entropies: Tensor) -> Tensor:
        """Return (tokens,) int32: 1 for those of lowest entropy of each section, else 0."""
        marks = torch.zeros_like(entropies, dtype=torch.int32)
        for first, stop, coarse in self._sections(len(entropies)):
            marks[first + entropies[first:stop].argsort(stable=True)[:coarse]] = 1
        return marks

    def _pack(self, codes: Tensor, bits: Tensor, data: Tensor) -> None:
        """Write ``codes`` (tokens, channels): of each section those of fine tokens, then those of coarse ones."""
        packed = []
        for first, stop, coarse in self._sections(len(codes)):
            order = first + bits[first:stop].argsort(stable=True, descending=True)
            fine, less = codes[order].split((stop - first - coarse, coarse))
            packed += [pack_runs(fine, self.codec.bits)] if len(fine) else []
            packed += [pack_runs(less, self.codec.bits - 1)] if coarse else []
        data.copy_(torch.cat(packed))

    def _unpack(self, data: Tensor, marks: Tensor) -> Tensor:
        """Return (tokens, channels) int32; ``marks`` (tokens,) says which tokens are coarse."""
        codes = torch.empty(len(marks), self.codec.channels, dtype=torch.int32, device=data.device)
        for first, stop, coarse in self._sections(len(marks)):
            order, rows = first + marks[first:stop].argsort(stable=True), []
            for count, bits in ((stop - first - coarse, self.codec.bits), (coarse, self.codec.bits - 1)):
                nbytes = count * self.codec.channels * bits // 8
                rows += [unpack_runs(data[:nbytes], bits)] if count else []
                data = data[nbytes:]
            codes[order] = torch.cat(rows).view(stop - first, -1)
        return codes


def entropy(tokens: Tensor) -> Tensor:
    """Return (k,) f64: the entropy of the magnitudes of each of ``tokens`` (k, channels), in bits; 0 where all are 0.

    The logarithm of elements is that of the wire format.
    """
    magnitude = tokens.float().abs()
    total = magnitude.double().sum(1)
    mean = (magnitude.double() * log2(magnitude)).sum(1) / total.clamp(min=1e-300)
    return torch.where(total > 0, total.log2() - mean, 0.0)


def log2(x: Tensor) -> Tensor:
    """Return f64: the logarithm of ``x`` f32 to 1e-3, as the wire format has it."""
    bits = x.view(torch.int32)
    u = ((bits & 0x7FF800) | 0x3F800000).view(torch.float32).double() - 1
    return bits.double() / 2**23 - 127 + u * (1 - u) * (float.fromhex("0x1.b01p-2") - 5 / 32 * u)


def _swapped(tiles: Tensor, place: Tensor) -> Tensor:
    """Return ``tiles`` (k, tile) with element ``place`` (k,) and the first of each in each other's place."""
    swapped, rows = tiles.clone(), torch.arange(len(tiles), device=tiles.device)
    swapped[rows, place] = tiles[:, 0]
    swapped[:, 0] = tiles[rows, place]
    return swapped


def bf16_below(x: Tensor) -> Tensor:
    """Return ``x`` f32 as bf16, rounded to smaller values."""
    bits = x.view(torch.int32)
    return (torch.where(bits < 0, bits + 0xFFFF, bits) >> 16).to(torch.int16).view(torch.bfloat16)


def bf16_above(x: Tensor) -> Tensor:
    """Return ``x`` f32, not negative, as bf16, rounded to larger values."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
