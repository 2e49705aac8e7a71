"""What a process needs of the library that moves its bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Link", "LinkError", "LinkMessage"]


class LinkMessage(NamedTuple):
    """A tensor for, or from, a peer. ``key`` is 32 bits, equal on both ends, unlike that of any other under way."""

    peer: int
    data: Tensor
    key: int


class LinkError(Exception):
    """The connections are lost. ``peer``: the rank whose message failed, which need not be the one that is to blame."""

    def __init__(self, peer: int, message: str) -> None:
        super().__init__(message)
        self.peer = peer


class Link(ABC):
    """One rank's connections to the other ranks of its group. Every method raises LinkError, and is of no use after.

    Attributes:
        device: where tensors must be.
    """

    device: torch.device

    @abstractmethod
    def exchange(self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage]) -> None:
        """Send and receive all of them at once; uint8, none of them empty."""

    @abstractmethod
    def all_reduce(self, x: Tensor, key: int) -> None:
        """Replace ``x`` (n,) by its sum over ranks. ``key``: as for the messages of an exchange."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int, key: int) -> None:
        """Replace ``x`` (n,) uint8 by rank ``root``'s. ``key``: as for the messages of an exchange."""

    @abstractmethod
    def close(self) -> None:
        """End what is in flight here and at the peers; never waits for them. Any thread may call it; twice is once."""

    def is_overdue(self) -> bool:
        """Return whether something that was started has not ended within the time-out, though the call has returned."""
        return False
