"""Tensors so small that they travel with the requests: the coordinator computes, and answers with the results.

That takes two messages where negotiation and an exchange take four, which is most of the time of a small operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .operation import Operation
from .reductions import average_, combine, scale_
from .requests import Item, Request, Signature

__all__ = ["compute", "fits", "hand_out", "to_bytes"]

# Of all ranks together, in one operation.
_BYTES = 64 << 10


def fits(signature: Signature, tensors: Sequence[Tensor], size: int) -> bool:
    """Return whether tensors of one of ``size`` ranks are worth to travel with the request."""
    if signature.device != "cpu" or not signature.is_plain or signature.kind not in ("allreduce", "allgather"):
        return False
    if len(signature.dtypes) > 1 and len(set(signature.dtypes)) > 1:
        return False
    return sum([x.nbytes for x in tensors]) * size <= _BYTES


def to_bytes(tensors: Sequence[Tensor]) -> bytes:
    """Return the elements of tensors, one behind the other."""
    return b"".join([x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in tensors])


def compute(signature: Signature, requests: Sequence[Mapping[int, Request]], ranks: Sequence[int]) -> bytes:
    """Return the results of operations, one behind the other.

    Args:
        signature: of the first; the others differ in shapes and names only.
        requests: of each operation, by rank; of the same ranks all.
        ranks: of the process set.
    """
    present = [rank for rank in ranks if rank in requests[0]]
    if signature.kind == "allgather":
        return b"".join(_gathered(each, present) for each in requests)
    dtype = getattr(torch, signature.dtypes[0])
    parts = [_flat(b"".join([each[rank].data or b"" for each in requests]), dtype) for rank in present]
    for part in parts:
        scale_(part, signature.prescale)
    total = combine(parts, signature.op or "Sum")
    if signature.op == "Average":
        average_(total, len(ranks))
    scale_(total, signature.postscale)
    return to_bytes([total])


def _gathered(requests: Mapping[int, Request], present: Sequence[int]) -> bytes:
    signature = requests[present[0]].signature
    pieces: list[list[bytes]] = [[] for _ in signature.shapes]
    for rank in present:
        data, rows, at = requests[rank].data or b"", requests[rank].numbers, 0
        for i, (shape, dtype) in enumerate(zip(signature.shapes, signature.dtypes, strict=True)):
            nbytes = rows[i] * torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            pieces[i].append(data[at : at + nbytes])
            at += nbytes
    return b"".join([part for each in pieces for part in each])


def hand_out(operations: Sequence[Operation | None], items: Sequence[Item], data: bytes) -> None:
    """Put results where the operations of one rank want them."""
    mine = [(operation, item) for operation, item in zip(operations, items, strict=True) if operation is not None]
    if not mine:
        return
    if mine[0][0].signature.kind == "allgather":
        _hand_out_rows(mine, data)
        return
    flat = _flat(data, mine[0][0].tensors[0].dtype)
    at = 0
    for operation, _ in mine:
        results = []
        for i, x in enumerate(operation.tensors):
            piece = flat[at : at + x.numel()].view(x.shape)
            at += x.numel()
            if operation.outputs is not None:
                results.append(operation.outputs[i].copy_(piece))
            else:
                results.append(piece if len(flat) == x.numel() else piece.clone())
        operation.result = results


def _hand_out_rows(mine: Sequence[tuple[Operation, Item]], data: bytes) -> None:
    at = 0
    for operation, item in mine:
        results = []
        count = len(operation.tensors)
        for i, x in enumerate(operation.tensors):
            rows = sum(item.numbers[i::count])
            nbytes = rows * x.shape[1:].numel() * x.element_size()
            results.append(_flat(data[at : at + nbytes], x.dtype).view(rows, *x.shape[1:]))
            at += nbytes
        operation.result = results


def _flat(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
