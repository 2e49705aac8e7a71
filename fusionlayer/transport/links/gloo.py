"""A link between the ranks of a gloo group, made of gloo's point-to-point operations.

It avoids gloo's collectives for two reasons. They abort the process if lengths differ between ranks. And gloo's
all-to-all and all-gather post each send before the receive: a rank's notice "ready to receive" then queues behind its
own data, and a full-duplex link carries one direction at a time. Here every receive is posted before the first send.
The length is part of the tag, so messages of different lengths never match: that is a time-out instead of an abort.
"""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import DamagedMessage, LinkError, LinkMessage
from .checksums import compare, room, seal
from .exchange import ExchangeLink
from .gloo_mesh import GlooMesh, connect_over
from .gloo_waits import SendWaits, Works
from .shared_memory import Invitation, SharedMemory

# When a connection is lost, gloo fails all waits for messages from there, except the one for a message that is being
# read. So a long message is sent as head and tail, and the tail is waited for first. The receiver of a very long
# message also acknowledges it. For messages to there see ``SendWaits``.
TAIL_BYTES = 4096
SPLIT_ABOVE_BYTES = 64 << 10
ACKNOWLEDGE_FROM_BYTES = 1 << 20

# From this length on, ranks of one host sum through shared memory. Other ranks use a ring, which keeps one stream on
# each link and is 3 to 15 % faster on 4 hosts: gloo's own without checksums, or the one below. With checksums a sum
# over 4 hosts took 0 % longer at 100 Mbit/s and 15 to 30 % longer at 1 Gbit/s, so they are not the default there. A
# ring is not used for 16-bit floats: it would round at every hop.
LARGE_FROM_BYTES = 1 << 20
RING_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)

# Most bytes of one piece in a ring: enough to be worth its calls, and too few to be acknowledged.
_PIECE_BYTES = 512 << 10

# Distance between the keys of the steps of one call, so that their messages cannot match each other.
_STEP = 1 << 32
_PEER = attrgetter("peer")


@dataclass(slots=True)
class _Posted:
    """Messages in flight.

    Attributes:
        incoming: those that this rank receives.
        tails: receives that end with a message.
        heads: receives of the bytes before that.
        sent: sends, and receives of acknowledgements.
        sealed: for each message with a checksum: sender, tail with the checksum, message, and where the tail starts.
        is_short_swap: whether all messages are short, and each goes to a rank that sends one too. Such a rank has
            requested its message before it sent its own. So when that is here, the message has been written.
    """

    incoming: Sequence[LinkMessage]
    tails: list[tuple[int, dist.Work]]
    heads: list[tuple[int, dist.Work]]
    sent: list[tuple[int, dist.Work]]
    sealed: list[tuple[int, Tensor, Tensor, int]]
    is_short_swap: bool


