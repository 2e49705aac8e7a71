"""All-gather and reduce-scatter, the halves of an all-reduce, in pipelined pieces, for sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..base.seeds import derive_seed
from ..codecs import AgreeingCodec, ChangeCodec, Codec
from ..native.wire import DTYPE_CODES
from ..transport import Transport
from ..transport._sum import sum_in_rank_order
from . import _levels, two_level, zipped
from ._hops import send_and_receive
from ._pieces import IN_FLIGHT, Piece, cut, pipeline
from .choice import choose, log_once
from .ring import schedule

SUITABLE = 0
"""As a piece: the number of elements that suits the device."""

_ROW = 1 << 20
# Of all rows together, and of rows on a device alone. The host launches kernels for each piece and calls the network's
# library, so pieces are large. TACO found 64 MB best on fast links of GPUs (Fig. 10).
_DEVICE_BYTES = 64 << 20


def _piece(piece: int | None, x: Tensor, rows: int) -> int | None:
    """Return how many elements of each of ``rows`` rows are sent at a time, of the type and device of ``x``."""
    if piece != SUITABLE:
        return piece
    if x.device.type == "cpu":
        return _ROW
    return max(_ROW, _DEVICE_BYTES // (rows * x.element_size()))


def all_gather(
    x: Tensor,
    out: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
    piece: int | None = SUITABLE,
    differences: bool = False,
) -> None:
    """Fill row r of ``out`` (size, n) with rank r's ``x`` (n,): one quantisation, the same bits on every rank.

    This rank's own row passes through the codec too.

    Args:
        x: flat and contiguous, equally long on all ranks; f32, bf16 or f16, with a lossless codec of any type.
        out: contiguous, of the type of ``x``; of any of the three types with a lossy codec.
        codec: the codec of the messages, the same on all ranks.
        transport: the ranks.
        seed: the seed of stochastic rounding; the same on all ranks.
        piece: elements of a row that are sent at a time, while others are encoded or decoded; None: all.
        differences: with a ``ChangeCodec``, send the change of this rank's row of ``out`` to ``x``; all ranks have the
            same rows. With a lossy codec, send ``x``, in f32, minus this rank's row of ``out``, and add the received
            differences to the rows, rounded once. The next difference contains the loss of this one (SDP4Bit, Algorithm
            2).
    """
    piece = _piece(piece, x, transport.size)
    if codec.zips and x.dtype in DTYPE_CODES:
        changes = differences and isinstance(codec, ChangeCodec)
        zipped.all_gather(x, out.view(-1), codec, transport, piece=piece, changes=changes)
        return
    if codec.lossless:
        transport.all_gather(x.view(torch.uint8), out.view(torch.uint8))
        return
    here = _levels.node_grid(transport)
    if here is None:
        codec = _levels.one_level(codec, transport)
    rank, size, own = transport.rank, transport.size, derive_seed(seed, transport.rank)

    def encode(part: slice, mine: Tensor) -> None:
        if differences:
            codec.encode_difference(x[part], out[rank, part], mine, seed=own, offset=part.start)
        else:
            codec.encode(x[part], mine, seed=own, offset=part.start)

    def decode(part: slice, messages: Tensor) -> None:
        if len(parts) == 1 and not differences:
            return codec.decode_chunks(messages, out.view(-1), x.numel(), dtype=x.dtype)
        one = codec.decode_add if differences else codec.decode
        for source, message in enumerate(messages):
            one(message, out[source, part], dtype=x.dtype)

    def run(index: int, part: slice) -> Piece:
        capacity = codec.wire(part.stop - part.start, x.dtype).capacity
        every = transport.scratch(f"incoming {index % IN_FLIGHT}", size * capacity, x.device).view(size, capacity)
        encode(part, every[rank])
        yield partial(transport.all_gather, every[rank], every)
        decode(part, every)

    def run_on(grid: _levels.Grid, index: int, part: slice) -> Iterator[_levels.TwoLevelHop]:
        capacity = codec.wire(part.stop - part.start, x.dtype).capacity
        memory = transport.scratch(f"incoming {_levels.slot_of(index)}", 2 * size * capacity, x.device)
        every, rows = memory.view(-1, capacity).split(size)
        encode(part, every[grid.place])
        yield from _levels.gather(every, transport, grid, _levels.slot_of(index))
        decode(part, grid.by_rank(every, rows))

    parts = cut(x.numel(), piece, codec.block)
    if here is None:
        pipeline([run(index, part) for index, part in enumerate(parts)], transport, x.device)
    else:
        _levels.overlap([run_on(here, index, part) for index, part in enumerate(parts)], transport, x.device)


def reduce_scatter(
    x: Tensor,
    out: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
    piece: int | None = SUITABLE,
    residual: Tensor | None = None,
) -> None:
    """Fill ``out`` (n,) with the sum over ranks of row ``rank`` of their ``x`` (size, n), in rank order in f32.

    One quantisation, or two on several nodes of several ranks. The arguments are ``all_gather``'s; rows are cut into
    pieces. ``out`` may be f32 where ``x`` is not: then the sum is not rounded to the type of ``x``.

    ``residual`` (size * n,) f32 is this rank's error feedback, as for ``AllReduce``; n is a multiple of the codec's
    block. With it there is one level, and this rank's own summand is not quantised.
    """
    size, numel = x.shape
    piece = _piece(piece, x, size)
    if codec.zips and x.dtype in DTYPE_CODES:
        zipped.reduce_scatter(x.view(-1), out, codec, transport, piece=piece)
        return
    if codec.lossless:
        every = torch.empty_like(x)
        transport.all_to_all(x.view(torch.uint8), every.view(torch.uint8))
        sum_in_rank_order(every.unbind(0), out)
        return
    # A codec looks its agreed values up by block, from the position of an element. So rows are padded to whole blocks.
    name = "two_level" if residual is None and choose(codec, transport.node_sizes) == "two_level" else "two_shot"
    log_once("reduce-scatters", codec, name, x, transport, half=True)
    here = _levels.node_grid(transport) if name == "two_level" else None
    padded = -(-numel // codec.block) * codec.block
    rows = x if padded == numel else torch.nn.functional.pad(x, (0, padded - numel))
    owed = None if residual is None else residual.view(size, padded)
    if isinstance(codec, AgreeingCodec):
        codec = codec.agree(rows.reshape(-1), transport, seed=seed, residual=residual)
    if here is not None:
        return two_level.reduce_scatter(x, out, codec, transport, here, seed=seed, piece=piece)
    codec = _levels.one_level(codec, transport)

    def run(index: int, part: slice) -> Piece:
        capacity = codec.wire(part.stop - part.start, x.dtype).capacity
        slot = index % IN_FLIGHT
        outgoing = transport.scratch(f"outgoing {slot}", size * capacity, x.device).view(size, capacity)
        incoming = transport.scratch(f"incoming {slot}", size * capacity, x.device).view(size, capacity)
        for to, message in enumerate(outgoing):
            if owed is not None and to == transport.rank:
                continue
            first, kept = to * padded + part.start, None if owed is None else owed[to, part]
            codec.encode(x[to, part], message, seed=derive_seed(seed, transport.rank, to), offset=first, residual=kept)
        yield lambda: transport.all_to_all(outgoing, incoming)
        if owed is None:
            return codec.decode_sum(incoming, out[part], dtype=x.dtype)
        rank = transport.rank
        out[part] = owed[rank, part].add_(x[rank, part])
        owed[rank, part] = 0
        for others in (incoming[:rank], incoming[rank + 1 :]):
            codec.decode_sum(others, out[part], dtype=x.dtype, add=True)

    parts = cut(numel, piece, codec.block)
    pipeline([run(index, part) for index, part in enumerate(parts)], transport, x.device)


def ring_reduce_scatter(x: Tensor, out: Tensor, codec: Codec, transport: Transport, *, seed: int = 0) -> None:
    """Fill ``out`` (n,) with the sum over ranks of row ``rank`` of their ``x`` (size, n): the first phase of ``ring``.

    Row r starts at rank r + 1. Each rank on the way decodes it, adds its own values and encodes the sum. Rank r decodes
    it and does not encode its sum (DynamiQ, section 7), so there are ``size`` - 1 quantisations. The arguments are
    ``reduce_scatter``'s, without pieces. A codec that agrees over ranks gives each row its own budget.
    """
    if codec.lossless:
        return reduce_scatter(x, out, codec, transport, seed=seed, piece=None)
    (size, numel), rank = x.shape, transport.rank
    padded = -(-numel // codec.block) * codec.block
    rows = x if padded == numel else torch.nn.functional.pad(x, (0, padded - numel))
    if isinstance(codec, AgreeingCodec):
        codec = codec.agree(rows.view(-1), transport, seed=seed, chunks=[padded] * size, movable=False)
    way = codec.arrangement if isinstance(codec, AgreeingCodec) else None
    values = (rows.reshape(-1) if way is None else way.arrange(rows.reshape(-1))).view(size, padded)
    capacity = codec.wire(padded, values.dtype).capacity
    mine = transport.scratch("outgoing 0", capacity, x.device)
    theirs = transport.scratch("incoming 0", capacity, x.device)
    own = derive_seed(seed, rank)
    for step, hop in enumerate(schedule(rank, size).reduce):
        row = hop.sends.start
        if step == 0:
            codec.encode(values[row], mine, seed=own, offset=row * padded)
        else:
            codec.recode(
                theirs.unsqueeze(0), mine, padded, dtype=values.dtype, x=values[row], seed=own, offset=row * padded
            )
        send_and_receive(transport, hop, mine, theirs)
    total = values[rank].float()
    if size > 1:
        codec.decode_add(theirs, total, dtype=values.dtype)
    if way is not None and way.means is not None:
        means = way.means.view(size, -1)[rank]
        replace(way, numel=padded, means=means).restore(total.clone(), total)
    out.copy_(total[:numel])
