"""A lane: a communication thread with the transport and, on CUDA, the stream that are its own."""

from __future__ import annotations

from collections.abc import Callable

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
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(self, work: Callable[[Transport], None], abandoned: Callable[[], None] | None = None) -> Job:
        """Queue ``work(transport)``, which runs on the lane's stream without recording gradients; return its job.

        ``abandoned`` is called if the work fails or never begins.
        """

        def run() -> None:
            # torch.cuda.stream(None) changes nothing.
            with torch.no_grad(), torch.cuda.stream(self._stream):
                work(self.transport)

        return self._worker.put(run, abandoned)

    def close(self) -> None:
        """End the thread when queued work is done, and give the transport up. Twice is once."""
        self._worker.close()
        self.transport.close()
