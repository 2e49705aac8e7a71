"""``one_shot``: every rank sends its whole message to every other rank and sums all messages itself."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..base.seeds import derive_seed
from ..codecs import AgreeingCodec, Codec
from ..transport import Transport
from ._base import collective
from ._pieces import IN_FLIGHT, Piece, cut, pipeline


@collective("one_shot", encloses=True)
def one_shot(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    piece: int | None = None,
    enclosed: Tensor | None = None,
) -> None:
    """Sum by an all-gather of codes and a local sum in rank order: one quantisation and one round trip.

    Each rank sends size - 1 times the whole message. With two ranks these are as many bytes as in ``two_shot``, with
    more ranks far more. So this is for two ranks and for small tensors.

    With ``out`` (n,) the sum goes there and ``x`` stays. With ``piece`` this many elements are sent at a time, and the
    next ones are encoded meanwhile. ``encloses`` describes ``enclosed``.
    """
    if isinstance(codec, AgreeingCodec):
        codec = codec.agree(x, transport, seed=seed, residual=residual)
    out = x if out is None else out
    rank, size = transport.rank, transport.size
    extra = 0 if enclosed is None else enclosed.size(1)

    def run(index: int, part: slice) -> Piece:
        numel = part.stop - part.start
        capacity = codec.wire(numel, x.dtype).capacity
        nbytes = capacity + extra
        every = transport.scratch(f"incoming {index % IN_FLIGHT}", size * nbytes, x.device).view(size, nbytes)
        messages = every
        if enclosed is not None:
            messages, rows = every[:, :capacity], every[:, capacity:]
            rows[rank].copy_(enclosed[rank])
        codec.encode_chunks(
            x[part],
            messages[rank : rank + 1],
            numel,
            seed=derive_seed(seed, rank),
            offset=part.start,
            residual=None if residual is None else residual[part],
        )
        yield partial(transport.all_gather, every[rank], every)
        codec.decode_sum(messages, out[part])
        if enclosed is not None:
            enclosed.copy_(rows)

    if piece is None:
        for exchange in run(0, slice(0, x.numel())):
            exchange()
        return
    parts = cut(x.numel(), piece, codec.block)
    pipeline([run(index, part) for index, part in enumerate(parts)], transport, x.device)
