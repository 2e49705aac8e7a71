"""The base class of codecs whose operations are single calls into the codec core, on CPU and CUDA alike."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from .. import native
from ..native.wire import WireFormat
from .base import Codec, remember
from .encoding import Encoding

__all__ = ["RUN", "NativeCodec"]

RUN = 32
"""Number of codes that are packed together: they take 4 bytes for each bit of a code."""


class NativeCodec(Codec):
    """A codec of ``csrc``. A subclass gives ``_planes``, and either ``_params`` or all of ``_spec``."""

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        """Return the core's codec number and parameters for messages encoded from ``dtype``."""
        raise NotImplementedError

    def _spec(self, numel: int, encoded: torch.dtype, dtype: torch.dtype) -> native.Spec:
        """Return the core's spec for elements of ``dtype`` and messages that were encoded from type ``encoded``."""
        return self._params(encoded).spec(numel, dtype)

    def core_spec(self, numel: int, dtype: torch.dtype, seed: int = 0, offset: int = 0) -> native.Spec:
        """Return the core's spec to encode ``numel`` elements of ``dtype``; for what calls the core past the verbs."""
        return self._spec(numel, dtype, dtype).seeded(seed, offset)

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        native.encode(self._seeded(form, x.dtype, how), form.offsets, x, how.residual, bodies)

    def _decode_rows(self, bodies: Tensor, out: Tensor, form: WireFormat) -> None:
        native.decode(self._known(form, out.dtype), form.offsets, bodies, out)

    def _sum_rows(self, bodies: Tensor, out: Tensor, form: WireFormat, add: bool) -> None:
        native.decode_sum(self._known(form, out.dtype), form.offsets, bodies, out, add=add)

    def _recode_rows(self, bodies: Tensor, body: Tensor, form: WireFormat, x: Tensor | None, how: Encoding) -> None:
        spec = self._seeded(form, form.dtype if x is None else x.dtype, how)
        native.recode(spec, form.offsets, bodies, x, how.residual, body)

    def _seeded(self, form: WireFormat, dtype: torch.dtype, how: Encoding) -> native.Spec:
        """Return the core's spec to encode elements of ``dtype``, with the random numbers of ``how``."""
        return self._known(form, dtype).seeded(how.seed, how.offset)

    def _known(self, form: WireFormat, dtype: torch.dtype) -> native.Spec:
        """Return ``_spec``, made once. Lanes and workers share it, so no caller may write into it."""
        key = form.numel, form.dtype, dtype
        spec = self._specs.get(key)
        return spec or remember(self._specs, key, self._spec(*key))

    @cached_property
    def _specs(self) -> dict[tuple[int, torch.dtype, torch.dtype], native.Spec]:
        return {}
