"""``butterfly``: reduce-scatter by recursive halving and all-gather by recursive doubling, of codes."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from ..codecs import Codec
from ..transport import Transport
from ._base import collective
from ._hops import NOTHING, Hop, HopSchedule, multi_hop

__all__ = ["butterfly", "schedule"]


@collective("butterfly")
def butterfly(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    piece: int | None = None,
) -> None:
    """Sum in pairs, each hop over half as much: log2(size) + 1 quantisations at most of any value (DynamiQ, section 2).

    1. Reduce: in hop h rank r and rank r xor 2^h halve what both hold sums of, and each gets the other's sum of its
       half. What a rank has received of an element waits until it encodes that element: decoding, adding and encoding
       are one call.
    2. Gather: the same hops backwards. The bytes that a chunk's owner made travel unchanged; all ranks, the owner
       included, decode them.

    Between 2^k ranks each sends 2 (1 - 2^-k) of a message of the whole tensor in 2k hops, the longest ones to ranks
    nearby. Of other numbers of ranks those beyond the largest power of two first send all they have to a rank below,
    which sends them the whole sum at last: a message of the whole tensor more, in two more hops.

    Sums of f32 are added in another order than rank order. Each rank encodes each element once, so ``residual`` covers
    all quantisations. ``out`` and ``piece`` are as in ``ring``.
    """
    way = schedule(transport.rank, transport.size)
    multi_hop(x, codec, transport, "butterfly", way, seed=seed, residual=residual, out=out, piece=piece)


@lru_cache(maxsize=1024)
def schedule(rank: int, size: int) -> HopSchedule:
    """Return what ``rank`` sends and receives; there is a chunk for each rank below the largest power of two."""
    steps = size.bit_length() - 1
    inner = 1 << steps
    everything, idle = range(inner), Hop(rank, NOTHING, rank, NOTHING)
    if rank >= inner:
        home = rank - inner
        leave, back = Hop(home, everything, home, NOTHING), Hop(home, NOTHING, home, everything)
        return HopSchedule(inner, (leave, *[idle] * steps), (*[idle] * steps, back))

    halving, doubling = [], []
    held = everything
    for step in range(steps):
        peer = rank ^ (1 << step)
        middle = (held.start + held.stop) // 2
        lower, upper = range(held.start, middle), range(middle, held.stop)
        held, given = (upper, lower) if rank >> step & 1 else (lower, upper)
        halving.append(Hop(peer, given, peer, held))
        doubling.append(Hop(peer, held, peer, given))
    doubling.reverse()
    if size > inner:
        guest = rank + inner
        comes, goes = Hop(guest, NOTHING, guest, everything), Hop(guest, everything, guest, NOTHING)
        halving.insert(0, comes if guest < size else idle)
        doubling.append(goes if guest < size else idle)
    return HopSchedule(inner, tuple(halving), tuple(doubling))
