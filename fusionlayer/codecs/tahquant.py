"""``tahquant``: tiles of few bits for activations between the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from ..wire import Plane
from ._arithmetic import RUN, hadamard, pack_runs, unpack_runs
from ._base import registry
from ._torch import TorchCodec

__all__ = ["TAHQuant"]

_TINY = 2.0**-100
_NO_PIVOT = 255


@dataclass(frozen=True)
class TAHQuant(TorchCodec, name="tahquant"):
    """Tiles of a token's channels with their own offset and step; fewer bits where a token's energy is concentrated.

    TAH-Quant (2025): of the tokens of a message the share ``coarse`` whose magnitudes have the lowest entropy gets one
    bit less. A tile whose largest magnitude is at least twice the next one is rotated: that value, the pivot, changes
    places with the first, then a Hadamard transform spreads it evenly, all with one sign. Codes run from the smallest
    to the largest value of the tile.

    Elements are taken as tokens of ``channels`` each, the last one filled up with zeros. A tile with a NaN or Inf, or
    with a range beyond f32's, decodes to NaN; one whose values are all below 2^-100 to zeros. Offset and step are bf16,
    where the paper has f16: gradients are often below f16's smallest number.

    Attributes:
        bits: of each code: 4 (with coarse tokens 3), or 6.
        tile: elements that share an offset and a step: 32, 64 or 128.
        channels: elements of a token, at most 16384; a multiple of the tile.
        coarse: share of the tokens with one bit less; 0 with 6 bits.
    """

    local: ClassVar[bool] = False  # tokens of a message compete

    bits: int = 4
    tile: int = 64
    channels: int = 1024
    coarse: float = 0.2

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (4, 6):
            raise ConfigError(f"tahquant codec: bits={self.bits!r}; expected 4 or 6")
        if type(self.tile) is not int or self.tile not in (32, 64, 128):
            raise ConfigError(f"tahquant codec: tile={self.tile!r}; expected 32, 64 or 128")
        if type(self.channels) is not int or not 1 <= self.channels <= 1 << 14 or self.channels % self.tile:
            raise ConfigError(
                f"tahquant codec: channels={self.channels!r}; expected a multiple of {self.tile} to 16384"
            )
        if not isinstance(self.coarse, int | float) or not 0 <= self.coarse < 1:
            raise ConfigError(f"tahquant codec: coarse={self.coarse!r}; expected a share from 0 to below 1")
        if self.coarse and self.bits != 4:
            raise ConfigError(f"tahquant codec: coarse={self.coarse!r} with bits={self.bits}; expected 0, or 4 bits")

    @property
    def block(self) -> int:
        """The channels of a token."""
        return self.channels

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        tokens, coarse = self._tokens(numel)
        tiles = tokens * self.channels // self.tile
        nbytes = (tokens * self.bits - coarse) * self.channels // 8
        return [
            Plane("coarse", -(-tokens // RUN) * RUN // 8 if coarse else 0, torch.uint8),
            Plane("pivots", tiles, torch.uint8),
            Plane("offsets", tiles, torch.bfloat16),
            Plane("steps", tiles, torch.bfloat16),
            Plane("codes", nbytes, torch.uint8),
        ]

    def _tokens(self, numel: int) -> tuple[int, int]:
        """Return how many tokens a message has, and how many of them are coarse."""
        tokens = -(-numel // self.channels)
        return tokens, math.floor(self.coarse * tokens)

    def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
        chosen, pivots, offsets, steps, codes = planes
        tokens, coarse = self._tokens(x.numel())
        value = torch.zeros(tokens * self.channels, device=x.device)
        value[: x.numel()] = x
        fine_bits = torch.full((tokens,), self.bits, device=x.device)
        if coarse:
            least = _entropy(value.view(tokens, -1)).argsort(stable=True)[:coarse]
            marks = torch.zeros(-(-tokens // RUN) * RUN, dtype=torch.int32, device=x.device)
            marks[least] = 1
            chosen.copy_(pack_runs(marks, 1))
            fine_bits[least] -= 1

        tiles = value.view(-1, self.tile)
        tiles, pivot = self._rotate(tiles)
        most = (1 << fine_bits.repeat_interleave(self.channels // self.tile)) - 1
        low, high = tiles.amin(1), tiles.amax(1)
        usual = torch.maximum(high, -low) >= _TINY  # false for NaN
        start = _bf16_below(torch.where(usual, low, 0.0))
        step = _bf16_above((torch.where(usual, high, 0.0) - start.float()) / most)
        finite = low.isfinite() & high.isfinite() & start.isfinite() & step.isfinite()
        start, step = (torch.where(finite, each, math.nan) for each in (start, step))
        sizes = torch.where(finite & (step > 0), step.float(), math.inf)
        code = ((tiles - torch.where(finite, start.float(), 0.0)[:, None]) / sizes[:, None]).round()
        code = torch.minimum(code.nan_to_num(0.0).clamp(min=0), most[:, None])

        pivots.copy_(torch.where(finite, pivot, _NO_PIVOT))
        offsets.copy_(start)
        steps.copy_(step)
        self._pack(code.to(torch.int32).view(tokens, -1), fine_bits, coarse, codes)

    def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
        chosen, pivots, offsets, steps, codes = planes
        tokens, coarse = self._tokens(out.numel())
        marks = unpack_runs(chosen, 1)[:tokens] if coarse else torch.zeros(tokens, device=out.device)
        code = self._unpack(codes, marks, coarse).view(-1, self.tile)
        start, step = (torch.where(each.isfinite(), each.float(), math.nan) for each in (offsets, steps))
        value = self._rotate_back(code * step[:, None] + start[:, None], pivots.long())
        out.copy_(value.view(-1)[: out.numel()])

    def _rotate(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``tiles`` (k, tile), those with a pivot rotated, and the places of the pivots, (k,)."""
        largest = tiles.abs().topk(2, 1)
        stands_out = (largest.values[:, 0] >= 2 * largest.values[:, 1]) & (largest.values[:, 0] > 0)
        pivot = torch.where(stands_out, largest.indices[:, 0], 0)
        rotated = hadamard(_swapped(tiles, pivot).view(-1), self.tile).view_as(tiles) * (1 / math.sqrt(self.tile))
        return torch.where(stands_out[:, None], rotated, tiles), torch.where(stands_out, pivot, _NO_PIVOT)

    def _rotate_back(self, tiles: Tensor, pivot: Tensor) -> Tensor:
        stands_out = pivot < self.tile
        rotated = hadamard(tiles.reshape(-1), self.tile).view_as(tiles) * (1 / math.sqrt(self.tile))
        return torch.where(stands_out[:, None], _swapped(rotated, torch.where(stands_out, pivot, 0)), tiles)

    def _pack(self, codes: Tensor, bits: Tensor, coarse: int, data: Tensor) -> None:
        """Write ``codes`` (tokens, channels): those of fine tokens in their order, then those of coarse ones."""
        order = bits.argsort(stable=True, descending=True)
        fine, less = codes[order].split((len(codes) - coarse, coarse))
        packed = [pack_runs(fine, self.bits)] + ([pack_runs(less, self.bits - 1)] if coarse else [])
        data.copy_(torch.cat(packed))

    def _unpack(self, data: Tensor, marks: Tensor, coarse: int) -> Tensor:
        """Return (tokens, channels) int32; ``marks`` (tokens,) says which tokens are coarse."""
        tokens = len(marks)
        cut = (tokens - coarse) * self.channels * self.bits // 8
        parts = [unpack_runs(data[:cut], self.bits)] + ([unpack_runs(data[cut:], self.bits - 1)] if coarse else [])
        codes = torch.empty(tokens, self.channels, dtype=torch.int32, device=data.device)
        codes[marks.argsort(stable=True)] = torch.cat(parts).view(tokens, -1)
        return codes


