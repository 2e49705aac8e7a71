"""``taco``: rotated blocks of 8-bit numbers, for the activations of tensor parallelism."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from ... import native
from ...base.errors import ConfigError
from ..base import Codec
from ..capabilities import TransformCodec
from ..quantized.block import BlockCodec

_TAU, _EPSILON = 448.0, 1e-6


@dataclass(frozen=True)
class Taco(TransformCodec, BlockCodec, name="taco"):
    """Blocks rotated by a Hadamard matrix of their size, then sent as FP8 or INT8 with a scale (TACO, section 4).

    8 + 32 / block_size bits per element are sent, with dual scales 8 + 64 / block_size.

    TACO scales a block by alpha to a target energy, and by s to the range of the format. In exact arithmetic alpha
    cancels, since s is a maximum and rotation is linear. So one scale is enough ("folded"). "dual" multiplies by alpha,
    then by s, and sends both, as in the paper. The two losses differ by f32's rounding alone.

    Attributes:
        format: "e4m3"; "e5m2", with a bit less precision and a range that rotated blocks do not need; or "int8", the
            most exact on rotated blocks.
        block_size: elements that share a scale and are rotated together; a power of two from 32 to 512.
        hadamard: rotate blocks, which bounds the error of each block by its energy, outliers or not.
        scales: "folded" or "dual".
        tau: "dual": the root mean square that alpha gives a block, 1 to 65536 in bf16's precision.
        epsilon: "dual": added to a block's mean square before its root, 1e-30 to 1 in bf16's precision.
        limited: "dual": alpha is at least 1e-3 and at most 1e3. If False, a block whose energy f32 cannot hold decodes
            to NaN.
    """

    format: Literal["e4m3", "e5m2", "int8"] = "e4m3"
    block_size: int = 256
    hadamard: bool = True
    scales: Literal["folded", "dual"] = "folded"
    tau: float = _TAU
    epsilon: float = _EPSILON
    limited: bool = True

    def __post_init__(self) -> None:
        if self.format not in ("e4m3", "e5m2", "int8"):
            raise ConfigError(f"taco codec: format={self.format!r}; expected 'e4m3', 'e5m2' or 'int8'")
        if type(self.block_size) is not int or self.block_size not in (32, 64, 128, 256, 512):
            raise ConfigError(f"taco codec: block_size={self.block_size!r}; expected a power of two from 32 to 512")
        if not isinstance(self.hadamard, bool):
            raise ConfigError(f"taco codec: hadamard={self.hadamard!r}; expected True or False")
        if self.scales not in ("folded", "dual"):
            raise ConfigError(f"taco codec: scales={self.scales!r}; expected 'folded' or 'dual'")
        for name, least, most in (("tau", 1.0, 65536.0), ("epsilon", 1e-30, 1.0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value <= most:
                raise ConfigError(f"taco codec: {name}={value!r}; expected {least:g} to {most:g}")
        if not isinstance(self.limited, bool):
            raise ConfigError(f"taco codec: limited={self.limited!r}; expected True or False")

    @property
    def block(self) -> int:
        """The block size."""
        return self.block_size

    @cached_property
    def untransformed(self) -> Codec:
        """This codec without the rotation, for sums of rotated values; itself with dual scales: alpha is of values."""
        return replace(self, hadamard=False) if self._sums_rotated else self

    @property
    def transform_run(self) -> int:
        """The block size where rotated values are summed, else 1."""
        return self.block_size if self._sums_rotated else 1

    @property
    def _sums_rotated(self) -> bool:
        return self.hadamard and self.scales == "folded"

    @property
    def _format(self) -> str:
        return self.format

    @property
    def _scale(self) -> int:
        return native.SCALE_F32 if self.scales == "folded" else native.SCALE_DUAL

    @property
    def _rotated(self) -> bool:
        return self.hadamard

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        params = super()._params(dtype)
        if self.scales == "folded":
            return params
        number, block, kind, flags = params.param
        kind |= _upper_half(self.tau, _TAU)
        flags |= _upper_half(self.epsilon, _EPSILON) | native.BLOCK_UNLIMITED * (not self.limited)
        return native.CodecParams(native.BLOCK, (number, block, kind, flags))


def _upper_half(value: float, default: float) -> int:
    """Return the bits of the nearest f32 with 8 bits of precision; 0 for the default, which the core knows exactly."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return 0 if value == default else (bits + 0x8000) & 0xFFFF0000
