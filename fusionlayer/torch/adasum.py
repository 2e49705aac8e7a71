"""Adasum: a sum of gradients that adds orthogonal ones and averages parallel ones."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..transport import Transport
from ..transport.composed import by_rank


def check_world(size: int) -> None:
    """Raise ``ConfigError`` unless ``size`` is a power of two, which Adasum needs to pair ranks."""
    if size & (size - 1):
        raise ConfigError(
            f"op=Adasum pairs ranks, then pairs of them, and so on: it needs 1, 2, 4, 8, ... ranks and got {size}; use "
            "op=Average, or a process set of as many ranks"
        )


def all_reduce(x: Tensor, transport: Transport) -> None:
    """Replace ``x`` by the adaptive sum of all ranks' values, with the same bits on every rank.

    The adaptive sum of two gradients a and b of one tensor is

        (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b.

    It is a + b for orthogonal vectors, and their mean for equal ones. The first round combines the gradients of pairs
    of ranks, the next one the results of two pairs, and so on. In every round partners split the vector that they have,
    and each combines one half. Scalar products are summed over all ranks that have a part of the same two vectors. All
    rounds together send as many bytes as an all-reduce (Maleki et al., "Scaling distributed training with adaptive
    summation", MLSys 2021, section 3 and Algorithm 1). Products are summed in f64. f16 and bf16 values are added as
    f32.

    Args:
        x: (n,) contiguous floating-point gradient of one tensor, n >= 0, equally long on all ranks.
        transport: moves the messages; all ranks call together.

    Raises:
        ConfigError: the number of ranks is not a power of two, or ``x`` is not floating-point.
        TransportError: a peer failed, stopped or timed out.
    """
    check_world(transport.size)
    if not x.dtype.is_floating_point:
        raise ConfigError(f"op=Adasum of a {x.dtype} tensor; expected floating-point values, or op=Sum")
    if transport.size == 1:
        return
    work = x if x.dtype in (torch.float32, torch.float64) else x.float()
    part = range(work.numel())
    distance = 1
    while distance < transport.size:
        lower, upper = range(part.start, _middle(part)), range(_middle(part), part.stop)
        first = not transport.rank & distance
        part, given = (lower, upper) if first else (upper, lower)
        mine = work[part.start : part.stop]
        theirs = torch.empty_like(mine)
        _swap(work[given.start : given.stop], theirs, transport.rank ^ distance, transport)
        a, b = (mine, theirs) if first else (theirs, mine)
        mine.copy_(_combine(a, b, _sum_in_block(_products(a, b), 2 * distance, transport)))
        distance *= 2
    pieces = [work[own.start : own.stop].view(torch.uint8) for own in _parts(work.numel(), transport.size)]
    transport.exchange(by_rank([pieces[transport.rank].clone()] * transport.size, pieces))
    if work is not x:
        x.copy_(work)


def _middle(part: range) -> int:
    return part.start + len(part) // 2


def _parts(numel: int, size: int) -> list[range]:
    """Return the part of the vector that each rank has after the last round. Its bits say which halves it kept."""
    parts = [range(numel)] * size
    distance = 1
    while distance < size:
        parts = [
            range(_middle(part), part.stop) if rank & distance else range(part.start, _middle(part))
            for rank, part in enumerate(parts)
        ]
        distance *= 2
    return parts


def _swap(sent: Tensor, received: Tensor, partner: int, transport: Transport) -> None:
    transport.exchange({partner: (sent.view(torch.uint8), received.view(torch.uint8))})


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return a.b, a.a and b.b as (3,) f64."""
    wide_a, wide_b = a.double(), b.double()
    return torch.stack([wide_a.dot(wide_b), wide_a.dot(wide_a), wide_b.dot(wide_b)])


def _sum_in_block(products: Tensor, block: int, transport: Transport) -> Tensor:
    """Return the sum over the ``block`` neighbouring ranks that share two vectors: the same bits on all of them."""
    first = transport.rank // block * block
    mine = products.view(torch.uint8)
    every = products.new_empty(block, 3)
    transport.exchange({first + place: (mine, row.view(torch.uint8)) for place, row in enumerate(every)})
    return every.sum(0)


def _combine(a: Tensor, b: Tensor, products: Tensor) -> Tensor:
    """Return the adaptive sum of parts of two vectors with known ``products``. Zeros count as orthogonal."""
    both, of_a, of_b = products
    share_a = torch.where(of_a == 0, 1.0, 1 - both / (2 * of_a))
    share_b = torch.where(of_b == 0, 1.0, 1 - both / (2 * of_b))
    return a * share_a.to(a.dtype) + b * share_b.to(b.dtype)
