"""The base class of codecs written in torch operations: three methods make a codec."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..native.wire import WireFormat
from .base import Codec
from .encoding import Encoding


class TorchCodec(Codec):
    """A codec in torch operations. A subclass gives ``_planes``, ``_encode`` and ``_decode``; all else follows."""

    @abstractmethod
    def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
        """Write ``x`` (n,), n > 0, into its planes. ``offset`` is the number of ``x[0]`` in the seed's sequence."""

    @abstractmethod
    def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
        """Fill ``out`` (n,), n > 0, from the planes of a message that was encoded from ``dtype``."""

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        n, block = form.numel, self._numbers(form.numel)
        for i, body in enumerate(bodies if n else []):
            part = how.part(i * n, (i + 1) * n, i * block)
            planes, value = form.planes(body), x[i * n : (i + 1) * n]
            if part.residual is None:
                self._encode(value.to(form.dtype), planes, part.seed, part.offset)
                continue
            wanted = value + part.residual
            self._encode(wanted.to(form.dtype), planes, part.seed, part.offset)
            sent = torch.empty_like(wanted)
            self._decode(planes, sent, form.dtype)
            lost = wanted - sent
            part.residual.copy_(torch.where(lost.isfinite(), lost, part.residual))

    def _decode_rows(self, bodies: Tensor, out: Tensor, form: WireFormat) -> None:
        n = form.numel
        for i, body in enumerate(bodies if n else []):
            self._decode(form.planes(body), out[i * n : (i + 1) * n], form.dtype)

    def _sum_rows(self, bodies: Tensor, out: Tensor, form: WireFormat, add: bool) -> None:
        total = out.float() if add else torch.zeros_like(out, dtype=torch.float32)
        part = torch.empty_like(total)
        for body in bodies:
            self._decode(form.planes(body), part, form.dtype)
            total += part
        out.copy_(total)
