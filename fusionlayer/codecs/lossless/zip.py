"""``zip``: lossless messages that send most exponents in three bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ... import native
from ...base.errors import ConfigError
from .exponents import ExponentCodec

_CHOICES = {"auto": native.ZIP_AUTO, "window": native.ZIP_WINDOW, "table": native.ZIP_TABLE}
_GROUP, _TILE, _REGION = 64, 1024, 65536
_CODES = 7


def window_base(sigma: float, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the lowest, biased exponent of the seven that cover most of a Gaussian of standard deviation ``sigma``.

    This is the better of floor and ceil of log2(sigma) - 5.3607 (ZipCCL, equations 4 and 5), clamped to the exponents
    of ``dtype``.
    """
    if not isinstance(sigma, (int, float)) or not 0 < sigma < math.inf:
        raise ConfigError(f"zip codec: sigma={sigma!r}; expected a positive number, or None to find it in the data")
    best = math.log2(sigma) - 5.3607
    floor, ceil = math.floor(best), math.ceil(best)
    lowest = ceil if _covered(ceil, sigma) > _covered(floor, sigma) else floor
    bias, exponents = (15, 32) if dtype is torch.float16 else (127, 256)
    return min(max(lowest + bias, 0), exponents - _CODES)


def _covered(lowest: int, sigma: float) -> float:
    """Return the share of a Gaussian whose magnitudes have one of the seven exponents from ``lowest`` on."""
    begin = 2.0**lowest / (sigma * math.sqrt(2))
    return math.erf(2.0**_CODES * begin) - math.erf(begin)


@dataclass(frozen=True)
class Zip(ExponentCodec, name="zip"):
    """The same bits in fewer bytes: seven exponents take three bits, others escape (ZipCCL, section 4).

    A Gaussian takes 11.2 bits of bf16's 16, 14.2 of f16's 16, and 27.2 of f32's 32. Elements that do not get shorter
    are sent unchanged, so a message has at most 16 bytes more than its elements. Its static part, ``static_bytes``, has
    the same length for all data; escapes follow it. ``compact`` returns both in a row. Sums are rounded to the type
    that was encoded.

    A sample of 512 elements decides which exponents get a code, again for each 65,536 elements.

    Attributes:
        exponents: "window" gives codes to seven exponents in a row, for a Gaussian of the sample's sigma; "table" to
            the seven most frequent of the sample, exact zeros among them; "auto" takes the table if it covers more.
        sigma: standard deviation of the values if it is known, for example from the last step. It replaces the sample,
            and "auto" then takes a window.
    """

    exponents: Literal["auto", "window", "table"] = "auto"
    sigma: float | None = None

    def __post_init__(self) -> None:
        if self.exponents not in _CHOICES:
            raise ConfigError(f"zip codec: exponents={self.exponents!r}; expected 'auto', 'window' or 'table'")
        if self.sigma is not None:
            window_base(self.sigma)
            if self.exponents == "table":
                raise ConfigError(f"zip codec: sigma={self.sigma} with exponents='table'; expected one of the two")

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        fixed = 0 if self.sigma is None else 1 + window_base(self.sigma, dtype)
        return native.CodecParams(native.ZIP, (native.DTYPES[dtype], _CHOICES[self.exponents], fixed))

    def _static_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of tables, index and blocks."""
        front = 16 * -(-numel // _REGION) + 2 * -(-numel // _TILE)
        full, rest = divmod(numel, _TILE)
        groups = full * (_TILE // _GROUP) + -(-rest // _GROUP)
        planes, low = (6 if dtype is torch.float16 else 3), (2 if dtype is torch.float32 else 0)
        return -(-front // _GROUP) * _GROUP + groups * (_GROUP + planes * _GROUP // 8 + low * _GROUP)
