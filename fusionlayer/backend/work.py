"""What torch is given to wait for calls: compressed ones, native ones whose messages are decoded after, and several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..errors import FusionLayerError, TransportError
from ..scheduler.worker import Job

__all__ = ["BackgroundWork", "DecodedWork", "JoinedWork", "Ticket"]

_NO_TIMEOUT = timedelta(0)


class Ticket:
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

    def __init__(self, results: Sequence[Tensor], ticket: Ticket) -> None:
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
        # What is chained to the future runs before the job counts as done, and may wait for it too.
        if self._gate.done() and self.job.error is None:
            self.ticket.wait()
            return True
        if timeout and not self.job.ends_within(timeout.total_seconds()):
            raise TransportError(f"a call has not ended within {timeout}; the other ranks may be late or gone")
        self.job.wait()
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

    def exception(self) -> BaseException | None:
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

    def __init__(self, work: dist.Work, decode: Callable[[], object], results: Sequence[Tensor]) -> None:
        super().__init__()
        self._work = work
        self._decode: Callable[[], object] | None = decode
        self._results = list(results)
        # Guards _decode, which runs once, by whichever thread waits first; others wait for it here.
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
