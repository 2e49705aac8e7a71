"""Executes operations that all ranks run together as one message. All of it runs on the communication thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

from ..base.errors import UsageError
from ..collectives import Scaling
from ..transport import Transport
from ..transport.composed import by_rank
from .operation import Operation, Reduce
from .pages import by_large_pages
from .reductions import combine, neutral, reduce_as
from .requests import Item, Signature

Span = Callable[[str], AbstractContextManager[None]]


class OperationPart:
    """One operation of a message, as this rank sees it.

    Args:
        operation: this rank's operation; None if the rank has joined and takes part without tensors of its own.
        item: the description in the coordinator's response.
    """

    def __init__(self, operation: Operation | None, item: Item) -> None:
        signature = item.signature if operation is None else operation.signature
        if signature is None:
            raise UsageError("this rank has given up an operation that was about to run; the session has ended")
        self.operation = operation
        self.signature: Signature = signature
        self.numbers = item.numbers

    def inputs(self, *, rows: int | None = None) -> list[Tensor]:
        """Return this rank's tensors. Without an operation they are neutral ones, with ``rows`` rows if given."""
        if self.operation is not None:
            return list(self.operation.tensors)
        signature = self.signature
        lead = () if rows is None else (rows,)
        dtypes = [getattr(torch, name) for name in signature.dtypes]
        return [
            torch.full((*lead, *shape), neutral(signature.op or "Sum", dtype), dtype=dtype, device=signature.device)
            for shape, dtype in zip(signature.shapes, dtypes, strict=True)
        ]

    @property
    def wants_new_tensors(self) -> bool:
        """Whether the caller gave no output tensors, so that results need new ones."""
        return self.operation is not None and self.operation.outputs is None

    def outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the output tensors for results that have the inputs' shapes. Makes them if the caller gave none."""
        operation = self.operation
        if operation is None:
            return list(inputs)
        if operation.outputs is None:
            operation.outputs = [_new_like(x) for x in inputs]
        return list(operation.outputs)


def execute(parts: Sequence[OperationPart], transport: Transport, ranks: Sequence[int], span: Span) -> None:
    """Run operations of one kind over the ranks of their process set and leave results with them."""
    _KINDS[parts[0].signature.kind](parts, transport, ranks, span)


def _allreduce(parts: Sequence[OperationPart], transport: Transport, ranks: Sequence[int], span: Span) -> None:
    signature = parts[0].signature
    given = parts[0].operation.reduce if parts[0].operation else None
    reduce = given or partial(reduce_as, signature.op or "Sum")
    by_dtype: defaultdict[torch.dtype, list[tuple[Tensor, Tensor | None]]] = defaultdict(list)
    places: list[tuple[OperationPart, list[tuple[torch.dtype, int]]]] = []
    for part in parts:
        inputs = part.inputs()
        outs: Sequence[Tensor | None] = [None] * len(inputs)
        if not part.wants_new_tensors:
            outs = part.outputs(inputs)
        where = []
        for x, out in zip(inputs, outs, strict=True):
            where.append((x.dtype, len(by_dtype[x.dtype])))
            by_dtype[x.dtype].append((x, out))
        places.append((part, where))
    results: dict[torch.dtype, Sequence[Tensor]] = {}
    # Sorted, so that all ranks reduce the types in the same order.
    for dtype in sorted(by_dtype, key=str):
        pairs = by_dtype[dtype]
        scaling = signature.scaling(dtype, transport.size)
        if given is None and len(pairs) > 1:
            results[dtype] = _reduce_fused(pairs, reduce, scaling, transport, span)
        else:
            results[dtype] = [_reduce_one(x, out, reduce, scaling, transport) for x, out in pairs]
    for part, where in places:
        if part.operation is not None:
            part.operation.result = [results[dtype][i] for dtype, i in where]


def _reduce_one(x: Tensor, out: Tensor | None, reduce: Reduce, scaling: Scaling, transport: Transport) -> Tensor:
    if out is None:
        out = _new_like(x)
    dense = out if out.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
    rest = scaling.fill(dense, x)
    reduce(dense, transport, rest)
    if dense is not out:
        out.copy_(dense)
    return out


def _reduce_fused(
    pairs: Sequence[tuple[Tensor, Tensor | None]], reduce: Reduce, scaling: Scaling, transport: Transport, span: Span
) -> list[Tensor]:
    inputs = [x for x, _ in pairs]
    with span("MEMCPY_IN_FUSION_BUFFER"):
        flat = flatten(inputs)
    reduce(flat, transport, scaling)
    with span("MEMCPY_OUT_FUSION_BUFFER"):
        pieces = unflatten(flat, inputs)
        if all(out is None for _, out in pairs):
            return [piece.clone() for piece in pieces]
        outs = [torch.empty_like(piece) if out is None else out for piece, (_, out) in zip(pieces, pairs, strict=True)]
        torch._foreach_copy_(outs, list(pieces))
    return outs


