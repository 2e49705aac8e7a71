"""Calls of a transport that consist of exchanges, and memory for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, repeat
from typing import cast

import torch
from torch import Tensor

from ..base.errors import PlanMismatch
from ..native.wire import digest

# Up to this size all_reduce_max sends whole tensors: less than half as many exchanges.
_WHOLE_BYTES = 1 << 12
# With at most this many ranks, small tensors go to all ranks at once: one round trip instead of log2(size).
_FEW = 8
_COMPLEMENT = bytes(range(255, -1, -1))


def by_rank(sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the messages of an exchange with all ranks: ``sends[r]`` to rank r, ``recvs[r]`` from it."""
    return dict(enumerate(zip(sends, recvs, strict=True)))


class Composed(ABC):
    """The part of a transport that needs nothing but ``exchange``. ``Transport`` describes the attributes."""

    rank: int
    size: int
    purpose: str = ""
    why: str = ""

    @abstractmethod
    def exchange(self, messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Send and receive messages, all at once, both directions busy; every rank calls it, also one without messages.

        Args:
            messages: for each peer the message to it and the room for the message from it, uint8 tensors of any
                lengths. An empty one is not sent, as if the peer were left out. The room has as many bytes as the peer
                sends. No message may overlap a room; one tensor may go to several peers. The message of this rank to
                itself is copied. A rank without messages has an empty one for itself, on the device of the others'.
        """

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Fill ``out`` (size, n) uint8 with every rank's ``x`` (n,), in rank order; ``x`` may be this rank's row."""
        self.exchange(dict(enumerate(zip(repeat(x), out.unbind(0)))))  # noqa: B905 - no end of x

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """Return what each rank passes, in rank order; equally many bytes on all ranks."""
        x = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        out = x.new_empty(self.size, x.numel())
        self.all_gather(x, out)
        return [row.numpy().tobytes() for row in out]

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """Send row j of ``x`` (size, n) uint8 to rank j; row j of ``out`` (size, n) comes from rank j."""
        self.exchange(dict(enumerate(zip(x.unbind(0), out.unbind(0), strict=True))))

    def all_reduce_max(self, x: Tensor) -> None:
        """Replace ``x`` (n,) by its elementwise maximum over ranks; a NaN wins. Floats or integers."""
        if self.size == 1 or not x.numel():
            return
        if x.numel() * x.element_size() <= _WHOLE_BYTES:
            return self.spread(x, torch.maximum)
        bounds = [x.numel() * r // self.size for r in range(self.size + 1)]
        shares = [x[start:stop].view(torch.uint8) for start, stop in pairwise(bounds)]
        every = x.new_empty(self.size, bounds[self.rank + 1] - bounds[self.rank])
        self.exchange(by_rank(shares, [part.view(torch.uint8) for part in every]))
        self.exchange(by_rank([every.amax(0).view(torch.uint8)] * self.size, shares))

    def spread(self, x: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Replace ``x`` (n,), a few KB, by ``combine`` of all ranks' tensors; many ranks send log2(size) messages each.

        Args:
            x: of one length and type on all ranks.
            combine: commutative and associative, and equal tensors do not change by it, as with a maximum. For what all
                ranks know after a round, some have contributed twice.
        """
        if self.size <= _FEW:
            every = x.new_empty(self.size, x.numel())
            self.all_gather(x.view(torch.uint8), every.view(torch.uint8))
            while len(every) > 1:
                half = (len(every) + 1) // 2
                every = combine(every[:half], every[-half:])
            x.copy_(every[0])
            return
        total, distance = x, 1
        while distance < self.size:
            theirs = torch.empty_like(total)
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            mine, room, nothing = total.view(torch.uint8), theirs.view(torch.uint8), x.new_empty(0, dtype=torch.uint8)
            self.exchange({source: (nothing, room), to: (mine, nothing if to != source else room)})
            total, distance = combine(total, theirs), 2 * distance
        x.copy_(total)

    def all_equal(self, mine: bytes, present: bool = True) -> bool:
        """Return whether all ranks that are ``present`` pass the same bytes; all pass equally many."""
        if self.size == 1:
            return True
        # The largest value of each byte, and of 255 minus it: 255 in sum only where all bytes are equal.
        x = torch.frombuffer(bytearray(mine + mine.translate(_COMPLEMENT)), dtype=torch.uint8) * present
        self.spread(x, torch.maximum)
        least, most = x.view(2, -1)
        return bool((least + most == 255).all()) or not x.any()

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.spread(torch.zeros(1, dtype=torch.uint8, device="cpu"), torch.maximum)

    def scratch(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        """Return an uninitialised (nbytes,) uint8 tensor, for the current stream.

        It is valid until the next call with the same ``name`` on that stream: the current stream must have waited for
        all uses on other streams. The transport keeps the memory. New memory would cost a page fault for every 4 KiB of
        every message on the CPU, and a search of the allocator's lists on a device.
        """
        # Work on one stream comes after the work queued before it, so only there the memory is free again.
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
            mine = digest(*facts)
            if self.all_equal(mine):
                return
            every = self.all_gather_bytes(mine)
        differ = [rank for rank in range(self.size) if every[rank] != every[0]]
        hashes = ", ".join(f"rank {rank}: {each.hex()[:12]}" for rank, each in enumerate(every))
        raise PlanMismatch(
            f"{what} differs over ranks (this is rank {self.rank}): {differ} differ from rank 0 ({hashes}); give "
            "every rank the same model, options and plan, and the same version of fusionlayer",
            ranks=differ,
        )
