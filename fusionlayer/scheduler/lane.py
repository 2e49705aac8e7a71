"""A lane: a communication thread with the transport and, on CUDA, the stream that are its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..transport import Transport
from .worker import Job, Worker

__all__ = ["CPU_LANES", "Lane"]

CPU_LANES = 2
"""How many lanes an optimizer of CPU tensors has unless its user says otherwise."""


class Lane:
    """Does work on its transport, one piece after the other. Several lanes keep the network busy while one computes.

    Args:
        transport: used by this lane's thread alone, and closed with it.
        device: of the tensors.
        name: of the thread.
    """

    def __init__(self, transport: Transport, device: torch.device, name: str) -> None:
        self.transport = transport
        self._worker = Worker(name)
        self._worker.put(partial(_settle, torch.cuda.Stream(device) if device.type == "cuda" else None))

    def put(self, work: Callable[[Transport], None], abandoned: Callable[[], None] | None = None) -> Job:
        """Queue ``work(transport)``, which runs on the lane's stream without recording gradients; return its job.

        ``abandoned`` is called if the work fails or never begins.
        """
        return self._worker.put(partial(work, self.transport), abandoned)

    def close(self) -> None:
        """End the thread when queued work is done, and give the transport up. Twice is once."""
        self._worker.close()
        self.transport.close()


def _settle(stream: torch.cuda.Stream | None) -> None:
    """Be the first job of a lane's thread: both settings are the thread's own, and stay."""
    torch.set_grad_enabled(False)
    if stream is not None:
        torch.cuda.set_stream(stream)
