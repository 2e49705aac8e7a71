"""The compressed calls of one process group, in a row: on a communication thread, or over NCCL on the caller's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from ..base.errors import FusionLayerError
from ..scheduler.lanes import Job, Worker
from ..transport import Transport
from ..transport.base import URGENT
from .work import BackgroundWork, Ticket


class CallQueue:
    """Runs calls one after the other, in call order, on a thread and a transport of its own.

    The order matters: all ranks make the same calls in the same order, and so their messages match. The first call
    starts the thread and the transport. After a call has failed no further call runs, because ranks may be out of step.
    On CUDA, a call runs on a stream of the queue, after the work that the calling stream held when the call was made.

    Over NCCL a call only queues work on the device. It does so within ``submit``, so that on all ranks several
    communicators of a device get their work in the order of the program, as with torch's own group. No thread is
    started then.

    Args:
        name: name of the group, for errors.
        connect: makes the transport; the queue's thread calls it.
        compare: whether ranks meet before each call, on the CPU. NCCL cannot distinguish messages of different calls,
            but a meeting of ranks in different calls fails.
        timeout: returns the seconds that a call may wait; asked before each call, as the program may change it.
        at_once: whether calls of CUDA tensors run within ``submit``. The transport must only queue their work then.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Transport],
        *,
        compare: bool = False,
        timeout: Callable[[], float] | None = None,
        at_once: bool = False,
    ) -> None:
        self._name = name
        self._connect = connect
        self._compare = compare
        self._timeout = timeout
        self._at_once = at_once
        self._worker = Worker(f"fusionlayer group {name}")  # keeps the first error, wherever the call ran
        # Guards _closed, _last and the queue: another thread may close the queue while callers submit calls. It
        # also orders submit and _abandon: the worker may drop a job before submit has set work.job, which _abandon
        # needs.
        self._lock = threading.Lock()
        self._last: Job | None = None
        self._closed = False
        # Only the thread that runs a call makes these two. Others read the transport for its counter, and close it.
        self._transport: Transport | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent so far."""
        return 0 if self._transport is None else self._transport.bytes_sent

    def submit(self, what: str, call: Callable[[Transport], None], results: Sequence[Tensor]) -> BackgroundWork:
        """Queue ``call``, which gets the queue's transport; return a work that waits for it.

        A callback of an earlier call's future runs on the queue's own thread. If it submits a call, that call runs at
        once: if it were queued, and the callback waited for it, the thread would wait for itself.
        """
        device = results[0].device
        work = BackgroundWork(results, Ticket(device))
        if self._worker.is_here or self._at_once and device.type == "cuda":
            self._check_open()
            self.drain()  # a call of CPU tensors may be in flight, on the same transport
            work.job = Job(lambda: self._run(what, call, work), work.fail)
            self._worker.run(work.job)
        else:
            with self._lock:
                self._check_open()
                work.job = self._worker.put(lambda: self._run(what, call, work), lambda: self._abandon(work))
                self._last = work.job
        return work

    def drain(self) -> None:
        """Wait until all calls made so far have ended. Errors are not raised here: each call's own work raises them."""
        # On the queue's own thread, the last call may be the running one, and the wait would never end.
        last = self._last
        if last is not None and not self._worker.is_here:
            with suppress(Exception):
                last.wait()
            self._last = None

    def close(self, *, wait: bool) -> None:
        """End the thread and the transport: after the calls made so far, or at once if ``wait`` is False."""
        with self._lock:
            self._closed = True
            self._worker.close()
        if not wait and self._transport is not None:
            self._transport.close()  # the call that runs now fails, and with it all that are queued
        if wait and not self._worker.is_here:
            self._worker.join()
        if self._transport is not None:
            self._transport.finish()
        self._last = None

    def _check_open(self) -> None:
        if self._closed:
            raise FusionLayerError(f"process group {self._name!r} was destroyed: it can send nothing any more")

    def _run(self, what: str, call: Callable[[Transport], None], work: BackgroundWork) -> None:
        with _located(f"{what}, process group {self._name!r}"), work.ticket.on(self._side):
            # Unlike no_grad, inference mode also allows writes to tensors that were made in inference mode.
            with torch.inference_mode():
                if self._transport is None:
                    self._transport = self._connect()
                self._transport.purpose = what
                seconds = self._timeout and self._timeout()
                if seconds and seconds != self._transport.timeout:
                    self._transport.set_timeout(seconds)
                try:
                    if self._compare:
                        self._transport.barrier()
                    call(self._transport)
                except BaseException:
                    # After any failure here, the other ranks must not wait for the rest of this call.
                    self._transport.close()
                    raise
            work.finish()

    def _abandon(self, work: BackgroundWork) -> None:
        # Runs on the queue's thread. submit sets work.job within the lock, and work.fail leads to a read of it.
        with self._lock:
            pass
        work.fail()

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=URGENT)
        return self._stream


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Add the call's description to every ``FusionLayerError`` that the block raises."""
    try:
        yield
    except FusionLayerError as error:
        told = type(error)(f"{where}: {error}")
        vars(told).update(vars(error))
        raise told from error
