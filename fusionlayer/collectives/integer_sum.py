"""``integer_sum``: the owner of each piece adds all ranks' codes as integers; all ranks decode the sums."""

from __future__ import annotations

from torch import Tensor

from ..base.seeds import derive_seed
from ..codecs import Codec, HomomorphicCodec
from ..observe.timeline import here
from ..transport import Transport
from ._base import check_pair, collective, split_evenly

LARGEST = 30
"""The largest integer that a code of THC's table stands for."""


def _takes(codec: Codec, size: int) -> bool:
    """Return whether codes can be added; raise ``ConfigError`` if this many ranks could overflow every width."""
    return isinstance(codec, HomomorphicCodec) and codec.sum_bytes(codec.block, size) > 0


@collective(
    "integer_sum",
    takes=_takes,
    because="adds codes as integers",
    # Two ranks quantise each value once by any collective, and sums take more bytes than codes.
    suits=lambda size: 2 < size <= 0xFFFF // LARGEST,
)
def integer_sum(
    x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None
) -> None:
    """Sum in two exchanges with one quantisation of each value, whatever the number of ranks (THC, NSDI 2024).

    1. Agree: the codec agrees over ranks, so that a code stands for the same integer on all of them.
    2. Encode: piece j of ``x`` becomes the message for rank j.
    3. All-to-all: rank j gets every rank's message for piece j.
    4. Add: rank j adds their integers exactly, in a width that the number of ranks cannot overflow.
    5. All-gather: every rank gets every sum and decodes it once.

    Owners decode nothing and round nothing, so a rank's residual keeps everything that was lost of its values. Each
    rank sends (size - 1) / size of a message, and as many integers of 8, 12 or 16 bits.
    """
    check_pair("integer_sum", codec, transport.size)
    assert isinstance(codec, HomomorphicCodec)
    rank, size, numel = transport.rank, transport.size, x.numel()
    chunk = split_evenly(numel, size, codec.block)
    capacity, nbytes = codec.wire(chunk, x.dtype).capacity, codec.sum_bytes(chunk, size)
    agreed = codec.agree(x, transport, seed=seed, residual=residual)

    outgoing = transport.scratch("outgoing 0", size * capacity, x.device).view(size, capacity)
    incoming = transport.scratch("incoming 0", size * capacity, x.device).view(size, capacity)
    agreed.encode_chunks(x, outgoing, chunk, seed=derive_seed(seed, rank), residual=residual)
    transport.all_to_all(outgoing, incoming)
    mine = min(numel, (rank + 1) * chunk) - min(numel, rank * chunk)
    total = transport.scratch("sum", nbytes, x.device)
    if mine:
        with here.doing("fusionlayer: recode"):
            agreed.add_codes(incoming, total, mine, x.dtype)
    totals = transport.scratch("sums", size * nbytes, x.device).view(size, nbytes)
    transport.all_gather(total, totals)
    with here.doing("fusionlayer: decode"):
        agreed.decode_sums(totals, x, chunk, size)
