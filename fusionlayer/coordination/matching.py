"""Decides which operations are ready, in what order they run and which are fused. It has no threads and no sockets."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..health.judge import Stall
from .central import compute
from .requests import ALL_RANKS, Begun, Item, Key, Reason, Request, Response, Signature, flatten, unflatten

# Kinds of operations in which a rank that has joined takes part without a tensor of its own.
_WITHOUT_TENSOR = ("allreduce", "allgather", "broadcast", "barrier")
# Kinds of operations that move tensors, so that several of them can be fused into one message.
_FUSABLE = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall")


@dataclass(slots=True)
class _Waiting:
    """An operation that some ranks have requested, but not all."""

    key: Key
    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    warned: float = 0.0


@dataclass(slots=True)
class _Ready:
    """An operation that every rank has requested, except joined ones.

    Attributes:
        result: the result of an operation without tensors.
        is_here: whether the tensors came with the requests.
    """

    signature: Signature
    requests: dict[int, Request]
    nbytes: int
    result: int | None = None
    is_here: bool = False


class Matcher:
    """Matches the requests of all ranks and makes the responses.

    Call ``take`` with new requests, then ``next_responses`` until it returns None. All ranks get the same operations in
    the same order, regardless of the order of the requests. Calls must exclude each other: the coordinator holds its
    lock.

    Args:
        size: number of ranks.
        fusion_bytes: bytes of tensors that one message may have. Larger tensors are sent alone.
    """

    def __init__(self, size: int, fusion_bytes: int) -> None:
        self._size = size
        self._fusion_bytes = fusion_bytes
        self._waiting: dict[Key, _Waiting] = {}
        self._later: dict[Key, deque[tuple[int, Request]]] = {}
        self._ready: deque[_Ready] = deque()
        self._failed: deque[tuple[str, dict[int, Request], Reason]] = deque()
        self._sets: dict[int, tuple[int, ...]] = {ALL_RANKS: tuple(range(size))}
        self._next_set = ALL_RANKS + 1
        self._joined: dict[int, Request] = {}
        self._begun: Begun = {}
        self._told: deque[dict[int, Response]] = deque()
        self._left: dict[int, Reason] = {}
        self._blocked: dict[int, int] = {}

    @property
    def first_loss(self) -> Reason | None:
        """Why the first rank that left has done so; None if no rank has left."""
        return next(iter(self._left.values()), None)

    def take(self, rank: int, requests: Iterable[Request]) -> None:
        """Note the requests of a rank."""
        now = time.monotonic()
        for request in requests:
            if request.signature.kind == "begin":
                if self._note_begun(request) and self._joined:
                    self._tell_begun()
            elif request.signature.kind == "join":
                self._join(rank, request)
            elif request.signature.kind == "blocked":
                self._blocked[rank] = request.numbers[0]
                self._end_deadlock()
            else:
                self._take(rank, request, now)

    def leave(self, rank: int, why: Reason) -> None:
        """Note that a rank has left. Operations that need it fail, now and later, for the reason ``why``."""
        self._left[rank] = why
        for waiting in list(self._waiting.values()):
            self._decide(waiting)
        if self._joined:
            self._failed.append(("lost", dict(self._joined), why))
            self._joined.clear()

    def stalls(self, older_than: float, now: float | None = None) -> list[Stall]:
        """Return the operations that have waited for more than ``older_than`` seconds."""
        now = time.monotonic() if now is None else now
        found = []
        for waiting in self._waiting.values():
            if now - waiting.since > older_than:
                missing = self._missing(waiting)
                is_late = 2 * len(missing) < len(self._sets.get(waiting.key[0], ()))
                found.append(Stall(describe(waiting.key), now - waiting.since, missing, is_late))
        return found

    def next_responses(self) -> dict[int, Response] | None:
        """Return the next response for each rank that has something to do, or None if nothing is ready."""
        if self._failed:
            code, requests, why = self._failed.popleft()
            return {
                rank: Response(code, (Item(request.handle),), why)
                for rank, request in requests.items()
                if rank not in self._left
            }
        if self._told:
            return self._told.popleft()
        if not self._ready:
            return None
        group = self._take_group()
        first = group[0].signature
        ranks = self._sets.get(first.process_set, ())
        if first.kind == "remove_process_set":
            del self._sets[first.root or ALL_RANKS]
        code, data = "execute", b""
        if group[0].is_here:
            code, data = "take", compute(first, [ready.requests for ready in group], ranks)
        numbers = [_numbers(ready, ranks) for ready in group]
        return {
            rank: Response(code, _items(group, numbers, rank, ranks), data=data)
            for rank in ranks
            if code == "execute" or rank in group[0].requests
        }

    def _take_group(self) -> list[_Ready]:
        """Remove and return the first ready operation, with all later ones that can be fused with it."""
        first = self._ready.popleft()
        group, total = [first], first.nbytes
        if first.signature.kind not in _FUSABLE or not first.signature.is_plain or total > self._fusion_bytes:
            return group
        passed: deque[_Ready] = deque()
        for other in self._ready:
            if total + other.nbytes <= self._fusion_bytes and _may_travel_together(first, other):
                group.append(other)
                total += other.nbytes
            else:
                passed.append(other)
        self._ready = passed
        return group

    def _take(self, rank: int, request: Request, now: float) -> None:
        key = request.key
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = _Waiting(key, now)
        elif rank in waiting.requests:
            self._later.setdefault(key, deque()).append((rank, request))
            return
        waiting.requests[rank] = request
        members = self._sets.get(key[0])
        if members is None or len(waiting.requests) == len(members) or self._joined or self._left:
            self._decide(waiting)

    def _missing(self, waiting: _Waiting) -> tuple[int, ...]:
        ranks = self._sets.get(waiting.key[0], ())
        return tuple(rank for rank in ranks if rank not in waiting.requests and rank not in self._joined)

    def _decide(self, waiting: _Waiting) -> None:
        """Make an operation ready, or make it fail, once that is certain. Otherwise it keeps waiting."""
        process_set, kind, _ = waiting.key
        requests = waiting.requests
        if process_set not in self._sets:
            self._fail(waiting, Reason(f"process set {process_set} has been removed"))
            return
        missing = () if len(requests) == len(self._sets[process_set]) else self._missing(waiting)
        # The first one that left; others may have left because of it.
        gone = next((why for rank, why in self._left.items() if rank in missing), None)
        if gone:
            self._fail(waiting, gone, code="lost")
            return
        if missing:
            return
        why = self._conflict(waiting)
        if why is not None:
            self._fail(waiting, why)
            return
        del self._waiting[waiting.key]
        signature = next(iter(requests.values())).signature
        result = None
        if kind == "add_process_set":
            assert signature.ranks is not None
            result, self._next_set = self._next_set, self._next_set + 1
            self._sets[result] = signature.ranks
        sizes = [-1 if request.data is None else len(request.data) for request in requests.values()]
        here = -1 not in sizes
        nbytes = max(sizes) if here else max([signature.nbytes(request.numbers) for request in requests.values()])
        self._ready.append(_Ready(signature, requests, nbytes, result, here))
        if self._later:
            self._feed(waiting.key)

    def _conflict(self, waiting: _Waiting) -> Reason | None:
        """Return why the requests of the ranks do not fit together, or None if they do."""
        first = next(iter(waiting.requests.values())).signature
        everyone = len(waiting.requests) == len(self._sets[first.process_set])
        if everyone and first.dtypes:
            for request in waiting.requests.values():
                if request.handle < 0 or (request.signature is not first and request.signature != first):
                    break
            else:
                return None
        name = describe(waiting.key)
        refused = sorted(rank for rank, request in waiting.requests.items() if request.handle < 0)
        if refused:
            return Reason(
                f"{name}: rank {refused[0]} has asked for it twice before it was done; give operations that are under "
                "way at once different names",
                tuple(refused),
            )
        ranks = sorted(waiting.requests)
        signatures = [waiting.requests[rank].signature for rank in ranks]
        first = signatures[0]
        for rank, other in zip(ranks, signatures, strict=True):
            if other != first:
                return Reason(
                    f"{name}: rank {ranks[0]} has {first.difference(other)} as rank {rank}; call it with the same "
                    "shape, type, device and arguments on every rank",
                    differing(dict(zip(ranks, signatures, strict=True))),
                )
        absent = [rank for rank in self._sets[first.process_set] if rank not in waiting.requests]
        if absent and (first.kind not in _WITHOUT_TENSOR or first.root in absent):
            text = f"{name}: rank {absent[0]} has joined and cannot take part in it; call join() after it on every rank"
            return Reason(text, tuple(absent))
        if absent and not first.is_plain:
            return Reason(
                f"{name}: rank {absent[0]} has joined, and {first.op} needs a tensor of every rank", tuple(absent)
            )
        if first.kind == "add_process_set" and first.ranks in self._sets.values():
            return Reason(f"{name}: there is a process set of the ranks {list(first.ranks or ())} already")
        return None

    def _end_deadlock(self) -> None:
        """Let operations fail in which ranks wait for each other, once no rank can request anything any more."""
        waits: dict[int, _Waiting] = {}
        for waiting in self._waiting.values():
            for rank, request in waiting.requests.items():
                if self._blocked.get(rank) == request.handle:
                    waits[rank] = waiting
        if not waits or any(rank not in waits and rank not in self._joined for rank in range(self._size)):
            return
        places = [f"rank {rank} in {describe(waits[rank].key)}" for rank in sorted(waits)]
        places += [f"rank {rank} in join" for rank in sorted(self._joined)]
        why = Reason(f"the ranks wait for each other: {', '.join(places)}; make the same calls on every rank")
        for waiting in {id(waiting): waiting for waiting in waits.values()}.values():
            self._fail(waiting, why)

    def _fail(self, waiting: _Waiting, why: Reason, code: str = "fail") -> None:
        del self._waiting[waiting.key]
        self._failed.append((code, waiting.requests, why))
        self._feed(waiting.key)

    def _feed(self, key: Key) -> None:
        """Take the requests that came while an earlier operation of the same name was waiting."""
        later = self._later.pop(key, None)
        for rank, request in later or ():
            self._take(rank, request, time.monotonic())

    def _note_begun(self, request: Request) -> bool:
        """Note the steps that a rank has begun; return whether it is the first to begin one of them."""
        before = dict(self._begun)
        for key, count in unflatten(request.numbers).items():
            self._begun[key] = max(count, self._begun.get(key, 0))
        return self._begun != before

    def _tell_begun(self) -> None:
        told = Response("begun", (Item(0, flatten(self._begun)),))
        self._told.append(dict.fromkeys(self._joined, told))

    def _join(self, rank: int, request: Request) -> None:
        is_first = not self._joined
        self._note_begun(request)
        self._joined[rank] = request
        if self._left:
            self._failed.append(("lost", dict(self._joined), next(iter(self._left.values()))))
            self._joined.clear()
            return
        if is_first:
            self._told.append({other: Response("joined") for other in range(self._size) if other != rank})
        if self._begun:
            self._tell_begun()
        for waiting in list(self._waiting.values()):
            self._decide(waiting)
        if len(self._joined) == self._size:
            requests, self._joined = self._joined, {}
            self._ready.append(_Ready(request.signature, requests, 0, result=rank))


def differing(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Return the ranks whose value differs from that of most ranks; all ranks, if there is no such value."""
    if len({*values.values()}) < 2:
        return ()
    (value, count), *_ = Counter(values.values()).most_common()
    return tuple(rank for rank in values if 2 * count <= len(values) or values[rank] != value)


