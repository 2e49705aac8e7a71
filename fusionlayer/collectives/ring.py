"""``ring``: reduce-scatter and all-gather of codes, each message from a rank to its neighbour."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from ..codecs import Codec
from ..transport import Transport
from ._base import collective, sums_anew
from ._hops import Hop, HopSchedule, multi_hop


@collective(
    "ring",
    takes=sums_anew,
    because="encodes partial sums anew, where nothing may be left out,",
    suits=lambda size: size > 2,
)
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
    """Sum around a ring; one call decodes each partial sum, adds to it and encodes it (DynamiQ, sections 2 and 3).

    1. Reduce: chunk j starts at rank j + 1, and each rank adds its own values before it passes the sum on. It ends at
       rank j, which encodes it too: ``size`` quantisations of each value, one by each rank.
    2. Gather: the bytes that rank j encoded go around unchanged; all ranks, rank j included, decode them.

    Each rank sends 2 (size - 1) / size of a message of the whole tensor in 2 (size - 1) hops, to one neighbour only. So
    the link of a host carries the messages of one rank, however many ranks the host has. Errors grow with ``size``.
    Sums of f32 are not added in rank order. Each rank encodes each element once, so ``residual`` covers all
    quantisations.

    With ``out`` (n,) the sum goes there and ``x`` stays. With ``piece`` this many elements go around at a time, while
    others are encoded or decoded. By default a tensor is sent in halves if that saves time.
    """
    way = schedule(transport.rank, transport.size)
    multi_hop(x, codec, transport, "ring", way, seed=seed, residual=residual, out=out, piece=piece)


@lru_cache(maxsize=1024)
def schedule(rank: int, size: int) -> HopSchedule:
    """Return the schedule of ``rank``; the sum of chunk j ends at rank j."""

    def hop(sent: int) -> Hop:
        sent, received = sent % size, (sent - 1) % size
        return Hop((rank + 1) % size, range(sent, sent + 1), (rank - 1) % size, range(received, received + 1))

    return HopSchedule(
        size,
        reduce=tuple(hop(rank - 1 - step) for step in range(size - 1)),
        gather=tuple(hop(rank - step) for step in range(size - 1)),
    )
