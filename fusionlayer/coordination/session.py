"""A rank's end of named operations, in one file because one lock guards what its threads share.

Operations are requested in any order, and run in the same order on all ranks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ConfigError, FusionLayerError, PlanMismatch, TransportError, again
from ..observe.timeline import Timeline
from ..transport import Transport
from ..transport.star import Center, StarConnection, connect
from .central import fits, hand_out, to_bytes
from .coordinator import Coordinator, Patience
from .execution import OperationPart
from .matching import describe
from .operation import Operation, Reduce, signature_of
from .requester import Requester
from .requests import (
    ALL_RANKS,
    Begun,
    Reason,
    Request,
    Response,
    Signature,
    flatten,
    read_response,
    unflatten,
    write_farewell,
)
from .runner import Runner
from .table import OperationTable

# Seconds that the coordinator has, beyond the limit of patience, to say itself that this has passed.
_GRACE = 1.0
_BEGIN = Signature("begin")
_BLOCKED = Signature("blocked")
# Seconds of waiting after which a rank reports to the coordinator that it only waits.
_BLOCKED_AFTER = 10.0


class SessionState(Enum):
    """The state of a session. A thread that changes it holds the session's lock."""

    RUNNING = auto()
    """Operations can be requested and run. The first phase, and again when all ranks have joined. The communication
    thread sets it then."""
    TELLING_STEPS = auto()
    """Like RUNNING, while some rank has joined. It must take part in steps that others begin, so this rank reports the
    beginning of each step to the coordinator. The communication thread sets it when the coordinator says so."""
    ENDED = auto()
    """No operation can be requested any more. Any thread sets it by ``close``; the communication thread sets it after a
    failure. ``_why`` is the first reason."""


