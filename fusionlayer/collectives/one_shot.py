"""``one_shot``: every rank sends its whole message to every other and sums what it has."""

from __future__ import annotations

from torch import Tensor

from ..codecs import Codec
from ..seeds import derive_seed
from ..transport import Transport
from ._base import collective

__all__ = ["one_shot"]


@collective("one_shot")
def one_shot(x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None) -> None:
    """All-gather of codes, local sum in rank order: one quantisation and one round trip.

    Each rank sends (size - 1) times the whole message: with two ranks the same bytes as ``two_shot``, with more of them
    many more, so this is for two ranks and for small tensors.
    """
    codec = codec.agree(x, transport)
    capacity = codec.wire(x.numel(), x.dtype).capacity
    mine = transport.scratch("outgoing", capacity, x.device)
    every = transport.scratch("incoming", transport.size * capacity, x.device).view(transport.size, capacity)
    codec.encode(x, mine, seed=derive_seed(seed, transport.rank), residual=residual)
    transport.all_gather(mine, every)
    codec.decode_sum(every, x)
