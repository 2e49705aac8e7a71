"""The base class of codecs whose operations are single calls into the codec core, on CPU and CUDA alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .. import native
from ..base.libraries import Messages, Spec
from ..native.wire import WireFormat
from ..observe.timeline import here
from .base import Codec
from .cache import remember
from .encoding import Encoding

RUN = 32
"""Number of codes that are packed together: they take 4 bytes for each bit of a code."""


class _Bound(NamedTuple):
    """Arguments of a call of the core besides data. Lanes and workers share them, so no caller may write into them.

    Attributes:
        spec: the spec of each message.
        messages: where their planes are.
        start: the first element.
        drawn: how many random numbers the elements before it take.
    """

    spec: Spec
    messages: Messages
    start: int
    drawn: int


class NativeCodec(Codec):
    """A codec of ``csrc``. A subclass gives ``_planes``, and either ``_params`` or all of ``_spec``."""

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        """Return the core's codec number and parameters for messages encoded from ``dtype``."""
        raise NotImplementedError

    def _spec(self, numel: int, encoded: torch.dtype, dtype: torch.dtype) -> Spec:
        """Return the core's spec for elements of ``dtype`` and messages that were encoded from type ``encoded``."""
        return self._params(encoded).spec(numel, dtype)

    def core_spec(self, numel: int, dtype: torch.dtype, seed: int = 0, offset: int = 0) -> Spec:
        """Return the core's spec to encode ``numel`` elements of ``dtype``; for what calls the core past the verbs."""
        return native.seeded(self._spec(numel, dtype, dtype), seed, offset)

    # Codecs whose verbs are single calls of the core prepare each call once for each buffer, because its other
    # arguments depend on sizes and addresses alone.

    def encode_chunks(
        self,
        x: Tensor,
        payloads: Tensor,
        chunk: int,
        *,
        seed: int = 0,
        offset: int = 0,
        residual: Tensor | None = None,
    ) -> None:
        if not self._is_direct:
            return super().encode_chunks(x, payloads, chunk, seed=seed, offset=offset, residual=residual)
        source, kept = x.data_ptr(), None if residual is None else residual.data_ptr()
        with here.doing("fusionlayer: encode"):
            for spec, messages, start, drawn in self._bound(x, payloads, x.numel(), chunk, x.dtype):
                given = native.seeded(spec, seed, offset + drawn), source + start * x.element_size()
                native.call("fl_encode", x, *given, kept and kept + 4 * start, messages)

    def decode_chunks(self, payloads: Tensor, out: Tensor, chunk: int, *, dtype: torch.dtype | None = None) -> None:
        if not self._is_direct:
            return super().decode_chunks(payloads, out, chunk, dtype=dtype)
        with here.doing("fusionlayer: decode"):
            for spec, messages, start, _ in self._bound(out, payloads, out.numel(), chunk, dtype or out.dtype):
                native.call("fl_decode", out, spec, messages, out.data_ptr() + start * out.element_size())

    def decode_sum(self, payloads: Tensor, out: Tensor, *, dtype: torch.dtype | None = None, add: bool = False) -> None:
        if not self._is_direct:
            return super().decode_sum(payloads, out, dtype=dtype, add=add)
        with here.doing("fusionlayer: decode"):
            for spec, messages, _, _ in self._bound(out, payloads, out.numel(), None, dtype or out.dtype):
                native.call("fl_decode_sum", out, spec, messages, out.data_ptr(), int(add))

    def recode(
        self,
        payloads: Tensor,
        payload: Tensor,
        numel: int,
        *,
        dtype: torch.dtype = torch.float32,
        x: Tensor | None = None,
        source: Codec | None = None,
        seed: int = 0,
        offset: int = 0,
        residual: Tensor | None = None,
    ) -> None:
        if not self._is_direct or (source is not None and source is not self):
            given = {"dtype": dtype, "x": x, "source": source, "seed": seed, "offset": offset, "residual": residual}
            return super().recode(payloads, payload, numel, **given)  # type: ignore[arg-type]
        with here.doing("fusionlayer: recode"):
            for spec, messages, _, _ in self._bound(x, payloads, numel, None, dtype):
                ((_, out, _, _),) = self._bound(None, payload.unsqueeze(0), numel, None, dtype)
                pointers = (None if tensor is None else tensor.data_ptr() for tensor in (x, residual))
                native.call("fl_recode", payload, native.seeded(spec, seed, offset), messages, *pointers, out)

    def recode_rows(
        self,
        payloads: Tensor,
        out: Tensor,
        numel: int,
        starts: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        source: Codec | None = None,
        seed: int = 0,
        residual: Tensor | None = None,
    ) -> None:
        theirs = self if source is None or source == self else source
        if not numel or not starts or not self._is_direct or not self._sums(theirs):
            given = {"dtype": dtype, "source": source, "seed": seed, "residual": residual}
            return super().recode_rows(payloads, out, numel, starts, **given)  # type: ignore[arg-type]
        assert isinstance(theirs, NativeCodec)
        self._check_reach(residual, numel, starts)
        form, foreign = self.wire(numel, dtype), theirs.wire(numel, dtype)
        spec = self._seeded(form, dtype, Encoding(seed, 0))
        theirs._verified(payloads[:, 0], foreign)
        self._verified(out, form)
        with here.doing("fusionlayer: recode"):
            foreign_spec = None if theirs is self else theirs._known(foreign, dtype)
            native.recode_rows(foreign_spec, foreign.offsets, payloads, spec, form.offsets, starts, residual, out)

    def _sums(self, source: Codec) -> bool:
        """Return whether one call of the core encodes sums of messages of ``source``."""
        return source is self

    @cached_property
    def _is_direct(self) -> bool:
        """Whether verbs are calls of the core and no more."""
        names = ("_encode_rows", "_decode_rows", "_sum_rows", "_recode_rows", "_seeded")
        return not self.header and all(getattr(type(self), name) is getattr(NativeCodec, name) for name in names)

    def _bound(
        self, x: Tensor | None, payloads: Tensor, numel: int, chunk: int | None, dtype: torch.dtype
    ) -> Sequence[_Bound]:
        """Return the calls of the core for ``numel`` elements like ``x``, in messages of ``dtype``; checked, made once.

        Row i of ``payloads`` has the elements from ``i * chunk`` on; with None each row has all elements.
        """
        about = None if x is None else (x.dtype, x.dim(), x.is_contiguous(), x.device)
        place = payloads.data_ptr(), payloads.shape, payloads.stride(), payloads.dtype, payloads.device
        key = about, numel, chunk, dtype, place
        found = self._calls.get(key)
        return remember(self._calls, key, self._bind(x, payloads, numel, chunk, dtype)) if found is None else found

    def _bind(
        self, x: Tensor | None, payloads: Tensor, numel: int, chunk: int | None, dtype: torch.dtype
    ) -> Sequence[_Bound]:
        if x is not None:
            self._check_tensors(x, payloads)
        if chunk is None:
            runs = [(payloads, 0, numel, self.wire(numel, dtype))] if numel else []
        else:
            runs = self._runs(numel, payloads, chunk, dtype)
        return [
            _Bound(
                self._known(form, dtype if x is None else x.dtype),
                native.messages(self._verified(rows, form), form.offsets),
                start,
                start // chunk * self._numbers(chunk) if chunk and start else 0,
            )
            for rows, start, _, form in runs
        ]

    @cached_property
    def _calls(self) -> dict[tuple[object, ...], Sequence[_Bound]]:
        return {}

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        native.encode(self._seeded(form, x.dtype, how), form.offsets, x, how.residual, bodies)

    def _decode_rows(self, bodies: Tensor, out: Tensor, form: WireFormat) -> None:
        native.decode(self._known(form, out.dtype), form.offsets, bodies, out)

    def _sum_rows(self, bodies: Tensor, out: Tensor, form: WireFormat, add: bool) -> None:
        native.decode_sum(self._known(form, out.dtype), form.offsets, bodies, out, add=add)

    def _recode_rows(self, bodies: Tensor, body: Tensor, form: WireFormat, x: Tensor | None, how: Encoding) -> None:
        spec = self._seeded(form, form.dtype if x is None else x.dtype, how)
        native.recode(spec, form.offsets, bodies, x, how.residual, body)

    def _seeded(self, form: WireFormat, dtype: torch.dtype, how: Encoding) -> Spec:
        """Return the core's spec to encode elements of ``dtype``, with the random numbers of ``how``."""
        return native.seeded(self._known(form, dtype), how.seed, how.offset)

    def _known(self, form: WireFormat, dtype: torch.dtype) -> Spec:
        """Return ``_spec``, made once. Lanes and workers share it, so no caller may write into it."""
        key = form.numel, form.dtype, dtype
        spec = self._specs.get(key)
        return spec or remember(self._specs, key, self._spec(*key))

    @cached_property
    def _specs(self) -> dict[tuple[int, torch.dtype, torch.dtype], Spec]:
        return {}
