"""``two_shot``: reduce-scatter and all-gather of codes, each in one exchange."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..base.seeds import derive_seed
from ..codecs import AgreeingCodec, Codec, TransformCodec
from ..transport import Transport
from ._base import collective, split_evenly
from ._one_launch import sum_in_one_launch
from ._pieces import IN_FLIGHT, Piece, cut, pipeline


@collective("two_shot", encloses=True)
def two_shot(
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
    """Sum in two exchanges, with two quantisations of each value regardless of the number of ranks.

    1. Encode: piece j of ``x`` becomes the message for rank j.
    2. All-to-all: rank j gets every rank's message for piece j.
    3. Recode: rank j decodes them, sums them in rank order in f32 and encodes the sum.
    4. All-gather: every rank gets every sum.
    5. Decode: all ranks, owners included, decode the same bytes.

    Each rank sends 2 (size - 1) / size of a message of the whole tensor. The owner of a piece keeps the loss of step 3
    in its ``residual``, so error feedback covers both quantisations. Without ``residual`` and headers, step 3 sums
    transformed values, so that no message is transformed back before step 5.

    If the setting ``peer_memory_mb`` allows it, GPUs of one host that reach each other's memory do all of it in one
    launch. The result is the same.

    With ``out`` (n,) the sum goes there and ``x`` stays. With ``piece`` this many elements pass the steps at a time,
    while others are encoded, recoded or decoded (TACO, section 4.4.2). Blocks stay the same, so the result stays the
    same with codecs that quantise by blocks and round to nearest. ``encloses`` describes ``enclosed``.
    """
    if isinstance(codec, AgreeingCodec):
        codec = codec.agree(x, transport, seed=seed, residual=residual)
    rank, size = transport.rank, transport.size
    out = x if out is None else out
    if transport.peer_bytes and sum_in_one_launch(x, codec, transport, seed=seed, residual=residual, out=out):
        return
    extra = 0 if enclosed is None else enclosed.size(1)
    sums, run_length = (codec, 1) if residual is not None else summing(codec)

    def run(index: int, part: slice) -> Piece:
        numel = part.stop - part.start
        chunk = split_evenly(numel, size, codec.block)
        capacity = codec.wire(chunk, x.dtype).capacity
        mine = slice(min(part.start + rank * chunk, part.stop), min(part.start + (rank + 1) * chunk, part.stop))
        slot, nbytes = index % IN_FLIGHT, capacity + extra
        sends = outgoing = transport.scratch(f"outgoing {slot}", size * nbytes, x.device).view(size, nbytes)
        recvs = incoming = transport.scratch(f"incoming {slot}", size * nbytes, x.device).view(size, nbytes)
        if enclosed is not None:
            sends[:, capacity:] = enclosed[rank]
            outgoing, incoming = sends[:, :capacity], recvs[:, :capacity]
        codec.encode_chunks(
            x[part],
            outgoing,
            chunk,
            seed=derive_seed(seed, rank, 0),
            offset=part.start,
            residual=None if residual is None else residual[part],
        )
        yield partial(transport.all_to_all, sends, recvs)
        sums.recode(
            incoming,
            outgoing[rank],
            -(-(mine.stop - mine.start) // run_length) * run_length,
            dtype=x.dtype,
            seed=derive_seed(seed, rank, 1),
            offset=mine.start,
            residual=None if residual is None else residual[mine],
        )
        yield partial(transport.all_gather, sends[rank], recvs)
        codec.decode_chunks(incoming, out[part], chunk)
        if enclosed is not None:
            enclosed.copy_(recvs[:, capacity:])

    if piece is None:
        for exchange in run(0, slice(0, x.numel())):
            exchange()
        return
    parts = cut(x.numel(), piece, size * codec.block)
    pipeline([run(index, part) for index, part in enumerate(parts)], transport, x.device)


def summing(codec: Codec) -> tuple[Codec, int]:
    """Return the codec that sums messages of ``codec`` without error feedback, and the unit of lengths."""
    if not codec.header and isinstance(codec, TransformCodec):
        return codec.untransformed, codec.transform_run
    return codec, 1
