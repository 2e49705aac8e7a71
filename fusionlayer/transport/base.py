"""The interface of transports. They move bytes and sum dense tensors; they know nothing of gradients or codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from ..base.errors import ConfigError, PlanMismatch, TransportError
from ..native.wire import digest

__all__ = ["URGENT", "Transport"]

URGENT = -1
"""Priority of a stream that carries messages. Kernels of backward that are queued already must not hold up a message:
other ranks wait for it."""

# Up to this size all_reduce_max sends the whole tensor to every rank: one exchange instead of two.
_WHOLE_BYTES = 1 << 12


class Transport(ABC):
    """One rank's end of a group of ranks.

    One thread at a time may use a transport, and every rank must make the same calls in the same order; a second thread
    takes a ``duplicate``. Calls return when the result may be used on the calling thread (CPU) or the current stream
    (CUDA). Tensors are contiguous.

    Every call may raise ``TransportError`` (a peer is lost, stopped or late). The transport is then closed: on this
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
            nothing to what is sent. Over NCCL, which cannot tell messages apart, only calls on CPU tensors differ.
        why: what led this rank to the next exchanges, for the errors of ranks that make other calls.
        peer_bytes: bytes of each rank's device that messages by peer memory, and sums in one launch, may take each; the
            same on all ranks.
    """

    rank: int
    size: int
    timeout: float
    bytes_sent: int = 0
    sequence: int = 0
    purpose: str = ""
    why: str = ""
    peer_bytes: int = 0
    _nodes: tuple[tuple[int, ...], ...] | None = None

    @abstractmethod
    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> None:
        """Send ``sends[j]`` to rank j and receive ``recvs[j]`` from rank j, all at once, both directions busy.

        Both lists hold ``size`` uint8 tensors of any lengths; none of them may overlap a receive buffer. ``recvs[j]``
        here is as long as ``sends[rank]`` on rank j. The entry of this rank itself is copied. ``sends`` may hold the
        same tensor more than once.
        """

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
        """Return a transport over the same ranks with traffic separate from this one's. All ranks call it together."""

    @abstractmethod
    def subset(self, ranks: Sequence[int]) -> Transport:
        """Return a transport over some of the ranks, this one among them, ranked in the order given.

        Those ranks call it together, with the same ``ranks``; the others have no part in it.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the group: pending and later calls raise. Never waits for other ranks. A second call does nothing.

        Work that calls have only queued on a device is cut off in the middle: ``finish`` waits for it.
        """

    def finish(self) -> None:
        """Close the group after all calls have ended, on devices too. What fails meanwhile is logged."""
        self.close()

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

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Fill ``out`` (size, n) uint8 with every rank's ``x`` (n,), in rank order; ``x`` may be this rank's row."""
        self.exchange([x] * self.size, list(out.unbind(0)))

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """Return what each rank passes, in rank order; equally many bytes on all ranks."""
        x = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        out = x.new_empty(self.size, x.numel())
        self.all_gather(x, out)
        return [row.numpy().tobytes() for row in out]

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """Send row j of ``x`` (size, n) uint8 to rank j; row j of ``out`` (size, n) comes from rank j."""
        self.exchange(list(x.unbind(0)), list(out.unbind(0)))

    def all_reduce_max(self, x: Tensor) -> None:
        """Replace ``x`` (n,) by its elementwise maximum over ranks; a NaN wins. Floats or integers."""
        if self.size == 1 or not x.numel():
            return
        if x.numel() * x.element_size() <= _WHOLE_BYTES:
            every = x.new_empty(self.size, x.numel())
            self.all_gather(x.view(torch.uint8), every.view(torch.uint8))
            x.copy_(every.amax(0))
            return
        bounds = [x.numel() * r // self.size for r in range(self.size + 1)]
        shares = [x[start:stop].view(torch.uint8) for start, stop in pairwise(bounds)]
        every = x.new_empty(self.size, bounds[self.rank + 1] - bounds[self.rank])
        self.exchange(shares, [part.view(torch.uint8) for part in every])
        self.exchange([every.amax(0).view(torch.uint8)] * self.size, shares)

    def cause(self) -> TransportError | None:
        """Return why this process leaves, if a transport of it over these ranks has failed; else None."""
        return None

    def _check_member(self, ranks: Sequence[int]) -> None:
        """Raise ``ConfigError`` unless ``ranks`` are different ranks of this transport and include this one."""
        if len(set(ranks)) != len(ranks) or self.rank not in ranks or not all(0 <= r < self.size for r in ranks):
            raise ConfigError(
                f"subset {list(ranks)} on rank {self.rank} of {self.size}; give different ranks from 0 to "
                f"{self.size - 1}, and call it only on those"
            )

    def stages(self, device: torch.device) -> bool:
        """Return whether messages of ``device`` travel from the host's memory, to which they are copied first."""
        return False

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in ascending order; nodes are in the order of their first ranks.

        Ranks of a node reach each other faster than other ranks.
        """
        return self._nodes or (tuple(range(self.size)),)

    def _group_by_node(self, names: Sequence[object]) -> None:
        """Note the name of every rank's node. Without this call all ranks are on one node."""
        found: dict[object, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        self._nodes = tuple(map(tuple, found.values()))

    def barrier(self) -> None:
        """Return when every rank has called it."""
        mine = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self.all_gather(mine, torch.empty(self.size, 1, dtype=torch.uint8, device="cpu"))

    def scratch(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        """Return an uninitialised (nbytes,) uint8 tensor, for the current stream.

        It is valid until the next call with the same ``name`` on that stream: whatever other streams do with it, the
        current one must have waited for. The transport keeps the memory. New memory would cost a page fault for every
        4 KiB of every message on the CPU, and a search of the allocator's lists on a device.
        """
        # Work on one stream comes after what was queued before it, so only there the memory is free again.
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        kept, key = self.__dict__.setdefault("_workspaces", {}), (name, device, stream)
        if stream is not None and torch.cuda.is_current_stream_capturing():
            kept = {}  # memory that belongs to the graph
        if key not in kept or kept[key].numel() < nbytes:
            # A tensor made in inference mode could not be written during training later.
            with torch.inference_mode(False):
                kept[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return cast(Tensor, kept[key][:nbytes])

    @contextmanager
    def doing(self, purpose: str, why: str = "") -> Iterator[None]:
        """Let the calls of the block have this ``purpose`` and ``why``: they pair with no call that is for another."""
        before, self.purpose, self.why = (self.purpose, self.why), purpose, why
        try:
            yield
        finally:
            self.purpose, self.why = before

    def agree(self, what: str, *facts: object, why: str = "") -> None:
        """Check that ``facts`` (see ``wire.digest``) and the wire version are equal on all ranks.

        Call it before anything depends on them. ``why`` says what led this rank to the call; a rank that makes another
        call instead reads it in its error.

        Raises:
            PlanMismatch: they differ. Every rank raises it; it names the ranks that differ and ``what``.
        """
        with self.doing(f"an agreement on {what}", why):
            every = self.all_gather_bytes(digest(*facts))
        differ = [rank for rank in range(self.size) if every[rank] != every[0]]
        if differ:
            hashes = ", ".join(f"rank {rank}: {each.hex()[:12]}" for rank, each in enumerate(every))
            raise PlanMismatch(
                f"{what} differs over ranks (this is rank {self.rank}): {differ} differ from rank 0 ({hashes}); give "
                "every rank the same model, options and plan, and the same version of fusionlayer",
                ranks=differ,
            )
