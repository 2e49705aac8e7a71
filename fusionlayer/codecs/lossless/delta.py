"""``delta``: lossless messages of changes since a base that all ranks have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ... import native
from ...base.errors import ConfigError
from ...native.wire import WireFormat, aligned
from ...observe.timeline import here
from ..capabilities import ChangeCodec
from ..encoding import Encoding
from .exponents import ROW_ALIGNMENT, ExponentCodec, copying, rounded

_BLOCK = 16384


@dataclass(frozen=True)
class Delta(ChangeCodec, ExponentCodec, name="delta"):
    """The same bits as changes since a base that all ranks have: the changed elements, and the number of steps of each.

    It is made for weights between two steps of an optimizer, most of which do not change in bf16. ``encode_change`` and
    ``apply_change`` take the base. Without one it is zeros, and values hardly get shorter. A message has at most 16
    bytes more than its elements. It carries digests of base and result: another base, or a damaged message, is an error
    and never gives other values. All bits are kept, also those of a NaN.

    Each 16,384 elements are coded by themselves. An unchanged block takes 2 bytes. Otherwise gaps list the changed
    elements, and small numbers their changes in steps of their type. If a message is decoded on CUDA, the host waits
    for the digests.
    """

    _digests: ClassVar[bool] = True

    def encode_change(self, x: Tensor, base: Tensor, payload: Tensor) -> None:
        self._check_base(x, base)
        payloads = payload.unsqueeze(0)
        self._check_tensors(x, payloads)
        with here.doing("fusionlayer: encode"):
            for rows, _, _, form in self._runs(x.numel(), payloads, x.numel(), x.dtype):
                self._write(x, base, rows[:, form.body :], form)
                if self.header:
                    self._seal(rows[0], form)

    def apply_change(self, payload: Tensor, base: Tensor, out: Tensor) -> None:
        self._check_base(out, base)
        payloads = payload.unsqueeze(0)
        self._check_tensors(out, payloads)
        with here.doing("fusionlayer: decode"):
            for rows, _, _, form in self._runs(out.numel(), payloads, out.numel(), out.dtype):
                spec = self._known(form, form.dtype)
                native.delta_decode(spec, form.offsets, self._verified(rows, form), base, out)

    def _check_base(self, x: Tensor, base: Tensor) -> None:
        if (base.shape, base.dtype, base.device) != (x.shape, x.dtype, x.device) or not base.is_contiguous():
            raise ConfigError(
                f"{self}: a base of {base.dtype} {tuple(base.shape)} on {base.device} for {x.dtype} {tuple(x.shape)} "
                f"on {x.device}; expected a contiguous one of the same type, shape and device"
            )

    def _write(self, x: Tensor, base: Tensor | None, bodies: Tensor, form: WireFormat) -> None:
        native.delta_encode(self._known(form, form.dtype), form.offsets, x, base, bodies)

    # ---- verbs without a base ---------------------------------------------------------------------------------------

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        return native.CodecParams(native.DELTA)

    def _static_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of the index."""
        return 2 * -(-numel // _BLOCK)

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        self._write(rounded(x, form.dtype, how.residual), None, bodies, form)

    def _decode_rows(self, bodies: Tensor, out: Tensor, form: WireFormat) -> None:
        native.decode(copying(form, out.dtype), [0], self._elements(bodies, form), out)

    def _sum_rows(self, bodies: Tensor, out: Tensor, form: WireFormat, add: bool) -> None:
        native.decode_sum(copying(form, out.dtype), [0], self._elements(bodies, form), out, add=add)

    def _elements(self, bodies: Tensor, form: WireFormat) -> Tensor:
        """Return the elements of messages without a base, a row (uint8) for each, as messages of ``raw``."""
        nbytes = form.numel * form.dtype.itemsize
        rows = torch.empty(bodies.size(0), aligned(nbytes, ROW_ALIGNMENT), dtype=torch.uint8, device=bodies.device)
        for body, row in zip(bodies, rows, strict=True):
            native.delta_decode(self._known(form, form.dtype), form.offsets, body, None, row[:nbytes].view(form.dtype))
        return rows
