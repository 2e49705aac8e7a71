"""The thread on which the compressed calls of one process group run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from ..errors import FusionLayerError
from ..scheduler.worker import Job, Worker
from ..transport import Transport
from .work import BackgroundWork, Ticket

__all__ = ["CallQueue"]


class CallQueue:
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
        # Guards _worker, _closed and _last: another thread may close the queue while callers put calls. It also makes a
        # call that is abandoned wait until the caller who put it has told the work of its job.
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
        work = BackgroundWork(results, Ticket(device))
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
            with suppress(Exception):
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
                try:
                    call(self._transport)
                except BaseException:
                    self._transport.close()  # whatever it was: the other ranks shall not wait for the rest of the call
                    raise
            work.finish()

    def _abandon(self, work: BackgroundWork) -> None:
        with self._lock:  # who has put the job may not have told the work of it yet
            pass
        work.fail()

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Say in every error of the body which call it belongs to."""
    try:
        yield
    except FusionLayerError as error:
        told = type(error)(f"{where}: {error}")
        vars(told).update(vars(error))
        raise told from error
