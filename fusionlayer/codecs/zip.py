"""``zip``: lossless, exponents in three bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import native
from ..errors import ConfigError, WireError
from ..wire import Plane
from ._native import NativeCodec

__all__ = ["Zip", "window_base"]

_CHOICES = {"auto": native.ZIP_AUTO, "window": native.ZIP_WINDOW, "table": native.ZIP_TABLE}
_HEAD = struct.Struct("<IIII")
_RAW, _CODED = 0, 1
_GROUP, _TILE, _REGION = 64, 1024, 65536
_CODES = 7


def window_base(sigma: float, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the lowest, biased exponent of the seven that cover most of a Gaussian of standard deviation ``sigma``.

    The better one of floor and ceil of log2(sigma) - 5.3607 (ZipCCL, equations 4 and 5), inside the exponents that
    ``dtype`` has.

    Raises:
        ConfigError: ``sigma`` is not a positive number.
    """
    if not isinstance(sigma, (int, float)) or not 0 < sigma < math.inf:
        raise ConfigError(f"zip codec: sigma={sigma!r}; expected a positive number, or None to find it in the data")
    best = math.log2(sigma) - 5.3607
    floor, ceil = math.floor(best), math.ceil(best)
    lowest = ceil if _covered(ceil, sigma) > _covered(floor, sigma) else floor
    bias, exponents = (15, 32) if dtype is torch.float16 else (127, 256)
    return min(max(lowest + bias, 0), exponents - _CODES)


def _covered(lowest: int, sigma: float) -> float:
    """Return the part of a Gaussian whose magnitudes have seven exponents, of which ``lowest`` is the lowest."""
    begin = 2.0**lowest / (sigma * math.sqrt(2))
    return math.erf(2.0**_CODES * begin) - math.erf(begin)


