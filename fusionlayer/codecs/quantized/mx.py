"""``mxfp8``, ``mxfp6`` and ``mxfp4``: the microscaling formats of OCP MX v1.0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from ... import native
from ...base.errors import ConfigError
from .auto_scale import AutoScaled

if TYPE_CHECKING:
    from ...transport import Transport
    from ..base import Codec


class _MX(AutoScaled):
    """Blocks of 32 small floats with one scale."""

    _formats: ClassVar[tuple[str, ...]]
    scale: Literal["e8m0", "bf16", "auto"]

    def __post_init__(self) -> None:
        if self._format not in self._formats:
            expected = " or ".join(map(repr, self._formats))
            raise ConfigError(f"{self.name} codec: format={self._format!r}; expected {expected}")
        if self.scale not in ("e8m0", "bf16", "auto"):
            raise ConfigError(f"{self.name} codec: scale={self.scale!r}; expected 'e8m0', 'bf16' or 'auto'")

    @property
    def block(self) -> int:
        """32 elements."""
        return 32

    @property
    def waits(self) -> bool:
        """With scale "auto": for whether sums overflowed."""
        return self.scale == "auto"

    @property
    def _scale(self) -> int:
        return native.SCALE_E8M0 if self.scale == "e8m0" else native.SCALE_BF16

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
        """Return the codec itself, or with scale "auto" the codec with the scales of this sum."""
        return self if self.scale != "auto" else self._agree_on_scales(x, transport, residual)


@dataclass(frozen=True)
class MXFP8(_MX, name="mxfp8"):
    """8-bit floats in blocks of 32 with a scale of 8 bits (OCP MX v1.0) or 16: 8.25 or 8.5 bits per element.

    Attributes:
        format: "e4m3", or "e5m2" with more range and less precision.
        scale: "e8m0" is a power of two as in the standard; values above scale times the format's largest value
            saturate. "bf16" (DynamiQ, appendix C) is rounded up, so that no value saturates. "auto" has bf16 scales
            that ranks agree on before each sum, with a headroom that adapts to overflows (FP8-LM), so sums are rounded
            on the grid of their summands; outside of a sum it is "bf16".
    """

    _formats: ClassVar[tuple[str, ...]] = ("e4m3", "e5m2")

    format: Literal["e4m3", "e5m2"] = "e4m3"
    scale: Literal["e8m0", "bf16", "auto"] = "e8m0"

    @property
    def _format(self) -> str:
        return self.format


@dataclass(frozen=True)
class MXFP6(_MX, name="mxfp6"):
    """6-bit floats in blocks of 32 with a scale of 8 bits (OCP MX v1.0) or 16: 6.25 or 6.5 bits per element.

    Attributes:
        format: "e2m3", or "e3m2" with more range and less precision.
        scale: as for ``MXFP8``.
    """

    _formats: ClassVar[tuple[str, ...]] = ("e2m3", "e3m2")

    format: Literal["e2m3", "e3m2"] = "e2m3"
    scale: Literal["e8m0", "bf16", "auto"] = "e8m0"

    @property
    def _format(self) -> str:
        return self.format


@dataclass(frozen=True)
class MXFP4(_MX, name="mxfp4"):
    """4-bit floats (E2M1) in blocks of 32 with a scale of 8 bits (OCP MX v1.0) or 16: 4.25 or 4.5 bits per element.

    Attributes:
        scale: as for ``MXFP8``.
    """

    _formats: ClassVar[tuple[str, ...]] = ("e2m1",)

    scale: Literal["e8m0", "bf16", "auto"] = "e8m0"

    @property
    def _format(self) -> str:
        return "e2m1"