class GlooLink(ExchangeLink):
    """One rank's end of a gloo group, which other links may share.

    One thread at a time makes calls. ``close`` may come from any thread.

    Args:
        mesh: the group.
        name: no other link over the group has it.
        rank: rank of this process in the group.
        size: number of ranks in the group.
        timeout: seconds that a call may wait for other ranks.
        node: name of this rank's node, equal on the ranks of that node.
        checked: the ranks to which, and from which, messages carry a checksum.
        sums_checked: whether large sums carry one too: by a ring of ours instead of gloo's.

    Raises:
        LinkError: another link over the group has failed.
    """

    def __init__(
        self,
        mesh: GlooMesh,
        name: str,
        rank: int,
        size: int,
        timeout: float,
        node: str,
        checked: frozenset[int],
        *,
        sums_checked: bool,
    ) -> None:
        super().__init__(rank, size, timeout, checked)
        self._sums_checked = sums_checked
        self._node = node
        self._memory: SharedMemory | None = None
        self._has_invited = False
        # Guards _group in close(): two threads may close at once, and only one of them may leave the group.
        self._lock = threading.Lock()
        # Whether a call is in flight, or has failed. Its messages may be in flight then.
        self._is_busy = False
        self._sends = SendWaits(wait)
        mesh.join()
        self._mesh = mesh
        self._salt = zlib.crc32(name.encode())
        self._group: Any = mesh.group
        # Connections for sums by gloo's own ring: gloo numbers them, so links must not share them.
        self._sums: GlooMesh | None = None

    def exchange(
        self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage], deadline: float | None = None
    ) -> None:
        if deadline is None:
            deadline = time.monotonic() + self._timeout
        self._is_busy = True
        try:
            posted = self._post(outgoing, incoming)
            if posted.is_short_swap:
                wait([*posted.tails, *posted.sent], deadline)
                if posted.sealed:
                    self._compare(posted)
            else:
                self._receive(posted, deadline)
                self._finish(posted.sent, deadline)
        except LinkError as error:
            self._lose(error)
            raise
        self._is_busy = False

    def _post(self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage]) -> _Posted:
        """Start to send and receive messages. ``_receive`` and then a wait for ``sent`` must follow."""
        group, checked, salt = self._group or self._open_group(), self._checked, self._salt
        posted = _Posted(incoming, [], [], [], [], set(map(_PEER, outgoing)) <= set(map(_PEER, incoming)))
        peer = self._rank
        try:
            for peer, data, key in incoming:
                length, tail, start = data.numel(), data, 0
                if length > SPLIT_ABOVE_BYTES:
                    start = length - TAIL_BYTES
                    tail = data[start:]
                    posted.heads.append((peer, group.recv([data[:start]], peer, _tag(salt, key, length, 0))))
                    posted.is_short_swap = False
                if peer in checked:
                    tail = room(data, start)
                    posted.sealed.append((peer, tail, data, start))
                posted.tails.append((peer, group.recv([tail], peer, _tag(salt, key, length, 1))))
            for peer, data, key in outgoing:
                if data.numel() >= ACKNOWLEDGE_FROM_BYTES:
                    note = torch.empty(1, dtype=torch.uint8, device="cpu")
                    posted.sent.append((peer, group.recv([note], peer, _tag(salt, key, data.numel(), 2))))
            for peer, data, key in outgoing:
                if data.numel() > SPLIT_ABOVE_BYTES:
                    head = data[:-TAIL_BYTES]
                    posted.sent.append((peer, group.send([head], peer, _tag(salt, key, data.numel(), 0))))
                    posted.is_short_swap = False
            # Checksums are computed while heads are sent. They are sent with the tails.
            for peer, data, key in outgoing:
                start = data.numel() - TAIL_BYTES if data.numel() > SPLIT_ABOVE_BYTES else 0
                tail = seal(data, start) if peer in checked else data[start:]
                posted.sent.append((peer, group.send([tail], peer, _tag(salt, key, data.numel(), 1))))
        except RuntimeError as error:
            raise LinkError(peer, str(error)) from None
        return posted

    def _receive(self, posted: _Posted, deadline: float) -> None:
        """Wait until the messages are here, compare their checksums and acknowledge the long ones."""
        # In the order in which a loss is noticed soonest: tails first, then heads (see TAIL_BYTES).
        wait([*posted.tails, *posted.heads], deadline)
        self._compare(posted)
        for peer, data, key in posted.incoming:
            if data.numel() >= ACKNOWLEDGE_FROM_BYTES:
                note = torch.zeros(1, dtype=torch.uint8, device="cpu")
                try:
                    sent = self._open_group().send([note], peer, _tag(self._salt, key, data.numel(), 2))
                except RuntimeError as error:
                    raise LinkError(peer, str(error)) from None
                posted.sent.append((peer, sent))

    def _compare(self, posted: _Posted) -> None:
        """Compare the checksums of messages that are here."""
        for peer, tail, data, start in posted.sealed:
            compare(tail, data, start, peer, self._rank)

    def _finish(self, works: Works, deadline: float) -> None:
        """Wait until sent data have left this process."""
        self._sends.wait(works, deadline, self._open_group)

    def all_reduce(self, x: Tensor, key: int) -> None:
        if x.nbytes < LARGE_FROM_BYTES:
            return super().all_reduce(x, key)
        self._is_busy = True
        deadline = self._deadline()
        if not self._has_invited:
            self._memory, self._has_invited = self._invite(key, deadline), True
            self._is_busy = True
        if self._memory is not None:
            self._sum_in(self._memory, x, key, deadline)
        elif x.dtype in RING_DTYPES:
            (self._sum_by_ring if self._sums_checked else self._sum_by_gloo)(x, key, deadline)
        else:
            super().all_reduce(x, key)
        self._is_busy = False

    def close(self) -> None:
        with self._lock:
            is_open, self._group = self._group is not None, None
        if not is_open:
            return
        self._sends.aside.end()
        if self._memory is not None:
            self._memory.close()
        for mesh in (self._sums, self._mesh):
            if mesh is not None:
                mesh.leave(failed=self._is_busy)

    def abort(self) -> None:
        self._is_busy = True
        self.close()

    def _invite(self, key: int, deadline: float) -> SharedMemory | None:
        """Return memory that all ranks share, or None on every rank if one rank cannot see or reach another."""
        invitation = Invitation(self._rank, self._node, deadline)
        try:
            mine = invitation.record
            records = list(mine.new_empty(self._size, mine.numel()).unbind(0))
            records[self._rank] = mine
            self._all_gather(mine, records, key - _STEP, deadline)
            for number, step in enumerate((lambda: invitation.accept(records), invitation.welcome), 2):
                done = torch.full((self._size, 1), step(), dtype=torch.uint8, device="cpu")
                self._all_gather(done[self._rank], list(done.unbind(0)), key - number * _STEP, deadline)
                if not done.all():
                    return None
            return invitation.keep()
        finally:
            invitation.close()

    def _sum_in(self, memory: SharedMemory, x: Tensor, key: int, deadline: float) -> None:
        try:
            memory.all_reduce(x, key, deadline)
        except LinkError:
            self.abort()
            raise

    def _sum_by_gloo(self, x: Tensor, key: int, deadline: float) -> None:
        """Replace ``x`` by its sum, made by gloo's own ring, whose messages have no room for a checksum."""
        following, previous = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        # gloo aborts the process if a neighbour in its ring is in another call or has another length. This byte arrives
        # only if the neighbour is in the same call.
        note = torch.zeros(2, dtype=torch.uint8, device="cpu")
        self.exchange([LinkMessage(following, note[:1], key)], [LinkMessage(previous, note[1:], key)], deadline)
        try:
            self._sums = self._sums or self._connect_for_sums(key, deadline)
            self._is_busy = True
            self._finish([(previous, self._sums.group.allreduce([x]))], deadline)
        except LinkError as error:
            self._lose(error)
            raise
        except RuntimeError as error:
            self.abort()
            raise LinkError(previous, str(error)) from None

    def _connect_for_sums(self, key: int, deadline: float) -> GlooMesh:
        """Return connections for gloo's own sums. All ranks call it together, in the first such sum."""

        def gather(mine: Tensor) -> list[Tensor]:
            every = list(mine.new_empty(self._size, mine.numel()).unbind(0))
            every[self._rank].copy_(mine)
            self._all_gather(mine, every, key - 4 * _STEP, deadline)
            return every

        def look() -> None:
            self._open_group()

        connect = partial(connect_over, gather, self._rank, self._size, deadline, f"sums {self._salt}")
        try:
            mesh = self._sends.aside.run(connect, deadline, look)
        except RuntimeError as error:
            raise LinkError(self._rank, str(error)) from None
        mesh.join()
        return mesh

    def _sum_by_ring(self, x: Tensor, key: int, deadline: float) -> None:
        """Replace ``x`` by its sum: shares are sent around a ring and are added at every hop, then are sent once more.

        Shares are sent in pieces. While a piece is added, others are in flight: the network does not wait for the sums.
        """
        following, previous = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        shares = self._shares(x)
        count = max(2, -(-shares[-1].nbytes // _PIECE_BYTES))
        pieces = [share.tensor_split(count) for share in shares]
        rooms = torch.empty_like(shares[-1]).tensor_split(count)
        under_way: deque[tuple[_Posted, Tensor, Tensor]] = deque()
        sent: list[tuple[int, dist.Work]] = []

        def arrive() -> None:
            posted, arrived, piece = under_way.popleft()
            self._receive(posted, deadline)
            sent.extend(posted.sent)
            if arrived is not piece:
                piece += arrived

        try:
            for hop in range(2 * (self._size - 1)):
                given, taken = (pieces[(self._rank - hop - late) % self._size] for late in (0, 1))
                for number in range(count):
                    if hop:  # what was posted one hop ago: it is the piece that this hop sends
                        arrive()
                    piece = taken[number]
                    into = rooms[number][: piece.numel()] if hop < self._size - 1 else piece
                    step = key + (hop * count + number) * _STEP
                    posted = self._post(
                        [LinkMessage(following, given[number].view(torch.uint8), step)],
                        [LinkMessage(previous, into.view(torch.uint8), step)],
                    )
                    under_way.append((posted, into, piece))
            while under_way:
                arrive()
            self._finish(sent, deadline)
        except LinkError as error:
            self._lose(error)
            raise

    def _lose(self, error: LinkError) -> None:
        """Close the connections after an error; not after damage, before the other ranks can read why."""
        if not isinstance(error, DamagedMessage):
            self.abort()

    def _open_group(self) -> Any:
        group = self._group
        if group is None:
            raise LinkError(self._rank, "the connections are closed")
        return group


def wait(works: Works, deadline: float) -> None:
    """Wait for the messages in the order given; raise ``LinkError`` for the first that fails."""
    for peer, work in works:
        try:
            if not work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001))):
                raise LinkError(peer, "the wait was aborted")
        except RuntimeError as error:
            raise LinkError(peer, str(error)) from None


@lru_cache(maxsize=256)  # most messages of one exchange have the same length, and a few links exchange at once
def _tag(salt: int, key: int, length: int, part: int) -> int:
    return zlib.crc32(struct.pack("<Iqqb", salt, key, length, part)) & 0x7FFFFFFF
