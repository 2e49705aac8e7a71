"""The thread on which the compressed calls of one process group run, and what waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..errors import FusionLayerError, TransportError
from ..scheduler.worker import Job, Worker
from ..transport import Transport

__all__ = ["BackgroundWork", "DecodedWork", "JoinedWork", "Lane"]

_NO_TIMEOUT = timedelta(0)


class Lane:
    """Runs calls one after the other, in the order in which they were made, on a thread and a transport of its own.

    Both come with the first call. The first call that fails is the last one that runs. On CUDA each call waits for what
    the calling stream had to do when it was made, and runs on a stream of the lane.

    Args:
        name: of the group, in errors.
        connect: makes the transport; called on the thread.
    """

    def __init__(self, name: str, connect: Callable[[], Transport]) -> None:
        self._name = name
        self._connect = connect
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._last: Job | None = None
        self._closed = False
        self._transport: Transport | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent so far."""
        return 0 if self._transport is None else self._transport.bytes_sent

    def submit(self, what: str, call: Callable[[Transport], None], results: Sequence[Tensor]) -> BackgroundWork:
        """Have ``call`` made with the lane's transport; return what waits for it.

        A call that is made on the lane's own thread, by what was chained to the future of an earlier one, is made at
        once: nobody else could.

        Args:
            what: the call, in errors.
            call: reads and writes nothing but tensors of one device.
            results: what it writes to.
        """
        device = results[0].device
        work = BackgroundWork(results, _Ticket(device))
        if self._worker is not None and self._worker.is_here:
            work.job = Job(lambda: self._run(what, call, work), work.fail)
            work.job.run(None)
            work.job.finish()
        else:
            with self._lock:
                work.job = self._open_worker().put(lambda: self._run(what, call, work), lambda: self._abandon(work))
                self._last = work.job
        return work

    def drain(self) -> None:
        """Return when all calls made so far have ended, whether well or not: who waits for them is told."""
        last = self._last
        if last is not None and self._worker is not None and not self._worker.is_here:
            with suppress(FusionLayerError):
                last.wait()
            self._last = None

    def close(self, *, wait: bool) -> None:
        """End the thread and the transport, after the calls made so far or, without ``wait``, in the middle of them."""
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        if not wait and self._transport is not None:
            self._transport.close()
        if worker is not None and wait and not worker.is_here:
            worker.join()
        if self._transport is not None:
            self._transport.close()
        self._last = None

    def _open_worker(self) -> Worker:
        if self._closed:
            raise FusionLayerError(f"process group {self._name!r} was destroyed: it can send nothing any more")
        if self._worker is None:
            self._worker = Worker(f"fusionlayer group {self._name}")
        return self._worker

    def _run(self, what: str, call: Callable[[Transport], None], work: BackgroundWork) -> None:
        with _located(f"{what}, process group {self._name!r}"), work.ticket.on(self._side):
            # It is no_grad that also lets tensors be written that were made in inference mode.
            with torch.inference_mode():
                if self._transport is None:
                    self._transport = self._connect()
                call(self._transport)
            work.finish()

    def _abandon(self, work: BackgroundWork) -> None:
        with self._lock:  # who has put the job may not have told the work of it yet
            pass
        work.fail()

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


class _Ticket:
    """What orders a call on a device: after what the calling stream had to do, before what waits for the call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.done: torch.cuda.Event | None = None
        self._ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    @contextmanager
    def on(self, side: Callable[[torch.device], torch.cuda.Stream]) -> Iterator[None]:
        """Run the body on the stream that ``side`` gives for the device."""
        if self._ready is None:
            yield
            return
        stream = side(self.device)
        stream.wait_event(self._ready)
        with torch.cuda.stream(stream):
            yield
            self.done = stream.record_event()

    def wait(self) -> None:
        """Have the current stream wait for the call, which the lane's thread has launched."""
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)

    @property
    def is_over(self) -> bool:
        """Whether the device has done what was launched."""
        return self.done is None or self.done.query()


class BackgroundWork(dist.Work):
    """A call of a ``Lane``, as torch wants it: ``wait``, ``get_future`` and what they are asked besides."""

    job: Job

    def __init__(self, results: Sequence[Tensor], ticket: _Ticket) -> None:
        super().__init__()
        self.ticket = ticket
        self._results = list(results)
        devices: list[Any] = [ticket.device] if ticket.device.type == "cuda" else []
        self._gate: Future[list[Tensor]] = Future(devices=devices)
        # An error that is given to a torch Future is lost on C++ callers; one that is raised in a callback is not.
        self._future: Future[list[Tensor]] = self._gate.then(self._outcome)

    def finish(self) -> None:
        """The call has been made; on CUDA it was launched on the current stream."""
        if self.ticket.device.type == "cuda":
            for result in self._results:
                result.record_stream(torch.cuda.current_stream(self.ticket.device))
        self._gate.set_result(self._results)

    def fail(self) -> None:
        """The call has failed, or is never going to be made."""
        if not self._gate.done():
            self._gate.set_result([])

    def _outcome(self, gate: Future[list[Tensor]]) -> list[Tensor]:
        results = gate.value()
        if not results:
            raise self.job.error or FusionLayerError("the call was not made")
        return results

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return when the results are there (CPU) or ordered before what the current stream does next (CUDA).

        Raises:
            FusionLayerError: what the call raised, or nothing came within ``timeout``.
        """
        seconds = timeout.total_seconds() or None
        # What is chained to the future runs before the job counts as done, and may wait for it too.
        if self._gate.done() and self.job.error is None:
            self.ticket.wait()
            return True
        if not self.job.wait(seconds):
            raise TransportError(f"a call has not ended within {seconds:g} s; the other ranks may be late or gone")
        self.ticket.wait()
        return True

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the results."""
        return self._future

    def is_completed(self) -> bool:
        """Return whether the call has ended, well or not."""
        return self.job.is_done and self.ticket.is_over

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return self.is_completed() and self.job.error is None

    def exception(self) -> BaseException | None:  # type: ignore[override]
        """Return what the call raised."""
        return self.job.error

    def result(self) -> list[Tensor]:
        """Return what the call writes to."""
        return self._results


class JoinedWork(dist.Work):
    """Several works that are waited for as one."""

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
        """Return whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def result(self) -> list[Tensor]:
        """Return what they write to."""
        return self._results


class DecodedWork(dist.Work):
    """A native work after which a message has to be decoded, which happens when it is waited for."""

    def __init__(self, work: dist.Work, decode: Callable[[], None], results: Sequence[Tensor]) -> None:
        super().__init__()
        self._work = work
        self._decode: Callable[[], None] | None = decode
        self._results = list(results)
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the message and decode it."""
        arrived = _wait(self._work, timeout)
        self._finish()
        return arrived

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of what was decoded."""

        def outcome(future: Future[Any]) -> list[Tensor]:
            future.value()
            self._finish()
            return self._results

        return self._work.get_future().then(outcome)

    def is_completed(self) -> bool:
        """Return whether the message is there; it is decoded then."""
        if not self._work.is_completed():
            return False
        if self._work.is_success():
            self._finish()
        return True

    def is_success(self) -> bool:
        """Return whether the message has come."""
        return self._work.is_success()

    def source_rank(self) -> int:
        """Return the rank that has sent it."""
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

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


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Say in every error of the body which call it belongs to."""
    try:
        yield
    except FusionLayerError as error:
        told = type(error)(f"{where}: {error}")
        vars(told).update(vars(error))
        raise told from error
