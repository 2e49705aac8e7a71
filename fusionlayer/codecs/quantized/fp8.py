"""``fp8_block`` and ``fp8``: 8-bit floats with one scale per block, or one per message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ... import native
from ...base.errors import ConfigError
from .block import BlockCodec


@dataclass(frozen=True)
class FP8(BlockCodec, name="fp8"):
    """8-bit floats, all of a message scaled by its largest magnitude (Micikevicius et al., arXiv 2209.05433).

    8 bits per element are sent. One value that is not finite makes the whole message NaN. Encoding takes two passes.

    Attributes:
        format: "e4m3", or "e5m2" with more range and less precision.
    """

    local: ClassVar[bool] = False

    format: Literal["e4m3", "e5m2"] = "e4m3"

    def __post_init__(self) -> None:
        _check_format(self.name, self.format)

    @property
    def block(self) -> int:
        """32: codes are padded to a multiple of it."""
        return 32

    @property
    def _format(self) -> str:
        return self.format

    @property
    def _scale(self) -> int:
        return native.SCALE_MESSAGE


@dataclass(frozen=True)
class FP8Block(BlockCodec, name="fp8_block"):
    """8-bit floats and an f32 scale for each ``block_size`` elements, not rotated: the baseline of ``taco``.

    8 + 32 / block_size bits per element are sent.

    Attributes:
        format: "e4m3", or "e5m2" with more range and less precision.
        block_size: elements that share a scale; a power of two from 32 to 512.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block_size: int = 128

    def __post_init__(self) -> None:
        _check_format(self.name, self.format)
        if type(self.block_size) is not int or self.block_size not in (32, 64, 128, 256, 512):
            raise ConfigError(f"fp8_block codec: block_size={self.block_size!r}; expected a power of two, 32 to 512")

    @property
    def block(self) -> int:
        """The block size."""
        return self.block_size

    @property
    def _format(self) -> str:
        return self.format

    @property
    def _scale(self) -> int:
        return native.SCALE_F32


def _check_format(name: str, given: object) -> None:
    if given not in ("e4m3", "e5m2"):
        raise ConfigError(f"{name} codec: format={given!r}; expected 'e4m3' or 'e5m2'")
