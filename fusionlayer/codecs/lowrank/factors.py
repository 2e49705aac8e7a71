"""Factors of matrices, computed so that every machine gets the same bits from the same factors.

All ranks hold the same sums and must compute the same result from them, but matrix libraries add in different orders.
So this module uses two kinds of operations only. Operations on single elements are fixed by IEEE 754. Sums of integers
that f64 holds exactly do not depend on the order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...base.seeds import derive_seed

_F64_BITS = 53
_ROUNDER = 1.5 * 2.0**52
_VANISHED = 2.0**-30  # a row counts as dependent if no more of its square is left: few bits of the rest are known
_TILE = 1 << 16  # elements that stay in the second-level cache while their terms are added


def square_shape(numel: int) -> tuple[int, int]:
    """Return (rows, columns) of the matrix closest to a square that has room for ``numel`` elements."""
    rows = math.isqrt(max(0, numel - 1)) + 1
    return rows, -(-numel // rows)


def random_factor(rank: int, length: int, *seed: int) -> Tensor:
    """Return (rank, length) f32 on the CPU, evenly distributed in [-1, 1): the same bits on every machine."""
    rng = torch.Generator().manual_seed(derive_seed(*seed) >> 1)
    return torch.rand(rank, length, generator=rng, device="cpu") * 2 - 1


def orthonormal(factors: Tensor) -> Tensor:
    """Return (k, rank, length) f32: for each of the ``factors``, orthogonal rows that span the same space.

    Rows have length 1, or 0 where one depends on those before it. A factor with a value that is not finite becomes NaN.
    The method is Cholesky factorisation of the Gram matrices, which are so exact that one elimination is enough.
    """
    return _eliminated(_scaled(factors.double())).float()


def _scaled(rows: Tensor) -> Tensor:
    """Return the rows, each times the power of two that scales its largest magnitude to between 1/2 and 1."""
    largest = rows.abs().amax(2, keepdim=True)
    unit = largest / torch.frexp(largest).mantissa
    return rows / torch.where(largest == 0, 1.0, unit)


def _eliminated(rows: Tensor) -> Tensor:
    gram = _gram(rows)
    squares = gram.diagonal(dim1=1, dim2=2) * _VANISHED
    for i in range(rows.shape[1]):
        left = gram[:, i, i]
        # A NaN fails the comparison, so it stays a NaN.
        inverse = torch.where(left <= squares[:, i], 0.0, 1 / left.sqrt())[:, None]
        row, shares = rows[:, i], gram[:, i, i + 1 :]
        row *= inverse
        shares *= inverse
        rows[:, i + 1 :] -= shares[:, :, None] * row[:, None]
        gram[:, i + 1 :, i + 1 :] -= shares[:, :, None] * shares[:, None]
    return rows


def _gram(rows: Tensor) -> Tensor:
    """Return the (k, rank, rank) products of the rows of (k, rank, length) f64, at most 1 in magnitude.

    Each value becomes two integers, so short that sums of their products never need more than the 53 bits of an f64.
    """
    k, rank, length = rows.shape
    bits = (_F64_BITS - max(1, length - 1).bit_length()) // 2
    unit = 2.0**bits
    scaled = rows * unit
    high = (scaled + _ROUNDER) - _ROUNDER  # to the nearest integer; torch's round is far slower
    low = ((scaled - high) * unit + _ROUNDER) - _ROUNDER
    both = torch.cat([high, low], 1)
    sums = torch.bmm(both, both.mT)
    mixed = sums[:, :rank, rank:]
    return (sums[:, :rank, :rank] + (mixed + mixed.mT) / unit + sums[:, rank:, rank:] / unit**2) / unit**2


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Fill ``out`` (m, n), of any type, with left^T right for ``left`` (rank, m) and ``right`` (rank, n) f32.

    The terms of an element are added in the order of the factors' rows.
    """
    tile = max(1, _TILE // max(1, out.shape[1])) if out.device.type == "cpu" else max(1, out.shape[0])
    for start in range(0, out.shape[0], tile):
        columns = left[:, start : start + tile, None]
        total = columns[0] * right[0]
        term = torch.empty_like(total)
        for i in range(1, left.shape[0]):
            total += torch.mul(columns[i], right[i], out=term)
        out[start : start + tile].copy_(total)
