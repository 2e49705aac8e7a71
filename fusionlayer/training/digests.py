"""Digests of tensors: eight bytes that change with any bit, computed at little cost on the tensors' devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import native
from .parameters import local_part

_SHARE_BYTES = 1 << 20
"""Bytes that are digested in a step, at least: a step pays for each call, so small models are done in few steps."""

_GPU_SHARE_BYTES = 1 << 26
"""The same on a GPU, where a call takes as long as hundreds of kilobytes. So much memory is needed for a moment."""


class Digest:
    """Eight bytes that change with any bit of the tensors that were added."""

    def __init__(self) -> None:
        self._crc = 0
        self._sums: dict[torch.device, Tensor] = {}
        self._events: list[torch.cuda.Event] = []

    def add(self, pieces: Iterable[Tensor]) -> None:
        """Continue with flat tensors; on a GPU without waiting for it, and with few kernels for many small tensors."""
        waiting: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for piece in pieces:
            if piece.device.type == _BY_CRC:
                self._crc = native.crc32c(piece, self._crc)
            elif piece.numel():
                bits = piece.view(_INTEGERS[min(piece.element_size(), 4)])
                together = waiting[bits.device, bits.dtype]
                together.append(bits)
                if sum(each.nbytes for each in together) >= _GPU_SHARE_BYTES:
                    self._add_bits(together)
                    together.clear()
        for together in waiting.values():
            if together:
                self._add_bits(together)

    def _add_bits(self, bits: list[Tensor]) -> None:
        total = sum_of_bits(bits[0] if len(bits) == 1 else torch.cat(bits))
        before = self._sums.get(total.device)
        self._sums[total.device] = total if before is None else before * _PRIME + total

    def seal(self) -> None:
        """End adding: ``read`` may be called on another thread now."""
        for device in self._sums:
            if device.type == "cuda":
                self._events.append(torch.cuda.current_stream(device).record_event())

    def read(self) -> int:
        """Return the digest; waits for the GPU."""
        for event in self._events:
            event.synchronize()
        value = self._crc
        for total in self._sums.values():
            value = (value * _PRIME + int(total)) % (1 << 64)
        return value


_BY_CRC = "cpu"
_PRIME = 1_000_003
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SUMMED_AT_A_TIME = 1 << 22


def sum_of_bits(bits: Tensor) -> Tensor:
    """Return a sum () int64 of integers (n,) of at most 32 bits, each by an odd factor of its own.

    Sums wrap around at 64 bits. An odd factor keeps every bit: one flipped bit always changes the sum.
    """
    factors = torch.arange(1, 2 * min(bits.numel(), _SUMMED_AT_A_TIME), 2, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(_SUMMED_AT_A_TIME):
        total = total * _PRIME + (part * factors[: part.numel()]).sum()
    return total


def digest_of(tensors: Iterable[Tensor]) -> int:
    """Return the digest of tensors together; waits for everything that is queued on their GPUs."""
    tensors = [*tensors]
    await_gpus(tensors)
    whole = Digest()
    whole.add(flat(x) for x in tensors)
    whole.seal()
    return whole.read()


def flat(x: Tensor) -> Tensor:
    """Return the elements of ``x``, or of this rank's part of a DTensor; a copy if they are not contiguous."""
    return local_part(x.detach()).contiguous().view(-1)


def await_gpus(tensors: Iterable[Tensor]) -> None:
    """Wait for everything that is queued on GPUs: other threads, which have other streams, may use the tensors then."""
    for device in {x.device for x in tensors if x.is_cuda}:
        torch.cuda.synchronize(device)


def cut(tensors: Iterable[Tensor], steps: int) -> list[list[tuple[Tensor, slice]]]:
    """Return ``steps`` lists that have every element of ``tensors`` once, in shares of about equally many bytes."""
    parts = [(x, local_part(x.detach())) for x in tensors]
    least = _GPU_SHARE_BYTES if any(part.is_cuda for _, part in parts) else _SHARE_BYTES
    share = max(least, -(-sum(part.nbytes for _, part in parts) // steps))
    shares: list[list[tuple[Tensor, slice]]] = [[]]
    room = share
    for x, part in parts:
        start, stop = 0, part.numel()
        while start < stop:
            if room < part.element_size():
                shares.append([])
                room = share
            # For a tensor that is not contiguous each share would copy all, so it is sent whole.
            end = min(stop, start + room // part.element_size()) if part.is_contiguous() and steps > 1 else stop
            shares[-1].append((x, slice(start, end)))
            room -= (end - start) * part.element_size()
            start = end
    while len(shares) > steps:
        shares[-2] += shares.pop()
    return shares + [[] for _ in range(steps - len(shares))]
