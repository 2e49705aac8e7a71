"""``tahquant``: tiles of few bits for activations between the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ... import native
from ...base.errors import ConfigError
from ...native.wire import Plane, WireFormat
from ..base import Codec, registry
from ..encoding import Encoding
from ..native import RUN, NativeCodec


@dataclass(frozen=True)
class TAHQuant(NativeCodec, name="tahquant"):
    """Tiles of a token's channels with their own offset and step; fewer bits where a token's energy is concentrated.

    As in TAH-Quant (2025), the share ``coarse`` of the tokens gets one bit less: those with the lowest entropy of
    magnitudes. They are chosen among every 32 tokens (in the paper among all), so that encoding reads values just used.
    A tile whose largest magnitude is at least twice the next one is rotated: that value, the pivot, is swapped with the
    first value, then a Hadamard transform spreads it evenly, all with one sign. Codes run from the smallest to the
    largest value of the tile.

    Each ``channels`` elements are a token; the last token is filled up with zeros. A tile with a NaN or Inf, or with a
    range beyond that of f32, decodes to NaN. A tile whose values are all below 2^-100 decodes to zeros. Offset and step
    are bf16, not f16 as in the paper, since gradients are often below f16's smallest number.

    Attributes:
        bits: bits of each code: 4 (coarse tokens have 3), or 6.
        tile: elements that share an offset and a step: 32, 64 or 128.
        channels: elements of a token, at most 16384; a multiple of the tile.
        coarse: share of the tokens with one bit less; 0 with 6 bits.
    """

    local: ClassVar[bool] = False  # tokens compete

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
        return tokens, tokens * self._share >> 32

    @property
    def _share(self) -> int:
        """The share of coarse tokens in 2^-32, rounded up, so that a fifth of five tokens is one."""
        return min(math.ceil(self.coarse * (1 << 32)), (1 << 32) - 1)

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        return native.CodecParams(native.TAHQUANT, (self.bits, self.channels, self.tile, self._share))

    def _recode_rows(self, bodies: Tensor, body: Tensor, form: WireFormat, x: Tensor | None, how: Encoding) -> None:
        if self._tokens(form.numel)[1]:  # the entropy of the sum decides which tokens are coarse: the sum comes first
            return Codec._recode_rows(self, bodies, body, form, x, how)
        super()._recode_rows(bodies, body, form, x, how)


registry.add_preset("tahquant6", "tahquant", bits=6, tile=32, coarse=0.0)
