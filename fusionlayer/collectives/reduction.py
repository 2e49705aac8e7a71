"""The sum or average over ranks below every front: which collective makes it, and where it is scaled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..codecs import Codec
from ..transport import Transport
from ..wire import DTYPE_CODES
from . import halves
from ._base import AllReduce, gathers, get, get_gather

__all__ = ["UNSCALED", "Scaling", "choose", "reduce_flat", "reduce_scatter_flat", "scale_", "usual"]


class Encoding(Protocol):
    """What ``choose`` asks of a codec, or of its costs."""

    @property
    def lossless(self) -> bool:
        """Whether messages keep every bit."""

    @property
    def ahead(self) -> bool:
        """Whether tensors are best encoded one by one, ahead of fusion."""

    @property
    def collective(self) -> str | None:
        """The collective that is made for it, if one is."""


def choose(codec: Encoding, size: int, algorithm: str | None = None, *, ahead: bool | None = False) -> str:
    """Return the name of the collective for tensors of ``size`` ranks that a codec encodes.

    Args:
        codec: of the tensors.
        size: number of ranks.
        algorithm: what the caller wants; None: the codec's own collective, or the usual one.
        ahead: True for a collective of messages that were encoded ahead of fusion, False for one of flat tensors.
            None: as ``algorithm`` needs it, or without one as the codec prefers.

    Raises:
        ConfigError: there is no such collective, or none such for ``ahead``.
    """
    if ahead is None:
        ahead = codec.ahead if algorithm is None else algorithm in gathers.names()
    if ahead:
        name = algorithm or "gather"
        get_gather(name)
        return name
    name = algorithm or codec.collective or usual(codec, size)
    get(name)
    return name


def usual(codec: Encoding, size: int) -> str:
    """Return the name of the collective for flat tensors of codecs that have none of their own."""
    return "dense" if codec.lossless else "one_shot" if size <= 2 else "two_shot"


@dataclass(frozen=True)
class Scaling:
    """What a reduction multiplies by, and when. This is the rule of every front:

    - Floats are multiplied once before the sum: by ``prescale``, and for an average by 1 / size. So a sum of float16
      stays in range wherever its average is, and error feedback has the unit of what is sent.
    - Integers have no fractions to send: their average divides the sum, cut off towards zero.
    - The result is multiplied by ``postscale``.

    Attributes:
        before: factor on every rank's values before they are summed.
        after: factor on the sum.
        divisor: the sum is divided by it before ``after``; only for an average of integers above 1.
    """

    before: float = 1.0
    after: float = 1.0
    divisor: int = 1

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        size: int,
        *,
        average: bool = False,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Scaling:
        """Return what a sum or an average over ``size`` ranks of ``dtype`` multiplies by."""
        if not average:
            return cls(prescale, postscale)
        if dtype.is_floating_point:
            return cls(prescale / size, postscale)
        return cls(prescale, postscale, size)

    def fill(self, out: Tensor, x: Tensor) -> Scaling:
        """Set ``out``, which may be ``x``, to ``x`` times ``before`` in one pass; return what is left to do."""
        if x.dtype.is_floating_point and self.before != 1:
            torch.mul(x, self.before, out=out)
        else:
            if out is not x:
                out.copy_(x)
            scale_(out, self.before)
        return replace(self, before=1.0)

    def scaled(self, x: Tensor) -> Tensor:
        """Return ``x`` times ``before``, a new tensor unless that is 1."""
        return x if self.before == 1 else scale_(x.clone(), self.before)

    def scale_before_(self, x: Tensor) -> None:
        """Multiply what is about to be summed, in place."""
        scale_(x, self.before)

    def scale_after_(self, total: Tensor) -> None:
        """Divide and multiply the sum, in place."""
        if self.divisor != 1 and total.dtype is not torch.bool:
            torch.div(total, self.divisor, rounding_mode="trunc", out=total)
        scale_(total, self.after)


UNSCALED = Scaling()
"""A sum as it is."""


def scale_(x: Tensor, factor: float) -> Tensor:
    """Multiply in place and return ``x``; integers are cut off towards zero."""
    if factor == 1:
        return x
    if x.dtype.is_floating_point:
        return x.mul_(factor)
    return x.copy_((x.double() * factor).trunc())


def reduce_flat(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    scaling: Scaling = UNSCALED,
    *,
    algorithm: str | AllReduce | None = None,
    seed: int = 0,
    residual: Tensor | None = None,
) -> None:
    """Replace ``x`` (n,) by its sum over ranks, scaled: the same bits on every rank, and from every front.

    Args:
        x: flat and contiguous, equally long on all ranks. f32, bf16 and f16 travel by the codec, other types as they
            are.
        codec: what travels; made the same on all ranks.
        transport: the ranks; only the calling thread uses it.
        scaling: factors before and after the sum.
        algorithm: a collective or its name; None chooses.
        seed: of stochastic rounding; the same on all ranks.
        residual: (n,) f32, this rank's error feedback, of values that are scaled: added to what it sends, replaced by
            what sending lost.

    Raises:
        ConfigError: there is no such collective, or it cannot use the codec.
    """
    scaling.scale_before_(x)
    if x.dtype not in DTYPE_CODES:
        transport.all_reduce(x)
    else:
        if algorithm is None or isinstance(algorithm, str):
            algorithm = get(choose(codec, transport.size, algorithm))
        algorithm(x, codec, transport, seed=seed, residual=residual)
    scaling.scale_after_(x)


def reduce_scatter_flat(
    rows: Tensor,
    out: Tensor,
    codec: Codec,
    transport: Transport,
    scaling: Scaling = UNSCALED,
    *,
    algorithm: str | None = None,
    seed: int = 0,
) -> None:
    """Fill ``out`` (n,) with the sum over ranks of row ``rank`` of their ``rows`` (size, n), which stay, scaled.

    Args:
        rows, out: contiguous, of one type: f32, bf16 or f16.
        codec, transport, scaling, seed: as in ``reduce_flat``.
        algorithm: "ring" passes sums on from rank to rank; None sends each row straight to its rank.
    """
    scatter = halves.ring_reduce_scatter if algorithm == "ring" else halves.reduce_scatter
    scatter(scaling.scaled(rows), out, codec, transport, seed=seed)
    scaling.scale_after_(out)
