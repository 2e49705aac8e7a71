"""A tensor's memory on a CUDA device, offered to other processes of its host as bytes of a fixed format.

torch would pickle the offer. A process that could write into that message could run code in every rank.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

_NUMBERS = struct.Struct("<qqqqq?")
_LENGTH = struct.Struct("<H")
_MOST_HANDLE = 4096
"""Bytes. CUDA's handle has 64; torch adds what it needs to map memory that grows."""


class DeviceMemory:
    """How processes give each other memory of their devices."""

    @staticmethod
    def share(x: Tensor) -> bytes:
        """Return the offer of ``x`` (n,) uint8, on a device."""
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, facts = reduce_tensor(x)
        if rebuild.__name__ != "rebuild_cuda_tensor":
            raise RuntimeError(f"memory of {x.device} cannot be shared between processes")
        return pack(x.numel(), facts)

    @staticmethod
    def reach(offer: bytes) -> Tensor:
        """Return the memory that another process has offered, (n,) uint8."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        made: Tensor = rebuild_cuda_tensor(*unpack(offer))
        return made


def pack(numel: int, facts: tuple[Any, ...]) -> bytes:
    """Return the bytes of torch's description of a flat tensor's memory."""
    _, _, _, start, _, _, device, handle, nbytes, offset, _, counter, counter_at, event, waits = facts
    texts = b"".join(_LENGTH.pack(len(text)) + text for text in (handle, counter, event))
    if start:
        raise RuntimeError(f"a tensor begins at byte {start} of its memory; only whole memory is shared")
    return _NUMBERS.pack(device, nbytes, offset, numel, counter_at, waits) + texts


def unpack(offer: bytes) -> tuple[Any, ...]:
    """Return the arguments of torch's ``rebuild_cuda_tensor``."""
    try:
        device, nbytes, offset, numel, counter_at, waits = _NUMBERS.unpack_from(offer)
        at, texts = _NUMBERS.size, []
        for _ in range(3):
            (length,) = _LENGTH.unpack_from(offer, at)
            texts.append(offer[at + _LENGTH.size : at + _LENGTH.size + length])
            at += _LENGTH.size + length
    except struct.error as error:
        raise OSError(f"{len(offer)} bytes are no offer of memory") from error
    handle, counter, event = texts
    right = at == len(offer) and all(0 < len(text) <= _MOST_HANDLE for text in (handle, counter))
    if not right or min(device, offset, counter_at) < 0 or not 0 < numel <= nbytes:
        raise OSError(f"{len(offer)} bytes are no offer of memory")
    storage, kind = torch.storage.TypedStorage, torch.uint8
    place = (device, handle, nbytes, offset)
    return (Tensor, (numel,), (1,), 0, storage, kind, *place, False, counter, counter_at, event, waits)
