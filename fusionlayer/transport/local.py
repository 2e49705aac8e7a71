"""The transport between ranks that are threads of this process, for tests, simulation and trials without a launcher."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..base.errors import ConfigError, TransportError
from ..health.calls import Call
from ..observe.timeline import here
from ._sum import sum_in_rank_order
from .base import Transport, check_subset, group_by_node

__all__ = ["LocalTransport", "alone", "current", "run"]

Result = TypeVar("Result")

_current: ContextVar[LocalTransport | None] = ContextVar("fusionlayer_local_transport", default=None)


def current() -> LocalTransport | None:
    """Return the transport of the calling thread's rank, or None outside ``run``."""
    return _current.get()


def alone() -> LocalTransport:
    """Return the transport of a job of one rank."""
    return LocalTransport(_Group(_Hub(), 1, timeout=60.0), 0)


def run(
    fn: Callable[[int], Result], world: int, *, timeout: float = 60.0, ranks_per_node: int | None = None
) -> list[Result]:
    """Return ``[fn(0), fn(1), ...]``. All calls run at once, each in a thread that is one rank.

    Inside ``fn``, ``current()`` is the rank's transport, and torch computes with one thread.

    Args:
        fn: the function that every rank runs; it takes its rank.
        world: number of ranks.
        timeout: seconds that a rank waits for the others in one call.
        ranks_per_node: this many consecutive ranks count as one node; None: all of them.

    Raises:
        Exception: the first exception that a rank raised, with the rank at the start of its message. The other ranks
            get ``TransportError`` from their calls.
    """
    if not isinstance(world, int) or world < 1:
        raise ConfigError(f"world={world!r}; expected a number of ranks, at least 1")
    hub = _Hub()
    group = _Group(hub, world, timeout, ranks_per_node)
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)
        transport = LocalTransport(group, rank)
        _current.set(transport)
        try:
            # A rank is this thread. autograd would run the backward of CUDA tensors in one of its own, for all ranks.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(rank)
        except BaseException as error:
            with hub.changed:
                errors.append(_named(error, rank))
                hub.fail(f"rank {rank} failed: {type(error).__name__}: {error}", [rank])
        finally:
            hub.leave(rank)

    threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank {r}", daemon=True) for r in range(world)]
    threads_before = torch.get_num_threads()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            # Once a rank has failed, calls of the transport fail on the others too. A rank that waits for anything else
            # might never end, so it gets ``timeout`` seconds.
            while thread.is_alive() and not (errors and hub.failed_for() > timeout):
                thread.join(0.2 if errors else 1.0)
    finally:
        torch.set_num_threads(threads_before)
    if errors:
        raise errors[0]
    return results


