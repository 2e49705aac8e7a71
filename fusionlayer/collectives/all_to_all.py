"""``all_to_all``: uneven messages from every rank to every other, as expert parallelism needs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.seeds import derive_seed
from ..codecs import Codec
from ..native.wire import DTYPE_CODES
from ..transport import Transport
from ..transport.composed import by_rank
from . import zipped


def all_to_all(
    x: Tensor,
    out: Tensor,
    sends: Sequence[int],
    recvs: Sequence[int],
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
) -> None:
    """Send ``sends[r]`` elements of ``x`` to rank r, and receive ``recvs[r]`` from it, both in rank order.

    Elements that are sent are quantised once. Elements that stay on this rank are copied unchanged.

    Args:
        x: flat and contiguous; f32, bf16 or f16, with a lossless codec of any type.
        out: flat and contiguous, of the type of ``x``.
        sends: elements for each rank, zeros allowed; they add up to the length of ``x``.
        recvs: elements from each rank; they add up to the length of ``out``.
        codec: the codec of the messages, the same on all ranks.
        transport: the ranks.
        seed: the seed of stochastic rounding; the same on all ranks.
    """
    if codec.zips and x.dtype in DTYPE_CODES:
        zipped.all_to_all(x, out, sends, recvs, codec, transport)
        return
    rank = transport.rank
    parts, pieces = x.split(list(sends)), out.split(list(recvs))
    if codec.lossless:
        sends, recvs = ([part.view(torch.uint8) for part in side] for side in (parts, pieces))
        transport.exchange(by_rank(sends, recvs))
        return
    outgoing = _messages("outgoing", parts, codec, transport)
    incoming = _messages("incoming", pieces, codec, transport)
    for to, (part, message) in enumerate(zip(parts, outgoing, strict=True)):
        if to != rank:
            codec.encode(part, message, seed=derive_seed(seed, rank, to))
    transport.exchange(by_rank(outgoing, incoming))
    for source, (message, piece) in enumerate(zip(incoming, pieces, strict=True)):
        if source != rank:
            codec.decode(message, piece)
    pieces[rank].copy_(parts[rank])


def _messages(name: str, parts: Sequence[Tensor], codec: Codec, transport: Transport) -> list[Tensor]:
    """Return room for the message of each part; this rank's own part gets none."""
    sizes = [codec.wire(part.numel(), part.dtype).capacity for part in parts]
    sizes[transport.rank] = 0
    return list(transport.scratch(name, sum(sizes), parts[0].device).split(sizes))