def _entropy(tokens: Tensor) -> Tensor:
    """Return (k,) f64: the entropy of the magnitudes of each of ``tokens`` (k, channels); 0 where all are 0."""
    magnitude = tokens.double().abs()
    share = magnitude / magnitude.sum(1, keepdim=True).clamp(min=1e-300)
    entropy: Tensor = torch.special.entr(share).sum(1)
    return entropy


def _swapped(tiles: Tensor, place: Tensor) -> Tensor:
    """Return ``tiles`` (k, tile) with element ``place`` (k,) and the first of each in each other's place."""
    swapped, rows = tiles.clone(), torch.arange(len(tiles), device=tiles.device)
    swapped[rows, place] = tiles[:, 0]
    swapped[:, 0] = tiles[rows, place]
    return swapped


def _bf16_below(x: Tensor) -> Tensor:
    """Return ``x`` f32 as bf16, rounded to smaller values."""
    bits = x.view(torch.int32)
    return (torch.where(bits < 0, bits + 0xFFFF, bits) >> 16).to(torch.int16).view(torch.bfloat16)


def _bf16_above(x: Tensor) -> Tensor:
    """Return ``x`` f32, not negative, as bf16, rounded to larger values."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


registry.add_preset("tahquant6", "tahquant", bits=6, tile=32, coarse=0.0)
