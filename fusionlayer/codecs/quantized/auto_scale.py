"""Scales that ranks agree on before they sum, adapted to how often sums overflow (FP8-LM; DynamiQ, appendix C)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import native
from ...native.wire import WireFormat
from ..base import Codec
from ..capabilities import AgreeingCodec, StatefulCodec
from ..encoding import Encoding
from .block import BlockCodec

if TYPE_CHECKING:
    from ...transport import Transport

# As in FP8-LM, the headroom doubles if more than 0.001 % of the sums have the format's largest value. Otherwise it
# shrinks, to half within a thousand sums.
_OVERFLOW = 1e-5
_SHRINK = 2 ** (-1 / 1000)

_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m3": 7.5, "e3m2": 28.0, "e2m1": 6.0}


class Headroom:
    """How many times the largest summand fits into a block's scale: mu of FP8-LM, kept from one sum to the next.

    It begins with the number of ranks, so that no sum can overflow. Ranks adapt it to the same verdict, so all have the
    same headroom. Each codec has its own; copies of a codec share it.

    Attributes:
        factor: mu, from 1 to the number of ranks; None before the first sum.
    """

    def __init__(self) -> None:
        self.factor: float | None = None
        self._sums = 0
        self._saturated = 0

    def count(self, saturated: int, sums: int) -> None:
        """Count ``sums`` of this rank, and ``saturated`` of them that have the format's largest value."""
        self._saturated += saturated
        self._sums += sums

    def overflowed(self) -> bool:
        """Return whether too many of this rank's sums were saturated since the last call, and start a new count."""
        ratio = self._saturated / max(1, self._sums)
        self._saturated = self._sums = 0
        return ratio > _OVERFLOW

    def numbers(self) -> dict[str, float]:
        """Return the numbers to keep, by name; none before the first sum."""
        if self.factor is None:
            return {}
        return {"headroom": self.factor, "saturated": self._saturated, "sums": self._sums}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Load ``numbers``; None resets the state."""
        self.factor = numbers.get("headroom")
        self._saturated, self._sums = (int(numbers.get(name, 0)) for name in ("saturated", "sums"))

    def adapt(self, overflowed: bool, ranks: int) -> float:
        """Return the factor of the next sum over ``ranks``; ``overflowed`` says whether any rank's sums overflowed."""
        if self.factor is None:
            self.factor = float(ranks)
        elif overflowed:
            self.factor = min(2 * self.factor, float(ranks))
        else:
            self.factor = min(max(self.factor * _SHRINK, 1.0), float(ranks))
        return self.factor


@dataclass(frozen=True)
class AutoScaled(AgreeingCodec, StatefulCodec, BlockCodec):
    """A codec of blocks whose bf16 scales ranks may agree on, so that a sum has the scales of its summands.

    Attributes:
        scales: (blocks,) bf16 that ranks agreed on; None gives each block a scale of its own.
        headroom: factor in the scales of the next sum.
    """

    scales: Tensor | None = field(default=None, kw_only=True, compare=False, repr=False)
    headroom: Headroom = field(default_factory=Headroom, kw_only=True, compare=False, repr=False)

    def kept(self) -> dict[str, float]:
        """Return the headroom."""
        return self.headroom.numbers()

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Take over a headroom."""
        self.headroom.restore(numbers)

    def _agree_on_scales(self, x: Tensor, transport: Transport, residual: Tensor | None) -> Codec:
        """Return the codec whose scales fit the largest magnitude of each block over ranks, times the headroom."""
        wanted = x.float() if residual is None else x + residual
        missing = -x.numel() % self.block
        magnitudes = torch.nn.functional.pad(wanted, (0, missing)).view(-1, self.block).abs().amax(1)
        verdict = torch.tensor([self.headroom.overflowed()], dtype=torch.int16, device=x.device)
        facts = torch.cat([_bf16_above(magnitudes / _LARGEST[self._format]).view(torch.int16), verdict])
        transport.all_reduce_max(facts)  # magnitudes in bf16 are in the order of their bits
        factor = self.headroom.adapt(bool(facts[-1]), transport.size)
        return replace(self, scales=_bf16_above(facts[:-1].view(torch.bfloat16).float() * factor))

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        params = super()._params(dtype)
        if self.scales is None:
            return params
        *rest, flags = params.param
        return native.CodecParams(params.codec, (*rest, flags | native.BLOCK_GIVEN))

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        if self.scales is not None:
            self._place_scales(bodies, form.numel, how.offset)
        super()._encode_rows(x, bodies, form, how)

    def _recode_rows(self, bodies: Tensor, body: Tensor, form: WireFormat, x: Tensor | None, how: Encoding) -> None:
        if self.scales is not None:
            self._place_scales(body.unsqueeze(0), form.numel, how.offset)
        super()._recode_rows(bodies, body, form, x, how)
        factor = self.headroom.factor
        if self.scales is not None and factor is not None:
            self.headroom.count(self._saturated(body, form), form.numel)

    def _place_scales(self, bodies: Tensor, n: int, offset: int) -> None:
        """Write the agreed scales into the scale planes of ``bodies`` (k, nbytes), from element ``offset`` on."""
        assert self.scales is not None
        blocks, first = -(-n // self.block), offset // self.block
        given = self.scales[first : first + blocks * len(bodies)].view(torch.uint8)
        bodies[:, : 2 * blocks].copy_(given.view(len(bodies), 2 * blocks))

    def _saturated(self, body: Tensor, form: WireFormat) -> int:
        """Return how many elements of a message have the format's largest value, in either sign."""
        n = form.numel
        value = torch.empty(n, device=body.device)
        self._decode_rows(body.unsqueeze(0), value, form)
        scales = body[: 2 * -(-n // self.block)].view(torch.bfloat16).float()
        largest = (scales * _LARGEST[self._format]).repeat_interleave(self.block)[:n]
        return int(((value.abs() == largest) & (largest > 0)).sum())


def _bf16_above(x: Tensor) -> Tensor:
    """Return ``x`` (n,) f32, not negative, as bf16, rounded up; NaN becomes infinite."""
    bits = (x.view(torch.int32) & 0x7FFFFFFF).clamp(max=0x7F800000)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
