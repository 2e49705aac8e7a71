"""``butterfly``: reduce-scatter of codes by recursive halving, then all-gather by recursive doubling."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from ..codecs import Codec
from ..transport import Transport
from ._base import collective, sums_anew
from ._hops import NOTHING, Hop, HopSchedule, multi_hop


@collective(
    "butterfly",
    takes=sums_anew,
    because="encodes partial sums anew, where nothing may be left out,",
    suits=lambda size: size > 2 and not size & (size - 1),
    instead="ring",
)
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
    """Sum in pairs; each hop has half the data of the last. At most log2(size) + 1 quantisations (DynamiQ, section 2).

    1. Reduce: in hop h, ranks r and r xor 2^h split the range of their partial sums, and each gets the other's sums of
       its half. Received messages of an element wait until the rank encodes that element: one call decodes, adds and
       encodes.
    2. Gather: the same hops backwards. The bytes that a chunk's owner encoded are sent unchanged; all ranks, the owner
       included, decode them.

    With 2^k ranks each rank sends 2 (1 - 2^-k) of a message of the whole tensor in 2k hops, the longest messages to
    nearby ranks. With other numbers of ranks, each rank beyond the largest power of two first sends all its values to a
    lower rank, which returns the whole sum at the end. This costs two more hops and, for such ranks, a message of the
    whole tensor more.

    Sums of f32 are not added in rank order. Each rank encodes each element once, so ``residual`` covers all
    quantisations. ``out`` and ``piece`` are as in ``ring``.
    """
    way = schedule(transport.rank, transport.size)
    multi_hop(x, codec, transport, "butterfly", way, seed=seed, residual=residual, out=out, piece=piece)


@lru_cache(maxsize=1024)
def schedule(rank: int, size: int) -> HopSchedule:
    """Return the schedule of ``rank``; there is a chunk for each rank below the largest power of two."""
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
