"""The base class of lossless codecs that shorten exponents, ``zip`` and ``rans``, and of ``delta``, laid out alike."""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ... import native
from ...base.errors import WireError
from ...base.libraries import Spec
from ...native.wire import Plane, WireFormat
from ..base import Codec
from ..capabilities import ZippedCodec
from ..encoding import Encoding
from ..native import NativeCodec

_HEAD = struct.Struct("<IIII")
_RAW, _CODED = 0, 1
ROW_ALIGNMENT = 16
"""Bytes of a row are padded to a multiple of this, where rows are messages of ``raw``."""


class ExponentCodec(ZippedCodec, NativeCodec):
    """A codec whose message is a head and data: either a static part and a rest, or the unchanged elements.

    The length of the static part does not depend on the data. The head has the form of the data and the number of
    bytes of the rest. A subclass gives ``_static_bytes`` and ``_params``.
    """

    _digests: ClassVar[bool] = False
    """Whether the head ends with digests, not with zeros."""

    @abstractmethod
    def _static_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of the static part of a message of ``numel`` elements."""

    # ---- sizes ------------------------------------------------------------------------------------------------------

    def static_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return how many bytes ``compact`` returns at least for ``numel`` elements, regardless of their values."""
        form = self.wire(numel, dtype)
        return form.body + form.sections[0].plane.nbytes + self._always(numel, dtype)

    def static_extent(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return self.wire(numel, dtype).sections[1].offset + self._always(numel, dtype)

    def used_bytes(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return sum(span.stop - span.start for span in self._spans(payload, numel, dtype))

    def extents(self, payloads: Sequence[Tensor], numels: Sequence[int], dtype: torch.dtype) -> list[int]:
        data = [self.wire(numel, dtype).sections[1].offset for numel in numels]
        used = self._used(payloads, numels, dtype)
        return [start + nbytes for start, nbytes in zip(data, used, strict=True)]

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
        """Return the used parts of a message: its header, its head, and the first bytes of its data."""
        form = self.wire(numel, dtype)
        head, data = form.sections
        (used,) = self._used([payload], [numel], dtype)
        parts = ((0, form.body), (head.offset, head.plane.nbytes), (data.offset, used))
        return [slice(start, start + nbytes) for start, nbytes in parts]

    def _used(self, payloads: Sequence[Tensor], numels: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return how many bytes of each message's data are used, by its head."""
        used = [0] * len(numels)
        filled = [i for i, numel in enumerate(numels) if numel]
        if not filled:
            return used
        starts = [self.wire(numels[i], dtype).sections[0].offset for i in filled]
        heads = torch.stack([payloads[i][start : start + _HEAD.size] for i, start in zip(filled, starts, strict=True)])
        for i, head in zip(filled, _HEAD.iter_unpack(heads.cpu().numpy().tobytes()), strict=True):
            kind, rest, *others = head
            static, raw = self._static_bytes(numels[i], dtype), numels[i] * dtype.itemsize
            wrong = any(others) and not self._digests
            if wrong or kind not in (_RAW, _CODED) or (kind == _CODED and static + rest >= raw):
                raise WireError(f"{self}: a message of form {kind} with {rest} bytes of its data's own: it was damaged")
            used[i] = raw if kind == _RAW else static + rest
        return used

    def _always(self, numel: int, dtype: torch.dtype) -> int:
        """Return how many bytes of data every message of ``numel`` elements has at least."""
        return min(self._static_bytes(numel, dtype), numel * dtype.itemsize)

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        return [
            Plane("head", _HEAD.size * min(numel, 1), torch.uint8),
            Plane("data", max(self._static_bytes(numel, dtype), numel * dtype.itemsize), torch.uint8),
        ]

    # ---- verbs that do not only copy --------------------------------------------------------------------------------

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        super()._encode_rows(rounded(x, form.dtype, how.residual), bodies, form, how._replace(residual=None))

    def _recode_rows(self, bodies: Tensor, body: Tensor, form: WireFormat, x: Tensor | None, how: Encoding) -> None:
        # The core does not round a sum to the encoded type, so the sum is made and encoded here.
        Codec._recode_rows(self, bodies, body, form, x, how)

    def _seal(self, payload: Tensor, form: WireFormat) -> None:
        _, head, data = self._spans(payload, form.numel, form.dtype)
        # ``expand`` leaves zeros in these gaps, and the checksum covers the whole body.
        payload[head.stop : data.start].zero_()
        payload[data.stop : form.capacity].zero_()
        super()._seal(payload, form)


def rounded(x: Tensor, dtype: torch.dtype, residual: Tensor | None) -> Tensor:
    """Return ``x + residual`` in ``dtype``, rounded as on the wire; the residual becomes the loss of rounding."""
    if residual is None and x.dtype is dtype:
        return x
    out = torch.empty(x.numel(), dtype=dtype, device=x.device)
    cast = native.CodecParams(native.CAST, (native.DTYPES[dtype],))
    native.encode(cast.spec(x.numel(), x.dtype), [0], x, residual, out.view(torch.uint8).unsqueeze(0))
    return out


def copying(form: WireFormat, dtype: torch.dtype) -> Spec:
    """Return the core's spec for elements as they are, rows of ``ROW_ALIGNMENT``, which become ``dtype``."""
    return native.CodecParams(native.CAST, (native.DTYPES[form.dtype],)).spec(form.numel, dtype)
