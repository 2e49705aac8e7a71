"""A lane: a transport with the thread or the stream on which its work runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from ..transport import Transport
from ..transport._base import URGENT
from .worker import Job, Jobs, Worker

__all__ = ["LANES", "Lane", "put_first"]

LANES = 2
"""How many lanes an optimizer has by default. Over NCCL an engine has one, whatever it is told."""


class Lane:
    """Runs work on its transport, one job after the other. With several lanes one sends while another computes.

    A job runs on the lane's own thread. If the transport only queues work on the device, as NCCL does, a job runs
    within ``put``, on the thread of the caller: several communicators of a device then get their work in the same order
    on all ranks, whatever the threads do. On CUDA the lane has a stream of its own.

    Args:
        transport: used by this lane alone, and closed with it.
        device: of the tensors.
        name: of the thread.

    Attributes:
        is_at_once: whether jobs run within ``put``.
    """

    def __init__(self, transport: Transport, device: torch.device, name: str) -> None:
        self.transport = transport
        self._stream = torch.cuda.Stream(device, priority=URGENT) if device.type == "cuda" else None
        self.is_at_once = transport.only_queues(device)
        self._worker = Jobs(name) if self.is_at_once else Worker(name)
        if not self.is_at_once:
            # As the thread's first job, so that it runs before any work.
            self._worker.put(partial(_set_up_thread, self._stream))

    def put(self, work: Callable[[Transport], None], abandoned: Callable[[], None] | None = None) -> Job:
        """Run ``work(transport)`` in its turn, on the lane's stream and without recording gradients; return its job.

        ``abandoned`` is called if the work fails or never begins.
        """
        run = partial(self._run, work) if self.is_at_once else partial(work, self.transport)
        return self._worker.put(run, abandoned)

    def drain(self) -> None:
        """Wait until the device has done all messages of jobs that have ended; raise what has failed meanwhile.

        Jobs on a thread end with their messages.
        """
        if self.is_at_once:
            self.transport.drain()

    def close(self) -> None:
        """Close the transport and let the thread end; do not wait for that. A second call does nothing.

        Jobs that are still queued or under way fail when they use the transport. The current stream waits for what the
        lane's stream still has to do, so the memory of gradients may be used again.
        """
        self._worker.close()
        self.transport.close()
        if self._stream is not None and not torch.cuda.is_current_stream_capturing():
            with suppress(RuntimeError):  # the device has failed, and has told so before
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def join(self) -> None:
        """Wait until nothing runs on the lane any more; call ``close`` before."""
        self._worker.join()

    def _run(self, work: Callable[[Transport], None]) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            work(self.transport)


def put_first(lanes: Sequence[Lane], work: Callable[[Transport], None]) -> Job:
    """Queue ``work`` on the first lane; every other lane waits for it before it sends anything queued later."""
    first, *others = lanes
    agreement = first.put(work)
    # A payload on another lane could overtake the comparison, and a peer that disagrees would misread it. If ``work``
    # fails, ``wait`` raises its error on each lane, so no lane sends anything more.
    for lane in others:
        lane.put(lambda _: agreement.wait())
    return agreement


def _set_up_thread(stream: torch.cuda.Stream | None) -> None:
    """Set gradient mode and stream of the calling thread; both hold for this thread alone, until it ends."""
    torch.set_grad_enabled(False)
    if stream is not None:
        torch.cuda.set_stream(stream)
