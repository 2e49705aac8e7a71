"""``gather`` and ``gather_v``: every rank gets the messages that all ranks encoded ahead of fusion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.errors import WireError
from ..codecs import Codec, VariableSizeCodec
from ..transport import Transport
from ..transport.composed import by_rank
from ._base import MessageSpan, gather_collective


@gather_collective("gather")
def gather(payload: Tensor, every: Tensor, messages: Sequence[MessageSpan], codec: Codec, transport: Transport) -> None:
    """All-gather payloads of one fixed size in one round trip; each rank sends size - 1 payloads and no sizes."""
    transport.all_gather(payload, every)


@gather_collective("gather_v")
def gather_v(
    payload: Tensor, every: Tensor, messages: Sequence[MessageSpan], codec: Codec, transport: Transport
) -> None:
    """All-gather only the used bytes of messages, after their sizes: fewer bytes than ``gather``, one more round trip.

    Sparse gradients are gathered like this where their number of elements is not bounded (SAFusion, section 3.1). Here
    it serves to compare with ``gather``.
    """
    compact = [_compact(codec, payload[m.start : m.stop], m) for m in messages]
    mine = torch.tensor([part.numel() for part in compact], device="cpu")
    sizes = torch.empty(transport.size, len(compact), dtype=torch.int64, device="cpu")
    transport.all_gather(mine.view(torch.uint8), sizes.view(torch.uint8))
    # This precedes the allocation, because values from the wire may be anything.
    for rank, lengths in enumerate(sizes.tolist()):
        for m, length in zip(messages, lengths, strict=True):
            if not 0 <= length <= m.stop - m.start:
                raise WireError(f"{codec}: rank {rank} announces {length} bytes for a message of {m.stop - m.start}")
    received = [payload.new_empty(int(row.sum())) for row in sizes]
    transport.exchange(by_rank([torch.cat(compact)] * transport.size, received))
    for row, lengths, data in zip(every, sizes.tolist(), received, strict=True):
        for m, part in zip(messages, data.split(lengths), strict=True):
            _expand(codec, part, row[m.start : m.stop], m)


def _compact(codec: Codec, message: Tensor, span: MessageSpan) -> Tensor:
    return codec.compact(message, span.numel, span.dtype) if isinstance(codec, VariableSizeCodec) else message


def _expand(codec: Codec, data: Tensor, message: Tensor, span: MessageSpan) -> None:
    if isinstance(codec, VariableSizeCodec):
        codec.expand(data, message, span.numel, span.dtype)
    elif data.numel() != message.numel():
        raise WireError(f"{codec}: {data.numel()} bytes for a message of {message.numel()}: it was cut short")
    else:
        message.copy_(data)
