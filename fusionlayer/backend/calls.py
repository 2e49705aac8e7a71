"""Compressed collectives on the arguments of torch's process groups: contiguous tensors, and lists of them.

Each function checks nothing and sends nothing. It returns a ``Call``, which a ``CallQueue`` runs later on its thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import ConfigError
from ..base.seeds import derive_seed
from ..codecs import Codec
from ..collectives import Scaling, halves, reduce_flat, reduce_scatter_flat, zipped
from ..transport import Transport
from ..transport.composed import by_rank
from .hints import Differences

Call = Callable[[Transport], None]
Seed = Callable[[Transport], int]
"""Returns the seed of a call, when it runs."""
_SUMS = {"SUM": dist.ReduceOp.SUM, "AVG": dist.ReduceOp.AVG, "PREMUL_SUM": dist.ReduceOp.PREMUL_SUM}
_MOST_SHAPES = 4


def is_sum(op: Any) -> bool:
    """Return whether a reduction is a sum, possibly times a factor."""
    return any(op == kind for kind in _SUMS.values())


def describe(name: str, dtype: torch.dtype, tensors: Sequence[Tensor] = (), op: Any = None) -> str:
    """Return the text of a call, equal on all ranks that make the same one: "all_reduce SUM of (4096,) bfloat16".

    Dimensions of 1 do not count: programs sum a scalar on one rank and a vector of one element on another.
    """
    word = None if op is None else next(word for word, kind in _SUMS.items() if op == kind)
    return _text(name, word, tuple([x.shape for x in tensors]), dtype)


@lru_cache(maxsize=1024)  # every step makes the same calls
def _text(name: str, op: str | None, shapes: tuple[torch.Size, ...], dtype: torch.dtype) -> str:
    each = [str(tuple(n for n in shape if n != 1)) for shape in shapes]
    if len(each) > _MOST_SHAPES:
        digest = zlib.crc32(" ".join(each).encode())
        each = [f"{len(each)} tensors with {sum(shape.numel() for shape in shapes)} elements, shapes {digest:08x},"]
    return " ".join(filter(None, [name, op, "of", *each, str(dtype).removeprefix("torch.")]))


def refuse_average(name: str, xs: Sequence[Tensor], op: Any) -> None:
    """Raise ``ConfigError`` for an average of integers by gloo, whose own error names neither call nor type."""
    given = xs[0] if op == dist.ReduceOp.AVG and xs else None
    if given is not None and given.device.type == "cpu" and not (given.is_floating_point() or given.is_complex()):
        raise ConfigError(
            f"{name} with op=AVG got a {given.dtype} tensor; expected floats: sum integers by op=SUM and divide them, "
            "or convert them to float32"
        )


def scaling_of(op: Any, dtype: torch.dtype, size: int) -> Scaling:
    """Return the factors of reduction ``op`` over ``size`` ranks for values of ``dtype``."""
    factor = 1.0
    if op == dist.ReduceOp.PREMUL_SUM:
        # torch 2.11 exposes the factor only in the pickled state.
        factor = float(op.factor if hasattr(op, "factor") else op.__getstate__()[1])
    return Scaling.of(dtype, size, average=op == dist.ReduceOp.AVG, prescale=factor)


def all_reduce(
    tensors: Sequence[Tensor],
    op: Any,
    codec: Codec,
    algorithm: str | None,
    seed: Seed,
    residual: Tensor | None = None,
) -> Call:
    """Return a call that replaces each of ``tensors`` by its sum over ranks; they have one type and are sent as one."""

    def call(transport: Transport) -> None:
        whole = _flat(tensors)
        scaling = scaling_of(op, whole.dtype, transport.size)
        reduce_flat(whole, codec, transport, scaling, algorithm=algorithm, seed=seed(transport), residual=residual)
        _spread(whole, tensors)

    return call


def reduce_scatter(
    out: Tensor, inputs: Sequence[Tensor], op: Any, codec: Codec, algorithm: str | None, seed: Seed
) -> Call:
    """Return a call that fills ``out`` with the sum over all ranks of their input for this rank.

    ``inputs`` is one tensor with a piece for every rank, or one tensor for each rank.
    """

    def call(transport: Transport) -> None:
        rows = _flat(inputs).view(transport.size, -1)
        scaling = scaling_of(op, rows.dtype, transport.size)
        reduce_scatter_flat(rows, out.view(-1), codec, transport, scaling, algorithm=algorithm, seed=seed(transport))

    return call


def all_gather(outs: Sequence[Tensor], x: Tensor, codec: Codec, seed: Seed) -> Call:
    """Return a call that fills ``outs`` with all ranks' ``x``; ``outs`` is one tensor for all ranks or one for each."""

    def call(transport: Transport) -> None:
        every = outs[0].view(-1) if len(outs) == 1 else x.new_empty(transport.size * x.numel())
        rows = every.view(transport.size, -1)
        halves.all_gather(_flat([x]), rows, codec, transport, seed=seed(transport))
        _spread(every, outs)

    return call


