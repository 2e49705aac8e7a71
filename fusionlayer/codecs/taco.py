"""``taco``: rotated blocks of 8-bit numbers, for the activations of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .. import native
from ..errors import ConfigError
from ._block import BlockCodec

__all__ = ["Taco"]


@dataclass(frozen=True)
class Taco(BlockCodec, name="taco"):
    """Blocks rotated by a Hadamard matrix of their size, then sent as FP8 or INT8 with a scale (TACO, section 4).

    8 + 32 / block_size bits per element travel, with dual scales 8 + 64 / block_size.

    TACO scales a block to a target energy before the rotation, and to the range of the format afterwards. The first
    scale cancels, since the second is a maximum and rotation is linear. So one scale is enough ("folded"). "dual" sends
    both as in the paper, the first limited to 1e-3 .. 1e3. Both give the same codes, and the same values up to the
    rounding of the scale.

    Attributes:
        format: "e4m3"; "e5m2", with a bit less precision and a range that rotated blocks do not need; or "int8", the
            most exact on rotated blocks.
        block_size: elements that share a scale and are rotated together; a power of two from 32 to 512.
        hadamard: rotate blocks, which bounds the error of each block by its energy, outliers or not.
        scales: "folded" or "dual".
    """

    format: Literal["e4m3", "e5m2", "int8"] = "e4m3"
    block_size: int = 256
    hadamard: bool = True
    scales: Literal["folded", "dual"] = "folded"

    def __post_init__(self) -> None:
        if self.format not in ("e4m3", "e5m2", "int8"):
            raise ConfigError(f"taco codec: format={self.format!r}; expected 'e4m3', 'e5m2' or 'int8'")
        if type(self.block_size) is not int or self.block_size not in (32, 64, 128, 256, 512):
            raise ConfigError(f"taco codec: block_size={self.block_size!r}; expected a power of two from 32 to 512")
        if not isinstance(self.hadamard, bool):
            raise ConfigError(f"taco codec: hadamard={self.hadamard!r}; expected True or False")
        if self.scales not in ("folded", "dual"):
            raise ConfigError(f"taco codec: scales={self.scales!r}; expected 'folded' or 'dual'")

    @property
    def block(self) -> int:
        """The block size."""
        return self.block_size

    @property
    def _format(self) -> str:
        return self.format

    @property
    def _scale(self) -> int:
        return native.SCALE_F32 if self.scales == "folded" else native.SCALE_DUAL

    @property
    def _rotated(self) -> bool:
        return self.hadamard
