"""A link that needs only an exchange of bytes from its library. It builds sums and broadcasts from exchanges."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from .._sum import sum_in_rank_order
from .base import Link, LinkMessage, peers

# Below this length a sum is one exchange of the whole tensor. From this length on it is two exchanges of shares.
WHOLE_BELOW_BYTES = 8 << 10

# Added to the key of a call's second exchange, so that its messages cannot match those of the first.
_SECOND_STEP = 1 << 32


class ExchangeLink(Link):
    """One rank's connections for tensors in host memory. Subclasses implement ``exchange`` and ``close``.

    Args:
        rank: this rank.
        size: number of ranks.
        timeout: seconds that a call may take.
        checked: the ranks to which, and from which, messages carry a checksum.
    """

    device = torch.device("cpu")

    def __init__(self, rank: int, size: int, timeout: float, checked: frozenset[int]) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._checked = checked

    @abstractmethod
    def exchange(
        self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage], deadline: float | None = None
    ) -> None:
        """Send and receive all messages at once; those to and from ``_checked`` ranks with a checksum, and compare it.

        ``deadline`` is a time of the monotonic clock; None means the time-out from now.
        """

    def all_reduce(self, x: Tensor, key: int) -> None:
        deadline = self._deadline()
        if x.nbytes < WHOLE_BELOW_BYTES:
            every = list(x.new_empty(self._size, x.numel()).unbind(0))
            every[self._rank] = x
            self._all_gather(x, every, key, deadline)
            sum_in_rank_order(every, x)
        else:
            shares = self._shares(x)
            mine = shares[self._rank]
            parts = list(mine.new_empty(self._size, mine.numel()).unbind(0))
            self._swap(shares, parts, key, deadline)
            parts[self._rank] = mine
            sum_in_rank_order(parts, mine)
            self._all_gather(mine, shares, key + _SECOND_STEP, deadline)

    def broadcast(self, x: Tensor, root: int, key: int) -> None:
        deadline = self._deadline()
        nothing = x[:0]
        whole = self._size == 2 or x.numel() < WHOLE_BELOW_BYTES
        shares = [x] * self._size if whole else self._shares(x)
        mine = shares[self._rank]
        self._swap(
            shares if self._rank == root else [nothing] * self._size,
            [mine if rank == root else nothing for rank in range(self._size)],
            key,
            deadline,
        )
        if not whole:
            self._all_gather(mine, shares, key + _SECOND_STEP, deadline)

    def _swap(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], key: int, deadline: float) -> None:
        """Send ``sends[j]`` to rank j and receive ``recvs[j]`` from it. The entries of this rank are not touched."""
        to, source = peers(self._rank, tuple(map(Tensor.numel, sends)), tuple(map(Tensor.numel, recvs)))
        self.exchange(
            [LinkMessage(peer, sends[peer].view(torch.uint8), key) for peer in to],
            [LinkMessage(peer, recvs[peer].view(torch.uint8), key) for peer in source],
            deadline,
        )

    def _all_gather(self, mine: Tensor, every: Sequence[Tensor], key: int, deadline: float) -> None:
        self._swap([mine] * self._size, every, key, deadline)

    def _shares(self, x: Tensor) -> list[Tensor]:
        """Return ``x`` (n,) cut into one share per rank."""
        bounds = [x.numel() * rank // self._size for rank in range(self._size + 1)]
        return [x[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout
