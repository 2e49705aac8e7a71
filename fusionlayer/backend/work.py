"""The ``dist.Work`` objects of a compressing group: of queued calls, of messages to decode, and of several works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future

from ..base.errors import FusionLayerError, TransportError
from ..scheduler.lanes import Job

_NO_TIMEOUT = timedelta(0)


class Ticket:
    """Orders a call on a CUDA device: after the earlier work of the calling stream, and before work that waits for it.

    The calling thread makes the ticket, so its constructor sees the calling stream. The queue's thread uses ``on``; any
    thread may ``wait``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.done: torch.cuda.Event | None = None
        self._ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    @contextmanager
    def on(self, side: Callable[[torch.device], torch.cuda.Stream]) -> Iterator[None]:
        """Run the block on the stream that ``side`` gives for the device."""
        if self._ready is None:
            yield
            return
        stream = side(self.device)
        stream.wait_event(self._ready)
        with torch.cuda.stream(stream):
            yield
            self.done = stream.record_event()

    def wait(self) -> None:
        """Let the current stream wait for the call, which the queue's thread has launched."""
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)

    @property
    def is_over(self) -> bool:
        """Whether the device has finished the launched work."""
        return self.done is None or self.done.query()


class BackgroundWork(dist.Work):
    """The work of a call in a ``CallQueue``: any thread waits for it, and the queue's thread ends it."""

    job: Job
    """Set by ``CallQueue.submit``, before it returns the work."""

    def __init__(self, results: Sequence[Tensor], ticket: Ticket) -> None:
        super().__init__()
        self.ticket = ticket
        self._results = list(results)
        devices: list[Any] = [ticket.device] if ticket.device.type == "cuda" else []
        self._gate: Future[list[Tensor]] = Future(devices=devices)
        # C++ callers do not see an error that is set on a torch Future, but they see one that a callback raises. So
        # _gate only says that the call has ended, and the callback _outcome returns the results or raises the error.
        self._future: Future[list[Tensor]] = self._gate.then(self._outcome)

    def finish(self) -> None:
        """Note on the queue's thread that the call has been made; on CUDA it was launched on the current stream."""
        if self.ticket.device.type == "cuda":
            for result in self._results:
                result.record_stream(torch.cuda.current_stream(self.ticket.device))
        self._gate.set_result(self._results)

    def fail(self) -> None:
        """Note that the call has failed, or will never be made."""
        if not self._gate.done():
            self._gate.set_result([])

    def _outcome(self, gate: Future[list[Tensor]]) -> list[Tensor]:
        results = gate.value()
        if not results:
            raise self.job.error or FusionLayerError("the call was not made")
        return results

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the results are complete (CPU), or ordered before the next work of the current stream (CUDA).

        Raises:
            FusionLayerError: the call has failed, or has not ended within ``timeout``.
        """
        # Callbacks of the future run within the job, on the queue's thread. A callback that waits here for its own call
        # must not wait for the job, which ends only after the callback.
        if self._gate.done() and self.job.error is None:
            self.ticket.wait()
            return True
        if timeout and not self.job.ends_within(timeout.total_seconds()):
            raise TransportError(f"a call has not ended within {timeout}; the other ranks may be slow or gone")
        self.job.wait()
        self.ticket.wait()
        return True

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the results.

        Within backward, it is mostly DDP that asks. DDP waits for the future at the end of backward, in C++, where an
        error keeps its text and loses its type and ranks. Callbacks at the end of backward run in the order of
        queueing, and DDP queues its own after its last call. So this one comes before and raises the error itself; it
        waits no longer than DDP would.
        """
        if torch._C._current_graph_task_id() >= 0:
            Variable._execution_engine.queue_callback(self.job.wait)
        return self._future

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return self.job.is_done and self.ticket.is_over

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self.is_completed() and self.job.error is None

    def exception(self) -> BaseException | None:
        """Return what the call raised."""
        return self.job.error

    def result(self) -> list[Tensor]:
        """Return the tensors that the call writes."""
        return self._results


class JoinedWork(dist.Work):
    """Several works in one: a wait for it waits for all of them."""

    def __init__(self, works: Sequence[dist.Work], results: Sequence[Tensor]) -> None:
        super().__init__()
        self._works = list(works)
        self._results = list(results)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for all."""
        return all([_wait(work, timeout) for work in self._works])

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the results of all."""
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        results = self._results

        def outcome(futures: Future[list[Future[Any]]]) -> list[Tensor]:
            for future in futures.value():
                future.value()
            return results

        return every.then(outcome)

    def is_completed(self) -> bool:
        """Return whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all have ended without an error."""
        return all(work.is_success() for work in self._works)

    def result(self) -> list[Tensor]:
        """Return the tensors that they write."""
        return self._results


class WrappedWork(dist.Work):
    """A work around another one, which handles all methods that a subclass does not define."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return what the call raised."""
        error: BaseException | None = self._work.exception()
        return error

    def source_rank(self) -> int:
        """Return the rank that has sent the received message."""
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()


class DecodedWork(WrappedWork):
    """A work with a last step, such as to decode a message; the first thread that waits for it does this step."""

    def __init__(self, work: dist.Work, decode: Callable[[], object], results: Sequence[Tensor]) -> None:
        super().__init__(work)
        self._decode: Callable[[], object] | None = decode
        self._results = list(results)
        # Guards _decode. The first thread that waits runs it; the others wait here until the result is complete.
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the message and decode it."""
        arrived = _wait(self._work, timeout)
        self._finish()
        return arrived

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the decoded values."""

        def outcome(future: Future[Any]) -> list[Tensor]:
            future.value()
            self._finish()
            return self._results

        return self._work.get_future().then(outcome)

    def is_completed(self) -> bool:
        """Return whether the message has arrived, and decode it if it has."""
        if not self._work.is_completed():
            return False
        if self._work.is_success():
            self._finish()
        return True

    def result(self) -> list[Tensor]:
        """Return what was decoded."""
        return self._results

    def _finish(self) -> None:
        with self._lock:
            if self._decode is not None:
                self._decode()
                self._decode = None


def _wait(work: dist.Work, timeout: timedelta) -> bool:
    return work.wait(timeout) if timeout else work.wait()
