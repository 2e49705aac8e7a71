"""What a transport is: it moves bytes and sums dense tensors; it knows nothing of gradients, codecs or plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from ..errors import ConfigError, PlanMismatch
from ..wire import digest

__all__ = ["Transport"]

# Largest values of so few bytes go to all ranks at once: one exchange instead of two.
_WHOLE_BYTES = 1 << 12


class Transport(ABC):
    """One rank's end of a group of ranks.

    One thread at a time may use a transport, and every rank must make the same calls in the same order; a second thread
    takes a ``duplicate``. Calls return when the result may be used on the calling thread (CPU) or the current stream
    (CUDA). Tensors are contiguous.

    Every call may raise ``TransportError`` (lost, stopped or late peer); the transport is closed by then, on this rank
    at once and on the others at their next call.

    Attributes:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        timeout: seconds that a call may wait for its peers.
        bytes_sent: payload bytes that this rank has sent, dense all-reduce counted as a ring: 2 (size - 1) / size, and
            broadcast as (size - 1) at its root.
        sequence: number of calls of all ranks made so far; send and recv, which two ranks make, are not counted.
    """

    rank: int
    size: int
    timeout: float
    bytes_sent: int = 0
    sequence: int = 0
    _nodes: tuple[tuple[int, ...], ...] | None = None

    @abstractmethod
    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> None:
        """Send ``sends[j]`` to rank j and receive ``recvs[j]`` from rank j, all at once, both directions busy.

        ``size`` tensors of uint8 each, any lengths, none of them overlapping a receive buffer; ``recvs[j]`` here is as
        long as ``sends[rank]`` on rank j. The entry of this rank itself is copied. The same tensor may stand in
        ``sends`` more than once.
        """

    @abstractmethod
    def all_reduce(self, x: Tensor) -> None:
        """Replace ``x`` by its sum over ranks; the same bits on every rank. Any shape; floats or integers."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int) -> None:
        """Replace ``x`` by rank ``root``'s. Any shape and dtype."""

    @abstractmethod
    def send(self, x: Tensor, to: int, tag: int = 0) -> None:
        """Send ``x`` to rank ``to``; returns when ``x`` may be changed. Pairs with one ``recv`` of the same tag."""

    @abstractmethod
    def recv(self, x: Tensor, source: int, tag: int = 0) -> None:
        """Receive into ``x`` what rank ``source`` sends with this tag; the same number of bytes."""

    @abstractmethod
    def duplicate(self) -> Transport:
        """Return a transport over the same ranks whose traffic never meets this one's. All ranks call it together."""

    @abstractmethod
    def subset(self, ranks: Sequence[int]) -> Transport:
        """Return a transport over some of the ranks, this one among them, ranked in the order given.

        Those ranks call it together, with the same ``ranks``; the others have no part in it.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the group up; pending and later calls raise. Never waits for other ranks. Twice is once."""

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Fill ``out`` (size, n) uint8 with every rank's ``x`` (n,), in rank order."""
        self.exchange([x] * self.size, list(out.unbind(0)))

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """Send row j of ``x`` (size, n) uint8 to rank j; row j of ``out`` (size, n) comes from rank j."""
        self.exchange(list(x.unbind(0)), list(out.unbind(0)))

    def all_reduce_max(self, x: Tensor) -> None:
        """Replace ``x`` (n,) by its largest value over ranks, place by place; a NaN wins. Floats or integers."""
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

    def _check_member(self, ranks: Sequence[int]) -> None:
        """Refuse what ``subset`` cannot be made of."""
        if len(set(ranks)) != len(ranks) or self.rank not in ranks or not all(0 <= r < self.size for r in ranks):
            raise ConfigError(
                f"subset {list(ranks)} on rank {self.rank} of {self.size}; give different ranks from 0 to "
                f"{self.size - 1}, and call it only on those"
            )

    def _node_key(self) -> bytes:
        """Return 8 bytes that are equal on ranks of one node, and on no others; by default all are of one."""
        return bytes(8)

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in ascending order, nodes in the order of their first ranks.

        Ranks of a node reach each other faster than others. The first use is one exchange; all ranks make it together.
        """
        if self._nodes is None:
            mine = torch.frombuffer(bytearray(self._node_key()), dtype=torch.uint8)
            every = torch.empty(self.size, mine.numel(), dtype=torch.uint8)
            self.all_gather(mine, every)
            found: dict[bytes, list[int]] = {}
            for rank, key in enumerate(every):
                found.setdefault(key.numpy().tobytes(), []).append(rank)
            self._nodes = tuple(tuple(ranks) for ranks in found.values())
        return self._nodes

    def barrier(self) -> None:
        """Return when every rank has called it."""
        mine = torch.zeros(1, dtype=torch.uint8)
        self.all_gather(mine, torch.empty(self.size, 1, dtype=torch.uint8))

    def scratch(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        """Return (nbytes,) uint8, not initialised, that is the caller's until the next call with the same ``name``.

        On the CPU the memory is kept, which saves a page fault for every 4 KiB of every message.
        """
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        kept = self.__dict__.setdefault("_workspaces", {})
        if name not in kept or kept[name].numel() < nbytes:
            with torch.inference_mode(False):  # what is made for an evaluation serves training after it
                kept[name] = torch.empty(nbytes, dtype=torch.uint8)
        return cast(Tensor, kept[name][:nbytes])

    def agree(self, what: str, *facts: object) -> None:
        """Compare ``facts`` (see ``wire.digest``) and the wire version over ranks, before anything depends on them.

        Raises:
            PlanMismatch: on every rank, if any differ; it names the ranks and ``what``.
        """
        mine = torch.frombuffer(bytearray(digest(*facts)), dtype=torch.uint8)
        every = torch.empty(self.size, mine.numel(), dtype=torch.uint8)
        self.all_gather(mine, every)
        differ = [rank for rank in range(self.size) if not torch.equal(every[rank], every[0])]
        if differ:
            hashes = ", ".join(f"rank {rank}: {bytes(every[rank].tolist()).hex()[:12]}" for rank in range(self.size))
            raise PlanMismatch(
                f"{what} differs over ranks (this is rank {self.rank}): {differ} differ from rank 0 ({hashes}); give "
                "every rank the same model, options and plan, and the same version of fusionlayer",
                ranks=differ,
            )