@dataclass(frozen=True)
class Zip(NativeCodec, name="zip"):
    """The same bits in fewer bytes: seven exponents take three bits, others escape (ZipCCL, section 4).

    A Gaussian takes 11.2 bits of bf16's 16, 14.2 of f16's 16, and 27.2 of f32's 32. What does not get shorter travels
    as it is, so a message has 16 bytes more than its elements at most. Its static part, ``static_bytes``, is as long
    for all data; escapes follow it. ``compact`` has both in a row. Sums are rounded to the type that was encoded.

    Which exponents get a code is decided for each 65,536 elements, from a sample of 512.

    Attributes:
        exponents: "window", seven in a row for a Gaussian of the sample's sigma; "table", the seven most frequent of
            the sample, exact zeros among them; "auto", the table where it has more.
        sigma: standard deviation of what is encoded, where it is known, as from the last step; it replaces the sample,
            and "auto" is a window then.
    """

    lossless: ClassVar[bool] = True
    variable_size: ClassVar[bool] = True

    exponents: Literal["auto", "window", "table"] = "auto"
    sigma: float | None = None

    def __post_init__(self) -> None:
        if self.exponents not in _CHOICES:
            raise ConfigError(f"zip codec: exponents={self.exponents!r}; expected 'auto', 'window' or 'table'")
        if self.sigma is not None:
            window_base(self.sigma)
            if self.exponents == "table":
                raise ConfigError(f"zip codec: sigma={self.sigma} with exponents='table'; expected one of the two")

    # ---- sizes ------------------------------------------------------------------------------------------------------

    def static_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return how many of the bytes that ``compact`` gives are there for all data of ``numel`` elements."""
        form = self.wire(numel, dtype)
        return form.body + form.sections[0].plane.nbytes + min(_static(numel, dtype), numel * dtype.itemsize)

    def used_bytes(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return how many bytes of a ``payload`` (capacity,) must travel; on CUDA this waits for it.

        Raises:
            WireError: the message contradicts itself.
        """
        return sum(span.stop - span.start for span in self._spans(payload, numel, dtype))

    def compact(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.cat([payload[span] for span in self._spans(payload, numel, dtype)])

    def expand(self, data: Tensor, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> None:
        form = self.wire(numel, dtype)
        head = form.sections[0]
        if data.numel() < form.body + head.plane.nbytes:
            raise WireError(f"{self}: {data.numel()} bytes for a message of {numel} elements: it was cut short")
        payload.zero_()
        payload[: form.body].copy_(data[: form.body])
        end = form.body + head.plane.nbytes
        payload[head.offset : head.offset + head.plane.nbytes].copy_(data[form.body : end])
        body = self._spans(payload, numel, dtype)[-1]
        if data.numel() - end != body.stop - body.start:
            used = end + body.stop - body.start
            raise WireError(f"{self}: {data.numel()} bytes for a message that uses {used}: it was damaged")
        payload[body].copy_(data[end:])

    def _spans(self, payload: Tensor, numel: int, dtype: torch.dtype) -> list[slice]:
        """Return what a message uses: its header, its head, and of its data the first bytes."""
        form = self.wire(numel, dtype)
        head, data = form.sections
        used = 0
        if numel:
            kind, escapes, *zeros = _HEAD.unpack(
                payload[head.offset : head.offset + _HEAD.size].cpu().numpy().tobytes()
            )
            static, raw = _static(numel, dtype), numel * dtype.itemsize
            if any(zeros) or kind not in (_RAW, _CODED) or (kind == _CODED and static + escapes >= raw):
                raise WireError(f"{self}: a message of form {kind} with {escapes} escapes: it was damaged")
            used = raw if kind == _RAW else static + escapes
        parts = ((0, form.body), (head.offset, head.plane.nbytes), (data.offset, used))
        return [slice(start, start + nbytes) for start, nbytes in parts]

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        return [
            Plane("head", _HEAD.size * min(numel, 1), torch.uint8),
            Plane("data", max(_static(numel, dtype), numel * dtype.itemsize), torch.uint8),
        ]

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        fixed = 0 if self.sigma is None else 1 + window_base(self.sigma, dtype)
        return native.CodecParams(native.ZIP, (native.DTYPES[dtype], _CHOICES[self.exponents], fixed))

    # ---- verbs that do not only copy --------------------------------------------------------------------------------

    def _encode_rows(self, x: Tensor, bodies: Tensor, n: int, seed: int, offset: int, residual: Tensor | None) -> None:
        if residual is not None:
            x = _rounded(x, x.dtype, residual)
        super()._encode_rows(x, bodies, n, seed, offset, None)

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
        total = torch.zeros(n, device=body.device) if x is None else x.to(torch.float32, copy=True)
        self._sum_rows(bodies, total, dtype, add=True)
        super()._encode_rows(_rounded(total, dtype, residual), body.unsqueeze(0), n, seed, offset, None)

    def _seal(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        _, head, data = self._spans(payload, numel, dtype)
        payload[head.stop : data.start].zero_()  # as ``expand`` leaves it, since the checksum is of all
        payload[data.stop : self.wire(numel, dtype).capacity].zero_()
        return super()._seal(payload, numel, dtype)


def _static(numel: int, dtype: torch.dtype) -> int:
    """Return how many bytes of data there are without escapes: tables, index, blocks."""
    front = 16 * -(-numel // _REGION) + 2 * -(-numel // _TILE)
    full, rest = divmod(numel, _TILE)
    groups = full * (_TILE // _GROUP) + -(-rest // _GROUP)
    planes, low = (6 if dtype is torch.float16 else 3), (2 if dtype is torch.float32 else 0)
    return -(-front // _GROUP) * _GROUP + groups * (_GROUP + planes * _GROUP // 8 + low * _GROUP)


def _rounded(x: Tensor, dtype: torch.dtype, residual: Tensor | None) -> Tensor:
    """Return ``x``, plus ``residual`` (which keeps what is lost), in ``dtype``, rounded as on the wire."""
    out = torch.empty(x.numel(), dtype=dtype, device=x.device)
    cast = native.CodecParams(native.CAST, (native.DTYPES[dtype],))
    native.encode(cast.spec(x.numel(), x.dtype), [0], x, residual, out.view(torch.uint8).unsqueeze(0))
    return out