def describe(key: Key) -> str:
    """Return the name of an operation for messages."""
    process_set, kind, name = key
    within = f" in process set {process_set}" if process_set else ""
    return f"{kind} {name!r}{within}" if isinstance(name, str) else f"{kind} without name, number {name}{within}"


def _may_travel_together(first: _Ready, other: _Ready) -> bool:
    one, two = first.signature, other.signature
    if first.is_here != other.is_here or (one is not two and _fusion_key(one) != _fusion_key(two)):
        return False
    # Tensors that came with the requests are concatenated and reduced at once: same type, and from the same ranks.
    return not first.is_here or (one.dtypes[0] == two.dtypes[0] and first.requests.keys() == other.requests.keys())


def _fusion_key(signature: Signature) -> tuple[object, ...]:
    return (
        signature.kind,
        signature.process_set,
        signature.device,
        signature.op,
        signature.prescale,
        signature.postscale,
        signature.root,
    )


def _numbers(ready: _Ready, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of an operation that all ranks need (see ``Item.numbers``)."""
    if ready.result is not None:
        return (ready.result,)
    if ready.signature.kind != "allgather":
        return ()
    nothing = (0,) * len(ready.signature.shapes)
    requests = ready.requests
    return tuple([n for rank in ranks for n in (requests[rank].numbers if rank in requests else nothing)])


def _items(
    group: Sequence[_Ready], numbers: Sequence[tuple[int, ...]], rank: int, ranks: Sequence[int]
) -> tuple[Item, ...]:
    """Return the items of a response to one rank. For its own requests the handle is enough."""
    items = []
    for ready, of_all in zip(group, numbers, strict=True):
        request = ready.requests.get(rank)
        if ready.signature.kind == "alltoall":
            mine = ranks.index(rank)
            of_all = tuple(ready.requests[r].numbers[mine] for r in ranks)
        items.append(Item(None, of_all, ready.signature) if request is None else Item(request.handle, of_all))
    return tuple(items)
