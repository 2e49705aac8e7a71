"""The sum or average over ranks that every API calls: it scales values and calls the collective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..codecs import Codec
from ..native.wire import DTYPE_CODES
from ..transport import Transport
from . import halves
from ._base import AllReduce, get
from .choice import choose, log_once


@dataclass(frozen=True)
class Scaling:
    """The factors of a reduction, before and after the sum. Every front follows these rules:

    - Floats are multiplied once before the sum: by ``prescale``, and for an average also by 1 / size. So a sum of
      float16 does not overflow if its average does not, and error feedback has the unit of the sent values.
    - An average of integers divides the sum and truncates towards zero, since integers have no fractions to send.
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
        """Return the scaling of a sum or an average of ``dtype`` over ``size`` ranks."""
        if not average:
            return cls(prescale, postscale)
        if dtype.is_floating_point:
            return cls(prescale / size, postscale)
        return cls(prescale, postscale, size)

    def fill(self, out: Tensor, x: Tensor) -> Scaling:
        """Set ``out``, which may be ``x``, to ``x`` times ``before`` in one pass; return the scaling still to do."""
        if x.dtype.is_floating_point and self.before != 1:
            torch.mul(x, self.before, out=out)
        else:
            if out is not x:
                out.copy_(x)
            scale_(out, self.before)
        return replace(self, before=1.0)

    def scaled(self, x: Tensor) -> Tensor:
        """Return ``x`` times ``before``: a new tensor, or ``x`` itself if the factor is 1."""
        return x if self.before == 1 else scale_(x.clone(), self.before)

    def scale_before_(self, x: Tensor) -> None:
        """Multiply ``x`` in place by the factor before the sum."""
        scale_(x, self.before)

    def scale_after_(self, total: Tensor) -> None:
        """Divide and multiply the sum ``total`` in place."""
        if self.divisor != 1 and total.dtype is not torch.bool:
            torch.div(total, self.divisor, rounding_mode="trunc", out=total)
        if self.after != 1:
            scale_(total, self.after)


UNSCALED = Scaling()
"""The scaling of a plain sum: all factors are 1."""


def scale_(x: Tensor, factor: float) -> Tensor:
    """Multiply ``x`` in place and return it; integers are truncated towards zero."""
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
        x: flat and contiguous, equally long on all ranks. The codec encodes f32, bf16 and f16; other types are sent
            uncompressed.
        codec: the codec of the messages, the same on all ranks.
        transport: the ranks; only the calling thread uses it.
        scaling: factors before and after the sum.
        algorithm: a collective or its name; None chooses, see ``choose``.
        seed: the seed of stochastic rounding; the same on all ranks.
        residual: (n,) f32, this rank's error feedback, in the unit of scaled values: added before encoding, then
            replaced by the loss.

    Raises:
        ConfigError: there is no such collective, or it cannot use the codec.
    """
    if scaling.before != 1:
        scaling.scale_before_(x)
    if x.dtype not in DTYPE_CODES:
        transport.all_reduce(x)
    else:
        if algorithm is None or isinstance(algorithm, str):
            name = choose(codec, transport.node_sizes, algorithm)
            log_once("sums of calls", codec, name, x, transport)
            algorithm = get(name)
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
    """Fill ``out`` (n,) with the scaled sum over ranks of row ``rank`` of their ``rows`` (size, n), which stay.

    Args:
        rows: this rank's summands, contiguous: f32, bf16 or f16.
        out: of the same type.
        codec: see ``reduce_flat``.
        transport: see ``reduce_flat``.
        scaling: see ``reduce_flat``.
        algorithm: "ring" passes sums on from rank to rank; None is ``halves.reduce_scatter``.
        seed: see ``reduce_flat``.
    """
    scatter = halves.ring_reduce_scatter if algorithm == "ring" else partial(halves.reduce_scatter, piece=None)
    scatter(scaling.scaled(rows), out, codec, transport, seed=seed)
    scaling.scale_after_(out)
