"""The interface of transports. They move bytes and sum dense tensors; they know nothing of gradients or codecs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..base.errors import ConfigError, TransportError
from .composed import Composed

URGENT = -1
"""Priority of a stream that carries messages. Kernels of backward that are queued already must not hold up a message:
other ranks wait for it."""


class Transport(Composed):
    """One rank's end of a group of ranks.

    One thread at a time may use a transport, and every rank must make the same calls in the same order; a second thread
    takes a ``duplicate``. Calls return when the result may be used on the calling thread (CPU) or the current stream
    (CUDA). Tensors are contiguous.

    Every call may raise ``TransportError`` (a peer failed, stopped or timed out). The transport is then closed: on this
    rank at once, on the others at their next call.

    Attributes:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        timeout: seconds that a call may wait for its peers.
        bytes_sent: payload bytes that this rank has sent. A dense all-reduce counts as a ring, 2 (size - 1) / size of
            its bytes; a broadcast counts as (size - 1) times its bytes at the root.
        sequence: number of collective calls so far. ``send`` and ``recv`` involve two ranks only and do not count.
        purpose: what the next collective calls are for. A user that makes different calls of equal sizes sets it before
            them: if ranks differ, their messages do not match, and the error says what each rank was doing. It adds
                nothing to the sent bytes. Over NCCL, which cannot distinguish messages, only calls on CPU tensors
                differ.
        why: what led this rank to the next exchanges, for the errors of ranks that make other calls.
        peer_bytes: bytes of each rank's device that messages by peer memory, and sums in one launch, may take each; the
            same on all ranks.
    """

    timeout: float
    bytes_sent: int = 0
    sequence: int = 0
    peer_bytes: int = 0
    _nodes: tuple[tuple[int, ...], ...] | None = None

    @abstractmethod
    def all_reduce(self, x: Tensor) -> None:
        """Replace ``x`` by its sum over ranks; the same bits on every rank. Any shape; floats or integers."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int) -> None:
        """Replace ``x`` by the ``x`` of rank ``root``. Any shape and dtype."""

    @abstractmethod
    def send(self, x: Tensor, to: int, tag: int = 0) -> None:
        """Send ``x`` to rank ``to``; returns when ``x`` may be changed. Pairs with one ``recv`` of the same tag."""

    @abstractmethod
    def recv(self, x: Tensor, source: int, tag: int = 0) -> None:
        """Receive into ``x`` what rank ``source`` sends with this tag; the same number of bytes."""

    def set_timeout(self, seconds: float) -> None:
        """Let later calls wait this long for their peers. All ranks set the same; the thread that makes calls does."""
        self.timeout = seconds

    @abstractmethod
    def duplicate(self) -> Transport:
        """Return a transport over the same ranks with traffic separate from this one's. All ranks call it together.

        A failure of one does not end the other.
        """

    def shared_duplicate(self) -> Transport:
        """Return a duplicate over the same connections, if this kind of transport can share them.

        It needs no more descriptors. A call of one that fails ends the other, too.
        """
        return self.duplicate()

    @abstractmethod
    def subset(self, ranks: Sequence[int]) -> Transport:
        """Return a transport over some of the ranks, this one among them, ranked in the order given.

        Those ranks call it together, with the same ``ranks``; the others do not take part.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the group: pending and later calls raise. Never waits for other ranks. A second call does nothing.

        Work that calls have only queued on a device is cut off in the middle: ``finish`` waits for it.
        """

    # ---- devices: by default calls end with their work, and kernels do not wait for other ranks ---------------------

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

        All ranks call it together. ``what`` says for errors what the kernel does, with all that must be equal. It gets
        (1,) int32 in memory that the device reads: not 0 once the transport is closed, and the kernel has to end.
        """
        raise NotImplementedError

    def drain(self) -> None:  # noqa: B027 - most calls end with their work
        """Wait until devices have done the work of all calls that have returned; at most for ``timeout`` seconds.

        What was received is whole then. After an orderly ``close`` it does nothing.

        Raises:
            TransportError: this transport has failed, perhaps in work that was queued.
        """

    def stages(self, device: torch.device) -> bool:
        """Return whether messages of ``device`` are sent from the host's memory, to which they are copied first."""
        return False

    def finish(self) -> None:
        """Close the group after all calls have ended, on devices too. What fails meanwhile is logged."""
        self.close()

    # ---- what is known of the ranks ---------------------------------------------------------------------------------

    def cause(self) -> TransportError | None:
        """Return why this process leaves, if one of its transports over these ranks has failed; else None."""
        return None

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in ascending order; nodes are in the order of their first ranks.

        Ranks of a node reach each other faster than other ranks.
        """
        return self._nodes or (tuple(range(self.size)),)

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """The number of ranks of each of ``nodes``: all ranks have agreed on it, so a choice by it is the same."""
        return tuple(map(len, self.nodes))


def check_subset(ranks: Sequence[int], rank: int, size: int) -> None:
    """Raise ``ConfigError`` unless ``ranks`` are different ranks of ``size`` and include ``rank``."""
    if len(set(ranks)) != len(ranks) or rank not in ranks or not all(0 <= r < size for r in ranks):
        raise ConfigError(
            f"subset {list(ranks)} on rank {rank} of {size}; give different ranks from 0 to {size - 1}, and call it "
            "only on those"
        )


def group_by_node(names: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Return ``Transport.nodes`` for the name of every rank's node."""
    found: dict[object, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return tuple(map(tuple, found.values()))
