"""``one_shot``: every rank sends its whole message to every other and sums what it has."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..codecs import Codec
from ..seeds import derive_seed
from ..transport import Transport
from ._base import collective
from ._pieces import IN_FLIGHT, Piece, cut, pipeline

__all__ = ["one_shot"]


@collective("one_shot")
def one_shot(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    piece: int | None = None,
) -> None:
    """All-gather of codes, local sum in rank order: one quantisation and one round trip.

    Each rank sends (size - 1) times the whole message: with two ranks the same bytes as ``two_shot``, with more of them
    many more, so this is for two ranks and for small tensors.

    With ``out`` (n,) the sum goes there and ``x`` stays; with ``piece`` so many elements travel at a time, and while
    they do the next ones are encoded.
    """
    codec = codec.agree(x, transport, seed=seed, residual=residual)
    out = x if out is None else out

    def run(index: int, part: slice) -> Piece:
        capacity = codec.wire(part.stop - part.start, x.dtype).capacity
        slot = index % IN_FLIGHT
        mine = transport.scratch(f"outgoing {slot}", capacity, x.device)
        every = transport.scratch(f"incoming {slot}", transport.size * capacity, x.device)
        every = every.view(transport.size, capacity)
        codec.encode(
            x[part],
            mine,
            seed=derive_seed(seed, transport.rank),
            offset=part.start,
            residual=None if residual is None else residual[part],
        )
        yield partial(transport.all_gather, mine, every)
        codec.decode_sum(every, out[part])

    parts = cut(x.numel(), piece, codec.block)
    pipeline([run(index, part) for index, part in enumerate(parts)], transport, x.device)
