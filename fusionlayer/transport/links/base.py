"""The interface between a transport and the library that moves its bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class LinkMessage(NamedTuple):
    """A tensor to send to a peer or to receive from it.

    ``key`` has 32 bits, is equal on both ends, and differs from the keys of all other messages in flight.
    """

    peer: int
    data: Tensor
    key: int


class LinkError(Exception):
    """The connections are lost. ``peer`` is the rank whose message failed; another rank may be at fault."""

    def __init__(self, peer: int, message: str) -> None:
        super().__init__(message)
        self.peer = peer


def damaged(what: str, sender: int, receiver: int, sealed: bool = False) -> str:
    """Return the clause that reports damage on the way between two ranks. ``sealed``: by a wrong tag of it."""
    if sealed:
        why = "damaged or changed on its way: its authentication tag is wrong"
    else:
        why = "damaged on its way: its checksum is wrong"
    return f"{what} from rank {sender} to rank {receiver} was {why}"


class DamagedMessage(LinkError):
    """A message came whole, but its checksum or tag is wrong. Nobody knows where that has happened."""

    def __init__(self, sender: int, receiver: int, nbytes: int, sealed: bool = False) -> None:
        super().__init__(sender, damaged(f"a message of {nbytes} bytes", sender, receiver, sealed))
        self.ranks = tuple(sorted((sender, receiver)))


class DeviceError(LinkError):
    """This rank's own device has failed, so no other rank is at fault."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(rank, f"the device of rank {rank} has failed: {message.splitlines()[0]}")
        self.ranks = (rank,)


class Link(ABC):
    """One rank's connections to the other ranks of its group.

    Every method may raise ``LinkError``. The link cannot be used after that.

    Attributes:
        device: the device on which tensors must be.
        only_queues: whether calls only queue their work on the device's current stream, and wait for no other rank.
        can_launch: whether there is ``launching``.
    """

    device: torch.device
    only_queues = False
    can_launch = False

    _timeout: float

    def set_timeout(self, seconds: float) -> None:
        """Let later calls take as long as this."""
        self._timeout = seconds

    @abstractmethod
    def exchange(self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage]) -> None:
        """Send and receive all messages at once. Tensors are uint8 and not empty."""

    @abstractmethod
    def all_reduce(self, x: Tensor, key: int) -> None:
        """Replace ``x`` (n,) by its sum over ranks. ``key`` is as in ``LinkMessage``."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int, key: int) -> None:
        """Replace ``x`` (n,) uint8 by the ``x`` of rank ``root``. ``key`` is as in ``LinkMessage``."""

    def launching(self) -> AbstractContextManager[Tensor]:
        """Let the body queue a kernel that waits for kernels of other ranks.

        Yields (1,) int32 in memory that the device reads: not 0 once the link is closed, and the kernel has to end.
        """
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Make calls in flight fail, here and at the peers. Never waits for the peers.

        Right after ``drain`` no call is in flight, and the messages of all calls still reach the peers. Any thread may
        call it. A second call does nothing.
        """

    def abort(self) -> None:
        """Close because this rank has failed: so may other links that share connections with this one."""
        self.close()

    def drain(self) -> None:  # noqa: B027 - most calls end with their work
        """Wait until the device has done the work of all calls that have returned, at most for the time-out."""

    def overdue(self) -> LinkError | None:
        """Return why the work of a call that has returned can no longer be waited for, or None. Any thread may ask."""
        return None


class RowLink(Link):
    """A link that moves messages of one length by one call of its library, however many ranks there are."""

    @abstractmethod
    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Fill ``out`` (size, n) uint8 with every rank's ``x`` (n,), which may be this rank's row of ``out``."""

    @abstractmethod
    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """Send row j of ``x`` (size, n) uint8 to rank j; row j of ``out`` (size, n) comes from rank j."""


@lru_cache(maxsize=1024)
def peers(rank: int, sends: tuple[int, ...], recvs: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that ``rank`` sends to in an exchange, and the ranks that it receives from.

    Both begin with a neighbour, so that not all ranks write to the same rank at once. ``sends`` and ``recvs`` are
    bytes for each rank; a rank with 0 bytes is left out.
    """
    around = [(rank + step) % len(sends) for step in range(1, len(sends))]
    return tuple(peer for peer in around if sends[peer]), tuple(peer for peer in reversed(around) if recvs[peer])