class LocalTransport(Transport):
    """One rank's end of a group of threads of the same process. Made by ``run``, ``duplicate`` and ``subset``.

    ``send`` is buffered: it returns before the matching ``recv``.
    """

    def __init__(self, group: _Group, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self.timeout = group.timeout
        self._group = group
        self._nodes = group_by_node([group.node_of(each) for each in range(group.size)])
        self._duplicates = 0
        self._subsets: Counter[tuple[int, ...]] = Counter()
        self._meetings = 0

    def exchange(self, messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        call = Call.exchange(self.rank, self.size, messages, self.purpose)
        if self.why:
            call = replace(call, why=self.why)
        with here.doing("fusionlayer: wire"):
            offered: list[Mapping[int, tuple[Tensor, Tensor]]] = self._begin(call, messages, *messages.values())
            for source, (_, recv) in messages.items():
                if recv.numel():
                    recv.copy_(offered[source][self.rank][0])
            self.bytes_sent += sum(call.sends) - call.sends[self.rank]
            self._end(list(map(itemgetter(1), messages.values())))

    def all_reduce(self, x: Tensor) -> None:
        call = Call.all_reduce(x, self.purpose)
        flat = x.view(-1)
        with here.doing("fusionlayer: wire"):
            offered: list[Tensor] = self._begin(call, flat, (flat,))
            bounds = [flat.numel() * r // self.size for r in range(self.size + 1)]
            mine = slice(bounds[self.rank], bounds[self.rank + 1])
            total = torch.empty_like(flat[mine])
            sum_in_rank_order([other[mine] for other in offered], total)
            totals: list[Tensor] = self._meet(total, [total])
            for r, part in enumerate(totals):
                flat[bounds[r] : bounds[r + 1]].copy_(part)
            self.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size
            self._synchronize([flat])

    def broadcast(self, x: Tensor, root: int) -> None:
        call = Call.broadcast(x, root, self.size, self.purpose)
        with here.doing("fusionlayer: wire"):
            offered: list[Tensor] = self._begin(call, x, (x,))
            if self.rank == root:
                self.bytes_sent += (self.size - 1) * x.nbytes
            else:
                x.view(-1).copy_(offered[root].view(-1))
            self._end([x])

    def send(self, x: Tensor, to: int, tag: int = 0) -> None:
        call = Call.send(x, self.rank, to, tag, self.size)
        letter = x.detach().clone()
        self._synchronize([letter])
        with self._group.hub.changed:
            self._group.check_open(self)
            self._group.letters[self.rank, to, tag].append(letter)
            self._group.hub.changed.notify_all()
        self.bytes_sent += call.sends[0]

    def recv(self, x: Tensor, source: int, tag: int = 0) -> None:
        call = Call.recv(x, self.rank, source, tag, self.size)
        letter = self._group.take_letter(self, source, tag)
        conflict = call.conflict(self.rank, Call.send(letter, source, self.rank, tag, self.size), source)
        if conflict:
            raise self._group.fail_call(self, conflict, sorted((self.rank, source)))
        x.view(-1).view(torch.uint8).copy_(letter.view(-1).view(torch.uint8))
        self._synchronize([x])

    def duplicate(self) -> LocalTransport:
        self._duplicates += 1
        return LocalTransport(self._group.duplicate(self, self._duplicates), self.rank)

    def subset(self, ranks: Sequence[int]) -> LocalTransport:
        check_subset(ranks, self.rank, self.size)
        chosen = tuple(ranks)
        self._subsets[chosen] += 1
        return LocalTransport(self._group.subset(self, chosen, self._subsets[chosen]), chosen.index(self.rank))

    def close(self) -> None:
        self._group.leave(self.rank)

    def _begin(self, call: Call, offer: Any, *tensors: Sequence[Tensor]) -> list[Any]:
        """Return what every rank offers in this call, made of ``tensors``, once all ranks have made the same call.

        The ranks then read each other's tensors directly, so each must call ``_end`` or ``_meet`` before it returns.
        """
        self.sequence += 1
        met: list[tuple[Call, Any]] = self._meet((call, offer), list(chain(*tensors)))
        for other, (their_call, _) in enumerate(met):
            conflict = call.conflict(self.rank, their_call, other)
            if conflict:
                raise self._group.fail_call(
                    self, f"{conflict}; make the same calls on every rank", sorted((self.rank, other))
                )
        return [theirs for _, theirs in met]

    def _end(self, written: Sequence[Tensor]) -> None:
        """Return when every rank has read what it needs from this rank's tensors. Then the caller may change them."""
        self._meet(None, written)

    def _meet(self, offer: Any, tensors: Sequence[Tensor]) -> list[Any]:
        self._synchronize(tensors)
        self._meetings += 1
        return self._group.meet(self, self._meetings, offer)

    @staticmethod
    def _synchronize(tensors: Sequence[Tensor]) -> None:
        """Wait until this thread's CUDA streams have written the tensors: other threads use other streams."""
        for device in {x.device for x in tensors if x.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


class _Hub:
    """The lock of a run and the state of its ranks. All groups of the run share it."""

    def __init__(self) -> None:
        # Guards this hub and all groups of the run: their letters, meetings, and the ranks that have left. Notified at
        # each change. One lock for all groups, because the failure of a rank must wake waiters in every group.
        self.changed = threading.Condition()
        self.failure: tuple[str, list[int]] | None = None
        self.left: set[int] = set()
        self._failed_at = 0.0

    def fail(self, why: str, ranks: list[int]) -> None:
        """Make the calls of every rank in every group fail. The caller holds the lock."""
        if self.failure is None:
            self.failure = (why, ranks)
            self._failed_at = time.monotonic()
        self.changed.notify_all()

    def failed_for(self) -> float:
        return time.monotonic() - self._failed_at

    def leave(self, rank: int) -> None:
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()


class _Group:
    """The state that the ranks of one group share: meetings in flight, letters not yet received, and its failure.

    A meeting is one point that all ranks reach before any continues. A letter is a tensor from ``send``.
    """

    def __init__(
        self,
        hub: _Hub,
        size: int,
        timeout: float,
        ranks_per_node: int | None = None,
        members: tuple[int, ...] | None = None,
    ) -> None:
        self.hub = hub
        self.size = size
        self._members = members or tuple(range(size))
        self.timeout = timeout
        self.ranks_per_node = ranks_per_node or size
        self.letters: defaultdict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self._meetings: dict[int, dict[int, Any]] = {}
        self._fetched: defaultdict[int, int] = defaultdict(int)
        self._duplicates: dict[int, _Group] = {}
        self._subsets: dict[tuple[tuple[int, ...], int], _Group] = {}
        self._failure: tuple[str, list[int]] | None = None
        self._left: set[int] = set()

    def node_of(self, rank: int) -> int:
        return self._members[rank] // self.ranks_per_node

    def meet(self, caller: LocalTransport, number: int, offer: Any) -> list[Any]:
        """Return the offers of all ranks to meeting ``number``, in rank order, once all ranks have come."""
        with self.hub.changed:
            self.check_open(caller)
            offers = self._meetings.setdefault(number, {})
            offers[caller.rank] = offer
            if len(offers) == self.size:
                self.hub.changed.notify_all()
            else:
                self._wait(caller, lambda: len(offers) == self.size, lambda: set(range(self.size)) - set(offers))
            self._fetched[number] += 1
            if self._fetched[number] == self.size:
                del self._meetings[number], self._fetched[number]
            return [offers[r] for r in range(self.size)]

    def take_letter(self, caller: LocalTransport, source: int, tag: int) -> Tensor:
        with self.hub.changed:
            letters = self.letters[source, caller.rank, tag]
            self._wait(caller, lambda: bool(letters), lambda: {source})
            return letters.popleft()

    def duplicate(self, caller: LocalTransport, number: int) -> _Group:
        with self.hub.changed:
            self.check_open(caller)
            made = _Group(self.hub, self.size, self.timeout, self.ranks_per_node, self._members)
            return self._duplicates.setdefault(number, made)

    def subset(self, caller: LocalTransport, ranks: tuple[int, ...], number: int) -> _Group:
        with self.hub.changed:
            self.check_open(caller)
            members = tuple(self._members[rank] for rank in ranks)
            part = _Group(self.hub, len(ranks), self.timeout, self.ranks_per_node, members)
            return self._subsets.setdefault((ranks, number), part)

    def leave(self, rank: int) -> None:
        with self.hub.changed:
            self._left.add(rank)
            self.hub.changed.notify_all()

    def check_open(self, caller: LocalTransport) -> None:
        """Raise ``TransportError`` if this rank can make no more calls. The caller holds the lock."""
        failure = self._failure or self.hub.failure
        if failure:
            raise TransportError(f"rank {caller.rank}: {failure[0]}", failure[1], sequence=caller.sequence)
        if caller.rank in self._gone():
            raise TransportError(
                f"rank {caller.rank}: this transport is closed; make a new one", sequence=caller.sequence
            )

    def fail_call(self, caller: LocalTransport, why: str, ranks: Sequence[int]) -> TransportError:
        """Close the group on every rank; return the error to raise on this one."""
        with self.hub.changed:
            if self._failure is None:
                self._failure = (f"collective {caller.sequence}: {why}", list(ranks))
            self.hub.changed.notify_all()
        return TransportError(
            f"rank {caller.rank}: collective {caller.sequence}: {why}", ranks, sequence=caller.sequence
        )

    def _gone(self) -> set[int]:
        """Return the ranks of this group that have closed their transport or have left the run."""
        return self._left | {rank for rank, member in enumerate(self._members) if member in self.hub.left}

    def _wait(self, caller: LocalTransport, done: Callable[[], bool], missing: Callable[[], set[int]]) -> None:
        def over() -> bool:
            return done() or bool(self._failure or self.hub.failure or gone() or caller.rank in self._left)

        def gone() -> set[int]:
            return missing() & self._gone()

        in_time = self.hub.changed.wait_for(over, self.timeout)
        if done():
            return
        self.check_open(caller)
        if in_time:
            ranks = sorted(gone())
            raise self.fail_call(caller, f"{_ranks(ranks)} left while rank {caller.rank} waits for it", ranks)
        ranks = sorted(missing())
        raise self.fail_call(caller, f"{_ranks(ranks)} did not come within {self.timeout:g} s", ranks)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _named(error: BaseException, rank: int) -> BaseException:
    """Return the same error with the rank at the start of its message."""
    if len(error.args) == 1 and isinstance(error.args[0], str) and not error.args[0].startswith(f"rank {rank}: "):
        error.args = (f"rank {rank}: {error.args[0]}",)
    return error
