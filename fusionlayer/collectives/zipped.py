"""``zipped``: lossless messages that are as short as the data allow; results keep every bit (ZipCCL, section 3).

A message of variable size begins with its static part. All ranks know the length of this part beforehand, and it has
the length of the rest. So a message is sent in two exchanges, and ranks exchange no sizes. Messages are not copied:
encoders write into the buffers that are sent, and decoders read the buffers that were received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..base.errors import ConfigError, WireError
from ..codecs import ChangeCodec, Codec, ZippedCodec
from ..native.wire import DTYPE_CODES
from ..transport import Transport
from ..transport.composed import by_rank
from ._base import check_pair, collective, split_evenly
from ._pieces import IN_FLIGHT, Piece, cut, pipeline

PIECE_BYTES = 4 << 20
"""Bytes of elements that are sent at a time by default. Shorter pieces would pay for two round trips too often."""


def all_gather(
    x: Tensor,
    out: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    lengths: Sequence[int] | None = None,
    piece: int | None = None,
    changes: bool = False,
) -> None:
    """Fill ``out`` with all ranks' ``x``, one after the other in rank order.

    Args:
        x: (n,) f32, bf16 or f16, contiguous; may be the part of ``out`` that it belongs to.
        out: (sum of lengths,), of the type of ``x``.
        codec: lossless and of variable size.
        transport: the ranks; only the calling thread uses it.
        lengths: elements of each rank, the same list on all ranks; None: all ranks have equally many.
        piece: elements of a rank that are sent at a time, while others are encoded or decoded; None: 4 MiB.
        changes: ``out`` has the same bits on every rank, and the codec, a ``ChangeCodec``, sends changes since. Then
            ``x`` is no part of ``out``.

    Raises:
        ConfigError: the codec is not lossless and of variable size, or the lengths do not fit.
        WireError: a message was damaged, or ``out`` was not the same.
    """
    rank, size = transport.rank, transport.size
    lengths = [x.numel()] * size if lengths is None else list(lengths)
    codec = _check(codec, x, "all_gather", size)
    if len(lengths) != size or lengths[rank] != x.numel() or sum(lengths) != out.numel():
        raise ConfigError(
            f"all_gather of {x.numel()} elements on rank {rank} into {out.numel()}, with lengths {lengths}; expected "
            f"{size} lengths, that of this rank among them, which add up"
        )
    rows = out.split(lengths)
    if rows[rank].data_ptr() != x.data_ptr() and not changes:
        rows[rank].copy_(x)

    def encode(part: slice, payload: Tensor) -> None:
        if changes:
            assert isinstance(codec, ChangeCodec)
            codec.encode_change(x[part], rows[rank][part], payload)
            rows[rank][part].copy_(x[part])
        else:
            codec.encode(x[part], payload)

    def decode(payload: Tensor, row: Tensor) -> None:
        if changes:
            assert isinstance(codec, ChangeCodec)
            codec.apply_change(payload, row, row)
        else:
            codec.decode(payload, row)

    def run(index: int, part: slice) -> Piece:
        numels = [_overlap(part, length) for length in lengths]
        room = _room(transport, f"incoming {index % IN_FLIGHT}", numels, codec, x)
        theirs = [_Letter(codec, space, n, x.dtype) for space, n in zip(room, numels, strict=True)]
        encode(part, theirs[rank].payload)
        yield from _send([theirs[rank]] * size, theirs, codec, transport)
        for peer, letter in enumerate(theirs):
            if peer != rank:
                decode(letter.payload, rows[peer][part])

    if size > 1:
        parts = cut(max(lengths), piece or _default_piece(x), codec.block)
        pipeline([run(index, part) for index, part in enumerate(parts)], transport, x.device)


def all_to_all(
    x: Tensor,
    out: Tensor,
    sends: Sequence[int],
    recvs: Sequence[int],
    codec: Codec,
    transport: Transport,
    *,
    design: int = 2,
) -> None:
    """Send consecutive parts of ``x`` to the ranks in their order; fill ``out`` with the received parts.

    Args:
        x: (sum of sends,) f32, bf16 or f16, contiguous.
        out: (sum of recvs,), of the type of ``x``.
        sends: elements for each rank; zeros are allowed.
        recvs: elements from each rank.
        codec: lossless and of variable size.
        transport: the ranks; only the calling thread uses it.
        design: 2 sends static parts at once, so early ranks do not wait for a straggler (ZipCCL, section 5.1); 1
            exchanges sizes first, and then whole messages.

    Raises:
        ConfigError: the codec is not lossless and of variable size, or the counts do not fit.
        WireError: a message was damaged.
    """
    rank, size = transport.rank, transport.size
    codec = _check(codec, x, "all_to_all", size)
    if design not in (1, 2):
        raise ConfigError(f"all_to_all with design={design}; expected 1 (sizes first) or 2 (static part first)")
    if len(sends) != size or len(recvs) != size or sends[rank] != recvs[rank]:
        raise ConfigError(
            f"all_to_all on rank {rank} sends {list(sends)} elements and expects {list(recvs)}; give {size} counts "
            "each, with the same for this rank"
        )
    if sum(sends) != x.numel() or sum(recvs) != out.numel():
        raise ConfigError(
            f"all_to_all of {x.numel()} elements into {out.numel()} sends {list(sends)} and expects {list(recvs)}; "
            "give counts that add up"
        )
    targets = out.split(list(recvs))
    sources = x.split(list(sends))
    targets[rank].copy_(sources[rank])

    def run() -> Piece:
        def letters(name: str, counts: Sequence[int]) -> list[_Letter]:
            numels = [0 if peer == rank else n for peer, n in enumerate(counts)]
            room = _room(transport, name, numels, codec, x)
            return [_Letter(codec, space, n, x.dtype) for space, n in zip(room, numels, strict=True)]

        mine, theirs = letters("outgoing 0", sends), letters("incoming 0", recvs)
        for peer, letter in enumerate(mine):
            if peer != rank:
                codec.encode(sources[peer], letter.payload)
        yield from (_send if design == 2 else _send_after_sizes)(mine, theirs, codec, transport)
        for peer, letter in enumerate(theirs):
            if peer != rank:
                codec.decode(letter.payload, targets[peer])

    if size > 1:
        pipeline([run()], transport, x.device)


def reduce_scatter(x: Tensor, out: Tensor, codec: Codec, transport: Transport, *, piece: int | None = None) -> None:
    """Fill ``out`` (n,) with the sum over ranks of part ``rank`` of their ``x`` (size * n,), in rank order in f32.

    Values are sent losslessly, so only the sum is rounded, once, to the type of ``out``. The bits are those of an
    uncompressed sum in that order; a NaN is the canonical one.

    Args:
        x: f32, bf16 or f16, contiguous, equally long on all ranks.
        out: of the type of ``x``, or f32; not a part of it.
        codec: lossless and of variable size.
        transport: the ranks; only the calling thread uses it.
        piece: elements of a part that are sent at a time, while others are encoded or summed; None: 4 MiB.

    Raises:
        ConfigError: the codec is not lossless and of variable size, or the lengths do not fit.
        WireError: a message was damaged.
    """
    size, numel = transport.size, out.numel()
    codec = _check(codec, x, "reduce_scatter", size)
    if x.numel() != size * numel:
        raise ConfigError(f"reduce_scatter of {x.numel()} elements into {numel}; expected {size} times as many")
    if size == 1:
        out.copy_(x)
        return
    rows = x.split(numel) if numel else [x] * size

    def run(index: int, part: slice) -> Piece:
        pieces = [row[part] for row in rows]
        yield from _reduce(index, pieces, out[part], codec, transport)

    parts = cut(numel, piece or _default_piece(x), codec.block)
    pipeline([run(index, part) for index, part in enumerate(parts)], transport, x.device)


@collective(
    "zipped",
    takes=lambda codec, size: isinstance(codec, ZippedCodec),
    because="carries lossless messages of variable size",
)
def zipped(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    piece: int | None = None,
) -> None:
    """Sum in rank order in f32, rounded to the type of ``x``, by reduce-scatter and all-gather of lossless messages.

    Each rank sends 2 (size - 1) / size of the used bytes of a message of the whole tensor, in four exchanges. With
    ``out`` (n,) the sum goes there and ``x`` stays. ``piece`` elements are sent at a time; by default each rank's share
    of them has 4 MiB.
    """
    rank, size = transport.rank, transport.size
    codec = _check(codec, x, "zipped", size)
    if out is not None:
        out.copy_(x)
        x = out
    if size == 1:
        return

    def run(index: int, part: slice) -> Piece:
        chunk = split_evenly(part.stop - part.start, size, codec.block)
        bounds = [min(part.start + peer * chunk, part.stop) for peer in range(size + 1)]
        places = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
        mine = places[rank]
        kept = None if residual is None else [residual[place] for place in places]
        yield from _reduce(index, [x[place] for place in places], x[mine], codec, transport, kept)
        numels = [place.stop - place.start for place in places]
        room = _room(transport, f"incoming {index % IN_FLIGHT}", numels, codec, x)
        theirs = [_Letter(codec, space, n, x.dtype) for space, n in zip(room, numels, strict=True)]
        codec.encode(x[mine], theirs[rank].payload)
        yield from _send([theirs[rank]] * size, theirs, codec, transport)
        for peer, letter in enumerate(theirs):
            if peer != rank:
                codec.decode(letter.payload, x[places[peer]])

    parts = cut(x.numel(), piece or size * _default_piece(x), size * codec.block)
    pipeline([run(index, part) for index, part in enumerate(parts)], transport, x.device)


def _reduce(
    index: int,
    pieces: Sequence[Tensor],
    out: Tensor,
    codec: ZippedCodec,
    transport: Transport,
    residuals: Sequence[Tensor] | None = None,
) -> Piece:
    """Send piece j to rank j, and set ``out`` to the sum of all ranks' pieces for this rank.

    The scratch memory belongs to the slot of piece ``index``. The piece before it, which may be in flight, has the
    other slot.
    """
    rank, size, slot = transport.rank, transport.size, index % IN_FLIGHT
    dtype = pieces[rank].dtype
    capacity = codec.wire(out.numel(), dtype).capacity
    every = transport.scratch(f"incoming {slot}", size * capacity, out.device).view(size, capacity)
    theirs = [_Letter(codec, row, out.numel(), dtype) for row in every]
    numels = [0 if peer == rank else piece.numel() for peer, piece in enumerate(pieces)]
    room = _room(transport, f"outgoing {slot}", numels, codec, pieces[rank])
    mine = [_Letter(codec, space, n, dtype) for space, n in zip(room, numels, strict=True)]
    mine[rank] = theirs[rank]
    for peer, piece in enumerate(pieces):
        codec.encode(piece, mine[peer].payload, residual=None if residuals is None else residuals[peer])
    yield from _send(mine, theirs, codec, transport)
    if residuals is None:
        out.fill_(-0.0)  # -0.0 + v has the bits of v for every v, even for a zero; 0.0 + -0.0 would not
        codec.decode_sum(every, out, dtype=dtype, add=True)
    else:
        total = transport.scratch(f"sum {slot}", capacity, out.device)
        codec.recode(every, total, out.numel(), dtype=out.dtype, residual=residuals[rank])
        codec.decode(total, out)


# ---- messages on their way ------------------------------------------------------------------------------------------


class _Letter:
    """A message in room for its full capacity; ``first`` is its static part, which every message has."""

    def __init__(self, codec: ZippedCodec, room: Tensor, numel: int, dtype: torch.dtype) -> None:
        self.payload = room[: codec.wire(numel, dtype).capacity]
        self.first = room[: codec.static_extent(numel, dtype)]
        self.numel = numel
        self.dtype = dtype


def _send(mine: Sequence[_Letter], theirs: Sequence[_Letter], codec: ZippedCodec, transport: Transport) -> Piece:
    """Yield the exchanges in which ``mine[j]`` goes to rank j and ``theirs[j]`` comes from it: static parts first.

    This rank's message to itself stays in place.
    """
    yield _exchange([letter.first for letter in mine], [letter.first for letter in theirs], transport)
    # The static parts have arrived, so the lengths of the rests can be read from them.
    sends, recvs = _rests(mine, codec), _rests(theirs, codec)
    yield _exchange(sends, recvs, transport)


def _send_after_sizes(
    mine: Sequence[_Letter], theirs: Sequence[_Letter], codec: ZippedCodec, transport: Transport
) -> Piece:
    """Yield the exchanges of ``_send`` in another way: sizes first, then whole messages."""
    sizes = torch.tensor(_extents(mine, codec), device="cpu").view(-1, 1)
    told = torch.empty_like(sizes)
    yield lambda: transport.all_to_all(sizes.view(torch.uint8), told.view(torch.uint8))
    lengths = told.view(-1).tolist()
    for peer, (letter, length) in enumerate(zip(theirs, lengths, strict=True)):
        if not letter.first.numel() <= length <= letter.payload.numel():
            raise WireError(f"{codec}: rank {peer} announces {length} bytes for a message of {letter.numel} elements")
    outgoing = [letter.payload[:length] for letter, length in zip(mine, sizes.view(-1).tolist(), strict=True)]
    incoming = [letter.payload[:length] for letter, length in zip(theirs, lengths, strict=True)]
    yield _exchange(outgoing, incoming, transport)
    rests = _rests(theirs, codec)
    used = [letter.first.numel() + rest.numel() for letter, rest in zip(theirs, rests, strict=True)]
    if used != lengths:
        raise WireError(f"{codec}: messages of {used} bytes came in {lengths}: they were damaged")


def _exchange(sends: Sequence[Tensor], recvs: Sequence[Tensor], transport: Transport) -> Callable[[], None]:
    messages = by_rank(sends, recvs)
    del messages[transport.rank]
    return lambda: transport.exchange(messages)


def _extents(letters: Sequence[_Letter], codec: ZippedCodec) -> list[int]:
    return codec.extents([letter.payload for letter in letters], [letter.numel for letter in letters], letters[0].dtype)


def _rests(letters: Sequence[_Letter], codec: ZippedCodec) -> list[Tensor]:
    """Return the bytes of each message after its static part. Unused bytes become 0, as the checksum covers them."""
    found = []
    for letter, extent in zip(letters, _extents(letters, codec), strict=True):
        if codec.header:
            letter.payload[extent:].zero_()
        found.append(letter.payload[letter.first.numel() : extent])
    return found


def _room(transport: Transport, name: str, numels: Sequence[int], codec: ZippedCodec, like: Tensor) -> list[Tensor]:
    """Return room for one message of each of ``numels`` elements, one after the other."""
    capacities = [codec.wire(numel, like.dtype).capacity for numel in numels]
    return list(transport.scratch(name, sum(capacities), like.device).split(capacities))


def _overlap(part: slice, length: int) -> int:
    """Return how many elements of ``part`` a tensor of ``length`` elements has."""
    return len(range(*part.indices(length)))


def _default_piece(x: Tensor) -> int:
    return PIECE_BYTES // x.element_size()


def _check(codec: Codec, x: Tensor, name: str, size: int) -> ZippedCodec:
    """Return ``codec`` if zipped collectives can use it and can carry ``x``; raise ``ConfigError`` otherwise."""
    check_pair("zipped", codec, size)
    assert isinstance(codec, ZippedCodec)
    if x.dtype not in DTYPE_CODES or not x.is_contiguous():
        raise ConfigError(
            f"zipped {name} got a {x.dtype} tensor with strides {x.stride()}; expected contiguous float32, bfloat16 "
            "or float16"
        )
    return codec
