"""A lane: a communication thread with its own transport and, on CUDA, its own stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..transport import Transport
from .worker import Job, Worker

__all__ = ["CPU_LANES", "Lane"]

CPU_LANES = 2
"""How many lanes an optimizer of CPU tensors has by default."""


class Lane:
    """Runs work on its transport, one job after the other. With several lanes one sends while another computes.

    Args:
        transport: used by this lane's thread alone, and closed with it.
        device: of the tensors.
        name: of the thread.
    """

    def __init__(self, transport: Transport, device: torch.device, name: str) -> None:
        self.transport = transport
        self._worker = Worker(name)
        # As the thread's first job, so that it runs before any work.
        self._worker.put(partial(_set_up_thread, torch.cuda.Stream(device) if device.type == "cuda" else None))

    def put(self, work: Callable[[Transport], None], abandoned: Callable[[], None] | None = None) -> Job:
        """Queue ``work(transport)`` and return its job; it runs on the lane's stream without recording gradients.

        ``abandoned`` is called if the work fails or never begins.
        """
        return self._worker.put(partial(work, self.transport), abandoned)

    def close(self) -> None:
        """Close the transport and let the thread end; do not wait for that. A second call does nothing.

        Jobs that are still queued or under way fail when they use the transport.
        """
        self._worker.close()
        self.transport.close()


def _set_up_thread(stream: torch.cuda.Stream | None) -> None:
    """Set gradient mode and stream of the calling thread; both hold for this thread alone, until it ends."""
    torch.set_grad_enabled(False)
    if stream is not None:
        torch.cuda.set_stream(stream)
