"""Checksums of messages: which messages carry one, how it is sent with a message, and how it is compared.

All that leaves a process passes a link: messages of codecs, dense sums, factors, sizes, agreements. So links check
messages, and the layers above need not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import native
from .base import DamagedMessage

_Checksum = ctypes.c_uint32
_BYTES = ctypes.sizeof(_Checksum)


def checked_peers(asked: bool | None, rank: int, nodes: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the ranks to which, and from which, messages of ``rank`` carry a checksum.

    Args:
        asked: the setting ``checksum``. None: between ranks of different nodes. Between ranks of one node messages
            are sent through its memory, where they come to no harm.
        rank: this rank.
        nodes: the ranks of each node.
    """
    if asked is False:
        return frozenset()
    return frozenset(peer for node in nodes if asked or rank not in node for peer in node if peer != rank)


def seal(data: Tensor, start: int) -> Tensor:
    """Return the checksum of all of ``data`` (n,) uint8, followed by the bytes of ``data`` from ``start`` on."""
    sealed = room(data, start)
    address = sealed.data_ptr()
    # Two calls into C take a third of the time of slices, and every small message passes here.
    ctypes.memmove(address + _BYTES, data.data_ptr() + start, data.numel() - start)
    _Checksum.from_address(address).value = native.crc32c(data)
    return sealed


def room(data: Tensor, start: int) -> Tensor:
    """Return an uninitialised tensor for what ``seal`` makes of the sender's ``data``."""
    return torch.empty(_BYTES + data.numel() - start, dtype=torch.uint8, device="cpu")


def compare(sealed: Tensor, data: Tensor, start: int, sender: int, receiver: int) -> None:
    """Copy ``sealed`` to ``data`` from ``start`` on; raise ``DamagedMessage`` if the checksum of ``data`` is wrong."""
    address = sealed.data_ptr()
    ctypes.memmove(data.data_ptr() + start, address + _BYTES, data.numel() - start)
    if _Checksum.from_address(address).value != native.crc32c(data):
        raise DamagedMessage(sender, receiver, data.numel())