class Session:
    """Runs named operations of this rank together with those of the other ranks, until it is closed.

    Any thread may call it. Requests go through the ``Requester`` to the coordinator on rank 0. The communication thread
    receives the coordinator's responses, in the same order on all ranks, and carries them out with the ``Runner``. The
    first failure of the transport ends the session on every rank. If ranks request an operation with different
    arguments, only that operation fails, on every rank.

    Args:
        transport: transport over all ranks; the session takes a duplicate. All ranks make the session together.
        fusion_bytes: bytes of tensors that one message may have.
        patience: how long ranks may wait for each other to request an operation.
        cache_capacity: names and signatures that ranks remember of each other.
        timeline: record of the operations.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        fusion_bytes: int = 8 << 20,
        patience: Patience | None = None,
        cache_capacity: int = 4096,
        timeline: Timeline | None = None,
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport = transport.duplicate()
        self._runner = Runner(self._transport, timeline or Timeline(None, self.rank))
        self.process_sets = self._runner.process_sets
        # Guards _state, _why, _unnamed, _begun, _threads and adding to the table. A request is noted with it held, so
        # that requests leave in the order of their handles. It is released before ``bring`` sends them: sending may
        # wait.
        self._lock = threading.Lock()
        self._table = OperationTable()
        self._state = SessionState.RUNNING
        self._patience = patience or Patience()
        self._heard = time.monotonic()  # from rank 0, last; the communication thread's own
        self._why: FusionLayerError | None = None
        self._unnamed: Counter[tuple[int, str]] = Counter()
        self._begun: Begun = {}
        self._threads: set[int] = set()
        # Guarded by the table's condition, on which await_steps waits.
        self._told: Begun = {}
        self._coordinator: Coordinator | None = None
        self._connection: StarConnection | None = None
        self._responses: SimpleQueue[Response | None] = SimpleQueue()
        end = connect(self._transport) if self.size > 1 else None
        if isinstance(end, StarConnection):
            self._connection = end
        else:
            center = end if isinstance(end, Center) else None
            self._coordinator = Coordinator(self.size, center, fusion_bytes, self._patience, self._deliver)
        self._requester = Requester(self._coordinator, self._connection, cache_capacity)
        self._thread = threading.Thread(target=self._loop, name="fusionlayer operations", daemon=True)
        self._thread.start()

    def stand_in_on(self, device: torch.device | None) -> None:
        """Let this rank take part on this GPU once it has joined, if it has sent no tensor of a GPU before."""
        self._runner.joined_on = device

    def submit(
        self,
        kind: str,
        tensors: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] | None = None,
        *,
        name: str | None = None,
        process_set: int = ALL_RANKS,
        op: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int | None = None,
        ranks: tuple[int, ...] | None = None,
        splits: Sequence[int] = (),
        reduce: Reduce | None = None,
        deliver: Callable[[Any], Any] | None = None,
        check: Callable[[], object] | None = None,
        at_once: bool = False,
    ) -> int:
        """Request an operation; return its handle for ``poll`` and ``wait``.

        Args:
            kind: "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join",
                "add_process_set" or "remove_process_set".
            tensors: this rank's input; several tensors are one operation.
            outputs: tensors for the results, which may be the input tensors; None: new ones.
            name: name by which ranks match the operation; None: the number of unnamed operations of this kind so far.
            process_set: the set of ranks that take part.
            op: "Sum", "Average", "Min", "Max", "Product", or a text that identifies ``reduce`` and all its options.
            prescale: factor before a reduction.
            postscale: factor after it.
            root: rank of the job that broadcasts, or the set that is removed.
            ranks: ranks of the set that is added.
            splits: rows for each rank of the set.
            reduce: reduces one flat tensor in place. It needs an ``op`` of its own.
            deliver: turns the results, for most kinds a list of tensors, into the return value of ``wait``.
            check: called by the first ``wait`` or ``poll`` after the operation has ended well; these raise its errors.
            at_once: the caller calls ``wait`` next, which sends the request. Otherwise it is sent after a pause.

        Raises:
            ConfigError: this rank is not in the process set, or there is no such set; or an operation of that name is
                in flight.
            TransportError: the session has ended.
        """
        shapes = [x.shape for x in tensors]
        numbers = tuple(splits)
        if kind in ("allgather", "alltoall"):
            numbers = numbers or tuple([shape[0] for shape in shapes])
            shapes = [shape[1:] for shape in shapes]
        where = tensors[0].device if tensors else None
        dtypes = tuple([x.dtype for x in tensors])
        signature = signature_of(kind, process_set, dtypes, tuple(shapes), where, op, prescale, postscale, root, ranks)
        ready = torch.cuda.current_stream(where).record_event() if signature.device == "cuda" else None
        data = to_bytes(tensors) if self.size > 1 and fits(signature, tensors, self.size) else None
        with self._lock:
            # Under the same lock as adding the operation: one added after the session has ended would never end.
            if self._why is not None:
                raise again(self._why)
            self._runner.check_member(process_set)
            self._threads.add(threading.get_ident())
            if kind == "join":
                numbers = flatten(self._begun)
            label: str | int
            if name is None:
                label = self._unnamed[process_set, kind]
                self._unnamed[process_set, kind] += 1
            else:
                label = name
            key = (process_set, kind, label)
            if self._table.has(key):
                # The other ranks may wait for this second operation, so they must be notified that it will not come.
                self._requester.note(Request(-1, label, signature, numbers))
                self._requester.bring_soon()
                raise ConfigError(
                    f"{describe(key)} was asked for again before it was done; give operations that are in flight at "
                    "once different names, or synchronize() the first"
                )
            text = name if name is not None else f"{kind}.noname.{label}"
            operation = self._table.add(
                key, text, signature, tensors, outputs, reduce, tuple(splits), deliver, check, ready=ready
            )
            self._requester.note(Request(operation.handle, label, signature, numbers, data))
            if not at_once:
                self._requester.bring_soon()
        return operation.handle

    def poll(self, handle: int) -> bool:
        """Return whether ``wait`` would return at once."""
        operation = self._table.get(handle)
        if operation is None:
            raise ConfigError(f"handle {handle!r} belongs to no operation whose result is still to be fetched")
        if not operation.done or operation.finished is not None and not operation.finished.query():
            return False
        operation.check_once()
        return True

    def wait(self, handle: int) -> Any:
        """Wait for an operation and return its result. A second call, or an unknown handle, returns None."""
        operation = self._table.get(handle)
        if operation is None:
            return None
        if not operation.done:
            self._requester.bring()
            if self.size > 1 and not self._table.ends_within(operation, _BLOCKED_AFTER):
                self._tell_blocked(operation)
        self._table.wait(operation)
        return operation.fetch()

    def _tell_blocked(self, operation: Operation) -> None:
        """Notify the coordinator that this rank can request nothing before an operation ends.

        If all ranks are in that state nothing will ever end. A rank of several threads is never known to be.
        """
        with self._lock:
            if self._why is not None or len(self._threads) > 1:
                return
            self._requester.note(Request(0, 0, _BLOCKED, (operation.handle,)))
        self._requester.bring()

    def enlist(self, process_set: int) -> tuple[int, int]:
        """Return a new key for the steps of one optimizer. All ranks of the set enlist theirs in the same order."""
        with self._lock:
            key = (process_set, sum(members == process_set for members, _ in self._begun))
            self._begun[key] = 0
        return key

    def begin_step(self, key: tuple[int, int]) -> None:
        """Count a step that this rank begins. The coordinator is notified only while some rank has joined."""
        with self._lock:
            self._begun[key] += 1
            tells = self._state is SessionState.TELLING_STEPS
            if tells:
                self._requester.note(Request(0, 0, _BEGIN, (*key, self._begun[key])))
        if tells:
            self._requester.bring()

    def steps_begun(self, key: tuple[int, int]) -> int:
        """Return how many steps this rank has begun for a key."""
        return self._begun[key]

    def await_steps(self, join: int, known: Begun, failed: Callable[[], bool]) -> Begun | None:
        """Wait until steps beyond ``known`` have begun on any rank; return all counts. None: there will be no more.

        Args:
            join: handle of this rank's join. When that is done, all ranks have joined or a rank is lost.
            known: the counts that the last call returned.
            failed: returns whether to stop waiting. It is checked again after ``notify``.
        """
        operation = self._table.get(join)
        assert operation is not None
        self._requester.bring()
        with self._table.changed:
            while not (operation.done or failed()) and self._told == known:
                self._table.changed.wait()
            return None if failed() or self._told == known else self._told

    def notify(self) -> None:
        """Let ``await_steps`` check its conditions again. Any thread may call it."""
        with self._table.changed:
            self._table.changed.notify_all()

    @property
    def timeline(self) -> Timeline:
        """Record of the operations; another one takes its place when recording begins or ends."""
        return self._runner.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline) -> None:
        self._runner.timeline = timeline

    @property
    def pending(self) -> int:
        """Number of operations whose results have not been fetched."""
        return self._table.unfetched

    @property
    def has_ended(self) -> bool:
        """Whether no operation can be requested any more: the session was closed, or has failed."""
        return self._state is SessionState.ENDED

    def close(self) -> None:
        """End this rank's part. Pending operations fail here, and on other ranks those that need this rank.

        A second call does nothing.
        """
        why = Reason(f"rank {self.rank} has shut down, or its program has ended", (self.rank,))
        # First no more requests, then the requester sends the last ones, and only then the farewell follows them.
        ended = self._leave(TransportError(f"{why.text}; call init() again", [self.rank]))
        cause = self._transport.cause()
        if cause is not None:
            why = Reason(f"{cause}; then {why.text}", cause.ranks)
        self._requester.close()
        if self._coordinator is not None:
            self._coordinator.close(why)
            self._responses.put(None)
        if self._connection is not None:
            self._connection.send(write_farewell(why))
            self._connection.close()
        # Let an operation that runs end by itself, because other ranks need this rank's part in it.
        self._thread.join(self._transport.timeout)
        self._runner.close()
        self.timeline.close()
        self._table.fail_all(ended)

    # ---- on the communication thread --------------------------------------------------------------------------------

    def _loop(self) -> None:
        while (response := self._next_response()) is not None:
            if response.code == "ready":
                self._requester.note_answer()
            elif response.code == "take":
                self._take_results(response)
            elif response.code == "joined":
                self._tell_begun()
            elif response.code == "begun":
                with self._table.changed:
                    self._told = unflatten(response.items[0].numbers)
                    self._table.changed.notify_all()
            elif response.code == "end":
                self._end(TransportError(response.why.text, response.why.ranks))
            elif response.code in ("fail", "lost"):
                error = PlanMismatch if response.code == "fail" else TransportError
                told = error(f"rank {self.rank}: {response.why.text}", response.why.ranks)
                self._table.finish(self._table.take(response.items), told)
            else:
                self._run(response)

    def _tell_begun(self) -> None:
        """Report to the coordinator each step that this rank has begun or begins from now on.

        Under the lock, so that a step that begins now is in one of the two.
        """
        with self._lock:
            if self._state is SessionState.RUNNING:
                self._state = SessionState.TELLING_STEPS
            if not self._begun:
                return
            self._requester.note(Request(0, 0, _BEGIN, flatten(self._begun)))
        self._requester.bring()

    def _deliver(self, response: Response) -> None:
        """Take a response of the coordinator on rank 0, on the thread that made it, which holds the coordinator's lock.

        Results are taken at once. They need not wait for the operation that the communication thread executes.
        """
        if response.code == "take":
            self._take_results(response)
        else:
            self._responses.put(response)

    def _take_results(self, response: Response) -> None:
        operations = self._table.take(response.items)
        error: Exception | None = None
        try:
            with torch.no_grad():
                hand_out(operations, response.items, response.data)
        except Exception as raised:  # such as an output that cannot be written: only this rank's operations fail
            error = raised
        if self.timeline.enabled:
            now = time.perf_counter_ns()
            for operation in operations:
                if operation is not None:
                    kind = operation.signature.kind.upper()
                    self.timeline.record(f"NEGOTIATE_{kind}", operation.submitted, now, row=operation.label)
                    self.timeline.record(kind, now, time.perf_counter_ns(), row=operation.label)
        self._table.finish(operations, error)

    def _next_response(self) -> Response | None:
        if self._connection is None:
            return self._responses.get()
        self._heard = time.monotonic()
        message = self._connection.receive(None if self._patience.limit is None else self._is_unanswered)
        if message is None:
            damage, cause = self._connection.damage, self._transport.cause()
            if damage is not None:
                why = Reason(damage(0, self.rank), (0, self.rank))
                self._connection.send(write_farewell(why))
                self._transport.close()
                self._end(TransportError(f"rank {self.rank}: {why.text}", why.ranks))
                return None
            if cause is None and self._is_unanswered():
                limit = self._patience.limit
                text = f"rank {self.rank}: rank 0, which coordinates, has not answered for {limit:g} s; is it stopped?"
            else:
                text = f"rank {self.rank}: rank 0, which coordinates, is lost"
            self._end(TransportError(f"{cause}; then {text}", cause.ranks) if cause else TransportError(text, [0]))
            return None
        return read_response(message)

    def _is_unanswered(self) -> bool:
        """Return whether an operation has waited for rank 0 longer than the limit, if there is one."""
        if not self._table.running:
            self._heard = time.monotonic()
        limit = self._patience.limit
        return limit is not None and time.monotonic() - self._heard > limit + _GRACE

    def _run(self, response: Response) -> None:
        taken = self._table.take(response.items)
        operations = [operation for operation in taken if operation is not None]
        try:
            parts = [OperationPart(operation, item) for operation, item in zip(taken, response.items, strict=True)]
            if parts[0].signature.kind == "join":
                self._resume()
            self._runner.run(parts)
        except Exception as error:
            self._break(error, operations)
        else:
            self._table.finish(operations)
        finally:
            if self._coordinator is not None:
                self._coordinator.note_done()

    def _resume(self) -> None:
        """Stop announcing steps: all ranks have joined, so no rank stands in for steps any more."""
        with self._lock:
            if self._state is SessionState.TELLING_STEPS:
                self._state = SessionState.RUNNING

    def _break(self, error: Exception, operations: Sequence[Operation]) -> None:
        """End the session after an error in the middle of a message, because the ranks are out of step from there."""
        text = f"rank {self.rank}: {operations[0].label if operations else 'a joined rank'}: {error}"
        why = Reason(text, error.ranks if isinstance(error, TransportError) else (self.rank,))
        self._table.finish(operations, error)
        # The reason goes out before the transport closes: closing makes the calls of the other ranks fail.
        if self._coordinator is not None:
            self._coordinator.end(why)
        elif self._connection is not None:
            self._connection.send(write_farewell(why))
        self._transport.close()
        self._end(error if isinstance(error, FusionLayerError) else TransportError(why.text, why.ranks))

    def _end(self, error: FusionLayerError) -> None:
        # The phase first: an operation added after fail_all would never end.
        self._leave(error)
        self._table.fail_all(error)

    def _leave(self, error: FusionLayerError) -> FusionLayerError:
        """Set the phase to ENDED, so that no operation can be requested any more; return the first reason for it."""
        with self._lock:
            self._state = SessionState.ENDED
            self._why = self._why or error
            return self._why
