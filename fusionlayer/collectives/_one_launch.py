"""Sums over the ranks of one host in one launch on each: kernels write into the memory of the other ranks' devices."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..base.libraries import MAX_PEERS, Peers
from ..base.seeds import derive_seed
from ..codecs import Codec, NativeCodec
from ..transport import Transport
from ..transport.links.peer_memory import OutOfReach, PeerMemory
from ._base import split_evenly
from ._pieces import cut

_logger = logging.getLogger("fusionlayer")


class LaunchMemory:
    """One rank's memory for such sums, and the memory of all other ranks. All ranks make it together.

    Attributes:
        peers: arguments of a launch.
        is_whole: whether every rank reaches the memory of all; the same on all ranks. Without it there are no peers.
    """

    def __init__(self, transport: Transport, device: torch.device, nbytes: int, warps: int) -> None:
        try:
            self._memory = PeerMemory(transport.rank, device, nbytes, lambda mine: _gather(transport, mine))
        except OutOfReach as problem:
            self.is_whole = False
            _logger.warning("sums are sent by NCCL, as a rank cannot reach the memory of the others: %s", problem)
            return
        self.is_whole = True
        least = torch.tensor([-warps], device="cpu")
        transport.all_reduce_max(least)
        memory = (ctypes.c_void_p * MAX_PEERS)(*[each.data_ptr() for each in self._memory.every])
        self.peers = Peers(transport.rank, transport.size, -int(least), nbytes, memory, None)


def sum_in_one_launch(
    x: Tensor, codec: Codec, transport: Transport, *, seed: int, residual: Tensor | None, out: Tensor
) -> bool:
    """Sum as ``two_shot`` does, with its arguments, if that can be one launch; return whether, the same on all ranks.

    The bits are those of ``two_shot``. A tensor for which the memory is too small is summed in pieces.
    """
    if not transport.can_launch(x.device) or not isinstance(codec, NativeCodec):
        return False
    # No kernel does a codec's work outside its core's verbs, such as a header or scales that ranks agree on.
    if codec.header or type(codec)._encode_rows is not NativeCodec._encode_rows:
        return False
    rank, size = transport.rank, transport.size
    if size > MAX_PEERS or len(transport.nodes) > 1:
        return False
    # One thread at a time uses a transport, and its objects end with it.
    known: dict[torch.device, LaunchMemory] = transport.__dict__.setdefault("_peer_memory", {})
    if x.device not in known:
        known[x.device] = LaunchMemory(transport, x.device, transport.peer_bytes, native.most_warps(x.device))
    memory = known[x.device]
    piece = _fitting(x, codec, memory) if memory.is_whole else None
    if piece is None:
        return False
    for part in cut(x.numel(), piece, size * codec.block):
        numel = part.stop - part.start
        chunk = split_evenly(numel, size, codec.block)
        spec = codec.core_spec(numel, x.dtype, derive_seed(seed, rank, 0), part.start)
        kept = None if residual is None else residual[part]
        given = spec, derive_seed(seed, rank, 1), chunk, x[part], out[part], kept, memory.peers

        def queue(stop: Tensor, given: tuple[Any, ...] = given) -> None:
            memory.peers.stop = stop.data_ptr()
            native.two_shot(*given)

        transport.launch(f"a sum in one launch of {numel} x {x.dtype} by {codec}", x.device, queue)
        transport.bytes_sent += 2 * (size - 1) * codec.wire(chunk, x.dtype).capacity
    return True


def _fitting(x: Tensor, codec: NativeCodec, memory: LaunchMemory) -> int | None:
    """Return how many elements of ``x`` the memory has room for at a time; None: there is no such sum of this codec."""
    peers, numel = memory.peers, max(1, x.numel())
    spec = codec.core_spec(x.numel(), x.dtype)
    while True:
        chunk = split_evenly(numel, peers.size, codec.block)
        needed = native.two_shot_bytes(spec, chunk, peers.size, peers.warps)
        if needed < 0 or needed > peers.bytes and chunk == codec.block:
            return None
        if needed <= peers.bytes:
            return numel
        numel = -(-numel // 2)
        spec.numel = numel


def _gather(transport: Transport, mine: bytes) -> list[bytes]:
    """Return the values of all ranks, in rank order."""
    lengths = [int.from_bytes(each, "little") for each in transport.all_gather_bytes(len(mine).to_bytes(8, "little"))]
    every = transport.all_gather_bytes(mine.ljust(1 + max(lengths), b"\0"))
    return [each[:length] for each, length in zip(every, lengths, strict=True)]