def _allgather(parts: Sequence[OperationPart], transport: Transport, ranks: Sequence[int], span: Span) -> None:
    tensors: list[Tensor] = []
    lengths: list[list[int]] = []
    for part in parts:
        inputs = part.inputs(rows=0)
        count = len(inputs)
        tensors += [x.contiguous() for x in inputs]
        lengths += [[part.numbers[r * count + i] for r in range(transport.size)] for i in range(count)]
    rows = [x.shape[1:].numel() * x.element_size() for x in tensors]
    if len(tensors) == 1:
        outs = [by_large_pages(tensors[0].new_empty(sum(lengths[0]), *tensors[0].shape[1:]))]
        mine = _bytes(tensors[0])
        transport.exchange(by_rank([mine] * transport.size, list(map(_bytes, outs[0].split(lengths[0])))))
    else:
        with span("MEMCPY_IN_FUSION_BUFFER"):
            mine = torch.cat([_bytes(x) for x in tensors])
        sizes = [[each[r] * row for each, row in zip(lengths, rows, strict=True)] for r in range(transport.size)]
        every = [mine.new_empty(sum(of_rank)) for of_rank in sizes]
        transport.exchange(by_rank([mine] * transport.size, every))
        with span("MEMCPY_OUT_FUSION_BUFFER"):
            pieces = [message.split(of_rank) for message, of_rank in zip(every, sizes, strict=True)]
            outs = [
                torch.cat([of_rank[i] for of_rank in pieces]).view(x.dtype).view(sum(lengths[i]), *x.shape[1:])
                for i, x in enumerate(tensors)
            ]
    results = iter(outs)
    for part in parts:
        if part.operation is not None:
            part.operation.result = [next(results) for _ in part.operation.tensors]


def _broadcast(parts: Sequence[OperationPart], transport: Transport, ranks: Sequence[int], span: Span) -> None:
    root = parts[0].signature.root
    assert root is not None
    place = ranks.index(root)
    pairs = []
    for part in parts:
        inputs = part.inputs()
        pairs += list(zip(inputs, part.outputs(inputs), strict=True))
    if len(pairs) == 1:
        x, out = pairs[0]
        dense = x.contiguous() if transport.rank == place or not out.is_contiguous() else out
        transport.broadcast(dense, place)
        if dense is not out:
            out.copy_(dense)
    else:
        with span("MEMCPY_IN_FUSION_BUFFER"):
            flat = torch.cat([_bytes(x.contiguous()) for x, _ in pairs])
        transport.broadcast(flat, place)
        with span("MEMCPY_OUT_FUSION_BUFFER"):
            # A piece may begin at an offset that is no multiple of its element size, and view(dtype) refuses that. A
            # clone begins at an aligned address.
            for (x, out), piece in zip(
                pairs, flat.split([x.numel() * x.element_size() for x, _ in pairs]), strict=True
            ):
                out.copy_(piece.clone().view(x.dtype).view(x.shape))
    for part in parts:
        if part.operation is not None:
            part.operation.result = part.operation.outputs


def _alltoall(parts: Sequence[OperationPart], transport: Transport, ranks: Sequence[int], span: Span) -> None:
    for part in parts:
        operation = part.operation
        assert operation is not None
        x = operation.tensors[0].contiguous()
        received = list(part.numbers)
        out = by_large_pages(x.new_empty(sum(received), *x.shape[1:]))
        sends = [_bytes(piece) for piece in x.split(list(operation.splits))]
        transport.exchange(by_rank(sends, list(map(_bytes, out.split(received)))))
        operation.result = (out, received)


def _reducescatter(parts: Sequence[OperationPart], transport: Transport, ranks: Sequence[int], span: Span) -> None:
    for part in parts:
        operation = part.operation
        assert operation is not None
        operation.result = [_reduce_rows(x, part.signature, transport) for x in operation.tensors]


def _reduce_rows(x: Tensor, signature: Signature, transport: Transport) -> Tensor:
    """Return this rank's rows of the reduction of ``x`` (n, ...). The first n % size ranks have one row more."""
    each, rest = divmod(x.shape[0], transport.size)
    bounds = list(accumulate((each + (r < rest) for r in range(transport.size)), initial=0))
    scaling = signature.scaling(x.dtype, transport.size)
    x = scaling.scaled(x)
    pieces = [x[start:stop].contiguous() for start, stop in pairwise(bounds)]
    mine = pieces[transport.rank]
    parts = mine.new_empty(transport.size, *mine.shape)
    transport.exchange(by_rank(list(map(_bytes, pieces)), list(map(_bytes, parts))))
    out = combine(list(parts), signature.op or "Sum")
    scaling.scale_after_(out)
    return out


def _new_like(x: Tensor) -> Tensor:
    return by_large_pages(torch.empty_like(x, memory_format=torch.contiguous_format))


def _bytes(x: Tensor) -> Tensor:
    # A dimension of one element may have any stride. view() would keep that stride, and view(dtype) would refuse it.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


_KINDS = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}