def gather_differences(out: Tensor, differences: Differences, seed: Seed) -> Call:
    """Return a call that updates ``out`` (size * n,), the same copy on all ranks, to its new values on each.

    Every rank sends how its part differs. All ranks, the sender too, add the decoded values to their copies.
    """

    def call(transport: Transport) -> None:
        codec = differences.codec
        rows = out.view(transport.size, -1)
        mine = rows[transport.rank]
        mine.copy_(differences.before)
        after = differences.after.detach().to(out.device, out.dtype if codec.lossless else torch.float32)
        halves.all_gather(after, rows, codec, transport, seed=seed(transport), differences=True)

    return call


def all_to_all(
    outs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    codecs: Mapping[int, Codec],
    zips: Sequence[Codec],
    seed: Seed,
) -> Call:
    """Return a call that sends ``inputs[r]`` to rank r, and receives ``outs[r]`` from rank r.

    Each pair of ranks chooses the codec by the number of bytes that one sends the other, because both know it. A rank
    copies its message to itself. All messages of known size are sent in one exchange; then one exchange follows for
    each codec of ``zips``.

    Args:
        outs: a tensor for each rank.
        inputs: a tensor for each rank.
        codecs: the codec for each number of bytes; tensors of other sizes are sent uncompressed.
        zips: the codecs with messages of variable size that any rank may use, in the same order on all ranks.
        seed: the seed of stochastic rounding.
    """

    def call(transport: Transport) -> None:
        rank = transport.rank
        given = [_flat([x]) for x in inputs]
        taken = [x.view(-1) for x in outs]
        sends, recvs = ([codecs.get(x.numel() * x.element_size()) for x in side] for side in (given, taken))
        outgoing = _messages("outgoing", given, sends, zips, transport)
        incoming = _messages("incoming", taken, recvs, zips, transport)
        own = seed(transport)
        for to, (x, codec, message) in enumerate(zip(given, sends, outgoing, strict=True)):
            if codec is not None and message.numel():
                codec.encode(x, message, seed=derive_seed(own, rank, to))
        transport.exchange(by_rank(outgoing, incoming))
        for x, codec, message in zip(taken, recvs, incoming, strict=True):
            if codec is not None and message.numel():
                codec.decode(message, x)
        for zipping in zips:
            _exchange_zipped(given, taken, sends, recvs, zipping, transport)
        taken[rank].copy_(given[rank])

    return call


def _messages(
    name: str, xs: Sequence[Tensor], chosen: Sequence[Codec | None], zips: Sequence[Codec], transport: Transport
) -> list[Tensor]:
    """Return a byte tensor for each rank: its own bytes if it is sent uncompressed, else space for its message.

    It is empty for codecs of ``zips`` and for this rank itself.
    """
    sizes = [
        0 if codec is None or codec in zips or peer == transport.rank else codec.wire(x.numel(), x.dtype).capacity
        for peer, (x, codec) in enumerate(zip(xs, chosen, strict=True))
    ]
    room = transport.scratch(name, sum(sizes), xs[0].device).split(sizes)
    return [
        x.view(torch.uint8) if codec is None and peer != transport.rank else space
        for peer, (x, codec, space) in enumerate(zip(xs, chosen, room, strict=True))
    ]


def _exchange_zipped(
    given: Sequence[Tensor],
    taken: Sequence[Tensor],
    sends: Sequence[Codec | None],
    recvs: Sequence[Codec | None],
    codec: Codec,
    transport: Transport,
) -> None:
    """Exchange the tensors that are sent by ``codec``; every rank calls it, even one that has no such tensor."""

    def mine(xs: Sequence[Tensor], chosen: Sequence[Codec | None]) -> list[Tensor]:
        pairs = zip(xs, chosen, strict=True)
        return [x if c == codec and peer != transport.rank else x[:0] for peer, (x, c) in enumerate(pairs)]

    parts, pieces = mine(given, sends), mine(taken, recvs)
    whole = torch.cat(pieces)
    sent, received = ([x.numel() for x in side] for side in (parts, pieces))
    zipped.all_to_all(torch.cat(parts), whole, sent, received, codec, transport)
    _spread(whole, pieces)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of ``tensors`` as one flat tensor; a single tensor is not copied."""
    flat = [x.detach().view(-1) for x in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _spread(whole: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the elements of ``whole`` into ``tensors`` in their order, except into tensors that share its memory."""
    for x, part in zip(tensors, whole.split([x.numel() for x in tensors]), strict=True):
        if x.data_ptr() != part.data_ptr():
            x.detach().copy_(part.view(x.shape))
