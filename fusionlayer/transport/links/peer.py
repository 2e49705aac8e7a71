"""A link between the devices of one host: each copies its messages out of the memory of the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ...base.errors import UsageError
from .base import Link, LinkError, LinkMessage
from .copy_engines import CopyEngines
from .peer_memory import Counter, Counters, Gather, OutOfReach, PeerMemory, together
from .queueing import Pending, QueueingLink

# Pieces that a rank can have sent to another one which has not taken them.
_SLOTS = 2
_ALIGNMENT = 256


class PeerLink(QueueingLink):
    """One rank's end of a group whose messages are copied from device to device, without a kernel.

    A rank has two slots for each other rank, in memory of its device that all ranks map. To send a piece, the sender
    copies it into a slot and counts it as sent. The receiver's stream waits for that number, copies the slot to its
    destination, and counts the piece as taken. The sender's stream waits for that before it fills the slot again.
    A message that is longer than a slot is sent in pieces: each rank sends a piece of all its messages, then takes one
    piece of all messages that it receives, and so on. So a rank waits only for earlier work of others, in any order of
    their devices.

    A rank writes to no other rank's device: a straggler can damage nothing. And the order holds for any wiring of a
    machine: sent data stay at their place until the receiver reads them.

    Sums, broadcasts and launches are those of another link: copies cannot add.

    Args:
        others: the link for all but messages. This one closes it.
        rank: this rank.
        size: number of ranks, all of them on one host.
        timeout: seconds that an operation may take on the device.
        nbytes: the bytes of each rank's device, for slots.
        gather: between the ranks.

    Raises:
        OutOfReach: a rank cannot reach the memory of another one. All ranks raise it.
    """

    def __init__(self, others: Link, rank: int, size: int, timeout: float, nbytes: int, gather: Gather) -> None:
        super().__init__(rank, timeout, others.device)
        self.others = others
        self.can_launch = others.can_launch
        self._slot = nbytes // (size * _SLOTS) // _ALIGNMENT * _ALIGNMENT
        if not self._slot:
            raise OutOfReach(f"{nbytes} bytes have no room for the messages of {size} ranks")
        self._engines = together(gather, lambda: CopyEngines(others.device))
        # Before what the driver is asked for: it makes the device's context current on this thread.
        self._memory = PeerMemory(rank, others.device, nbytes, gather)
        self._counters = Counters(rank, size, gather, self._engines.reach)
        # Pieces to each rank, and from each.
        self._sent, self._taken = [0] * size, [0] * size

    def exchange(self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage]) -> None:
        longest = max((message.data.numel() for message in (*outgoing, *incoming)), default=0)
        if max(self._sent + self._taken) + longest // self._slot >= Counters.MOST:
            raise UsageError(f"this transport has moved {Counters.MOST} messages between two GPUs; make a new one")
        if not longest:
            return
        try:
            with self._operation() as pending:
                stream = torch.cuda.current_stream(self.device)
                own = self._memory.every[self._rank]
                if own.is_cuda:
                    own.record_stream(stream)  # this link may be dropped before the device has done it
                taken: list[tuple[int, int]] = []
                for start in range(0, longest, self._slot):
                    taken = self._turn(stream.cuda_stream, outgoing, incoming, start, taken, pending)
                self._engines.signal(stream.cuda_stream, taken, [])
        finally:
            if self._lost is not None:  # meanwhile, perhaps before all of it was queued
                self._counters.leave()

    def all_reduce(self, x: Tensor, key: int) -> None:
        self.others.all_reduce(x, key)

    def broadcast(self, x: Tensor, root: int, key: int) -> None:
        self.others.broadcast(x, root, key)

    def launching(self) -> AbstractContextManager[Tensor]:
        return self.others.launching()

    def drain(self) -> None:
        super().drain()
        self.others.drain()

    def _turn(
        self,
        stream: int,
        outgoing: Sequence[LinkMessage],
        incoming: Sequence[LinkMessage],
        start: int,
        taken: Sequence[tuple[int, int]],
        pending: Pending,
    ) -> list[tuple[int, int]]:
        """Queue a piece of all messages that are longer than ``start``.

        Args:
            stream: where.
            outgoing: messages to other ranks.
            incoming: messages from other ranks.
            start: the start of the pieces.
            taken: counters to wait for, and their numbers.
            pending: gets the awaited counters.

        Returns:
            The counters to raise afterwards.
        """
        rank, engines, counters = self._rank, self._engines, self._counters
        sends = [message for message in outgoing if message.data.numel() > start]
        takes = [message for message in incoming if message.data.numel() > start]
        full = [(peer, Counter.TAKEN, self._sent[peer] + 1 - _SLOTS) for peer, _, _ in sends]
        engines.signal(stream, taken, self._wait(full, pending))
        sent = []
        for peer, data, _ in sends:
            nbytes = min(self._slot, data.numel() - start)
            engines.copy(stream, self._place(rank, peer, self._sent[peer]), data.data_ptr() + start, nbytes)
            self._sent[peer] += 1
            sent.append((counters.address(peer, Counter.SENT, rank), self._sent[peer]))
        engines.signal(
            stream, sent, self._wait([(peer, Counter.SENT, self._taken[peer] + 1) for peer, _, _ in takes], pending)
        )
        now = []
        for peer, data, _ in takes:
            nbytes = min(self._slot, data.numel() - start)
            engines.copy(stream, data.data_ptr() + start, self._place(peer, rank, self._taken[peer]), nbytes)
            self._taken[peer] += 1
            now.append((counters.address(peer, Counter.TAKEN, rank), self._taken[peer]))
        return now

    def _wait(self, awaited: Sequence[tuple[int, Counter, int]], pending: Pending) -> list[tuple[int, int]]:
        """Note the awaited counters; return their positions, and the numbers."""
        awaited = [(peer, counter, number) for peer, counter, number in awaited if number > 0]
        pending.awaited += awaited
        return [(self._counters.address(self._rank, counter, peer), number) for peer, counter, number in awaited]

    def _place(self, sender: int, receiver: int, piece: int) -> int:
        """Return where the sender's device has a piece for the receiver."""
        return self._memory.every[sender].data_ptr() + (receiver * _SLOTS + piece % _SLOTS) * self._slot

    def _late(self, pending: Pending | None) -> LinkError:
        for peer, counter, number in pending.awaited if pending else ():
            if self._counters.value(Counter(counter), peer) < number:
                what = "sent" if counter == Counter.SENT else "taken"
                return LinkError(peer, f"rank {peer} has not {what} its message {number} in time")
        return super()._late(pending)

    def _look(self) -> LinkError | None:
        return self._left() or super()._look() or self.others.overdue()

    def _check_open(self) -> None:
        if self._lost is None and (left := self._left()):
            self._found = self._found or left
            self.close()
        super()._check_open()

    def _left(self) -> LinkError | None:
        """Return the error for messages of a rank that gave up: they may be invalid."""
        peer = self._counters.who_left()
        return None if peer is None else LinkError(peer, f"rank {peer} has given up")

    def _end(self) -> None:
        if self._is_at_work():
            self._counters.leave()
        self.others.close()
