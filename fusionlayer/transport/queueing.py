"""Transports whose calls only queue work on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor


class Queueing(ABC):
    """How a transport treats devices. By default calls end with their work, and kernels do not wait for other ranks."""

    def connect_device(self, device: torch.device) -> None:  # noqa: B027 - most transports need no more connections
        """Connect the ranks for tensors on ``device`` now. All ranks call it together; a later call does nothing.

        Without it the first collective call with such a tensor connects them. Messages between two ranks before that
        are sent through the host's memory.

        Raises:
            TransportError: a rank failed, timed out, or has a device that cannot be connected.
            PlanMismatch: the ranks' devices do not go together.
        """

    def only_queues(self, device: torch.device) -> bool:
        """Return whether calls with tensors on ``device`` only queue work on its current stream.

        They wait for no other rank then, and any thread may make them in its turn.
        """
        return False

    def can_launch(self, device: torch.device) -> bool:
        """Return whether ``launch`` works on ``device``."""
        return False

    def launch(self, what: str, device: torch.device, kernel: Callable[[Tensor], None]) -> None:
        """Let ``kernel`` queue one kernel on the current stream that waits for the like of it on all other ranks.

        All ranks call it together. ``what`` describes the kernel in errors, with all values that must be equal. It gets
        (1,) int32 in memory that the device reads: a value other than 0 means that the transport is closed and the
        kernel must end.
        """
        raise NotImplementedError

    def drain(self) -> None:  # noqa: B027 - most calls end with their work
        """Wait until devices have done the work of all calls that have returned; at most for ``timeout`` seconds.

        Received data are whole then. After an orderly ``close`` it does nothing.

        Raises:
            TransportError: this transport has failed, perhaps in work that was queued.
        """

    def stages(self, device: torch.device) -> bool:
        """Return whether messages of ``device`` are sent from the host's memory, to which they are copied first."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Close the group at once."""

    def finish(self) -> None:
        """Close the group after all calls have ended, on devices too. Errors during this are logged."""
        self.close()
