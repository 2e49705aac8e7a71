"""``ring``: reduce-scatter and all-gather of codes from neighbour to neighbour."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from ..codecs import Codec
from ..transport import Transport
from ._base import collective
from ._hops import Hop, HopSchedule, multi_hop

__all__ = ["ring", "schedule"]


@collective("ring")
def ring(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    piece: int | None = None,
) -> None:
    """Sum around a ring, each partial sum decoded, added to and encoded in one call (DynamiQ, sections 2 and 3).

    1. Reduce: chunk j starts at rank j + 1, and each rank adds its own values before it passes the sum on. Rank j,
       where it ends, encodes it too: ``size`` quantisations of each value, one by each rank.
    2. Gather: the bytes that rank j made go around unchanged; all ranks, rank j included, decode them.

    Each rank sends 2 (size - 1) / size of a message of the whole tensor in 2 (size - 1) hops, to one neighbour only: a
    host's link carries one rank's messages however many ranks the host has. Errors grow with ``size``, and sums of f32
    are added in another order than rank order. Each rank encodes each element once, so ``residual`` covers it all.

    With ``out`` (n,) the sum goes there and ``x`` stays. With ``piece`` so many elements go around at a time, and while
    they travel others are encoded or decoded; by default a tensor goes in halves where that saves time.
    """
    way = schedule(transport.rank, transport.size)
    multi_hop(x, codec, transport, "ring", way, seed=seed, residual=residual, out=out, piece=piece)


@lru_cache(maxsize=1024)
def schedule(rank: int, size: int) -> HopSchedule:
    """Return what ``rank`` sends and receives; chunk j is summed at rank j."""

    def hop(sent: int) -> Hop:
        sent, received = sent % size, (sent - 1) % size
        return Hop((rank + 1) % size, range(sent, sent + 1), (rank - 1) % size, range(received, received + 1))

    return HopSchedule(
        size,
        reduce=tuple(hop(rank - 1 - step) for step in range(size - 1)),
        gather=tuple(hop(rank - step) for step in range(size - 1)),
    )
