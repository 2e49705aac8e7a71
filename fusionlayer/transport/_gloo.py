"""Bytes between the ranks of a gloo group, by its point-to-point operations.

Why not gloo's collectives: they abort the process where lengths differ between ranks, and its all-to-all and all-gather
post each send before the receive, so that a rank's notice "ready to receive" queues behind its own data and a
full-duplex link carries one direction at a time. Here every receive is posted before the first send. Lengths are
part of the tag: messages of different length never meet, which is a time-out instead of an abort.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._calls import nbytes
from ._link import Link, LinkError, Message
from ._sum import sum_in_rank_order

__all__ = ["GlooLink"]

# gloo fails the waits of a lost connection, save for the message that is just being read or written. So a long message
# travels as head and tail, and the tail is waited for first; and the receiver of a very long one acknowledges it.
TAIL_BYTES = 4096
SPLIT_FROM_BYTES = 64 << 10
ACKNOWLEDGE_FROM_BYTES = 1 << 20

# Below, one exchange of everything with everybody is faster than two exchanges of a share each.
WHOLE_BELOW_BYTES = 8 << 10

_NEVER_SENT = 0x7FFFFFFF


class GlooLink(Link):
    """One rank's end of a gloo group of its own.

    Raises:
        RuntimeError: not all ranks came in time.
    """

    device = torch.device("cpu")

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        # torch's stubs know only a part of its methods.
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=timeout)
        )

    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        group = self._group
        if group is None:
            raise LinkError(self._rank, "the transport is closed")
        deadline = time.monotonic() + self._timeout
        peer = self._rank
        try:
            # The order of the waits is the one in which a loss is noticed soonest.
            arrived: list[tuple[int, dist.Work]] = []
            heads: list[tuple[int, dist.Work]] = []
            acknowledged: list[tuple[int, dist.Work]] = []
            sent: list[tuple[int, dist.Work]] = []
            for peer, data, key in incoming:
                head, tail = _split(data)
                if head is not None:
                    heads.append((peer, group.recv([head], peer, _tag(key, data.numel(), 0))))
                arrived.append((peer, group.recv([tail], peer, _tag(key, data.numel(), 1))))
            for peer, data, key in outgoing:
                if data.numel() >= ACKNOWLEDGE_FROM_BYTES:
                    tag = _tag(key, data.numel(), 2)
                    acknowledged.append((peer, group.recv([torch.empty(1, dtype=torch.uint8)], peer, tag)))
            for peer, data, key in outgoing:
                head, tail = _split(data)
                if head is not None:
                    sent.append((peer, group.send([head], peer, _tag(key, data.numel(), 0))))
                sent.append((peer, group.send([tail], peer, _tag(key, data.numel(), 1))))
            for peer, work in arrived + heads:  # noqa: B007 - the except clause reads `peer`
                _wait(work, deadline)
            for peer, data, key in incoming:
                if data.numel() >= ACKNOWLEDGE_FROM_BYTES:
                    note = torch.zeros(1, dtype=torch.uint8)
                    sent.append((peer, group.send([note], peer, _tag(key, data.numel(), 2))))
            for peer, work in acknowledged + sent:  # noqa: B007
                _wait(work, deadline)
        except RuntimeError as error:
            self.close()
            raise LinkError(peer, str(error)) from None

    def all_reduce(self, x: Tensor, number: int) -> None:
        if nbytes(x) < WHOLE_BELOW_BYTES:
            every = x.new_empty(self._size, x.numel())
            every[self._rank] = x
            self._all_gather(x, list(every.unbind(0)), (number, 0))
            sum_in_rank_order(list(every.unbind(0)), x)
            return
        shares = self._shares(x)
        mine = shares[self._rank]
        parts = list(mine.new_empty(self._size, mine.numel()).unbind(0))
        self._swap(shares, parts, (number, 0))
        parts[self._rank] = mine
        sum_in_rank_order(parts, mine)
        self._all_gather(mine, shares, (number, 1))

    def broadcast(self, x: Tensor, root: int, number: int) -> None:
        nothing = x[:0]
        if self._size == 2 or x.numel() < WHOLE_BELOW_BYTES:
            whole_from = [x if rank == root != self._rank else nothing for rank in range(self._size)]
            self._swap([x if self._rank == root else nothing] * self._size, whole_from, (number, 0))
            return
        shares = self._shares(x)
        mine = shares[self._rank]
        self._swap(
            shares if self._rank == root else [nothing] * self._size,
            [mine if rank == root else nothing for rank in range(self._size)],
            (number, 0),
        )
        self._all_gather(mine, shares, (number, 1))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        for step in range(1, self._size):
            peer = (self._rank + step) % self._size
            try:
                # A receive that runs out of time is what makes gloo close all connections of a group.
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return

    def _swap(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], key: tuple[int, int]) -> None:
        """Send ``sends[j]`` to rank j, receive ``recvs[j]`` from it; the entries of this rank are left alone."""
        self.exchange(
            *(
                [
                    Message(peer, data, key)
                    for step in range(1, self._size)
                    if (data := xs[peer := (self._rank + way * step) % self._size].view(torch.uint8)).numel()
                ]
                for way, xs in ((1, sends), (-1, recvs))
            )
        )

    def _all_gather(self, mine: Tensor, every: Sequence[Tensor], key: tuple[int, int]) -> None:
        self._swap([mine] * self._size, every, key)

    def _shares(self, x: Tensor) -> list[Tensor]:
        """Return ``x`` (n,) cut in one piece per rank."""
        bounds = [x.numel() * rank // self._size for rank in range(self._size + 1)]
        return [x[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def _split(data: Tensor) -> tuple[Tensor | None, Tensor]:
    if data.numel() < SPLIT_FROM_BYTES:
        return None, data
    return data[:-TAIL_BYTES], data[-TAIL_BYTES:]


def _tag(key: tuple[int, int], length: int, part: int) -> int:
    return zlib.crc32(struct.pack("<qqqb", *key, length, part)) & 0x7FFFFFFF


def _wait(work: dist.Work, deadline: float) -> None:
    if not work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001))):
        raise RuntimeError("the wait was given up")
