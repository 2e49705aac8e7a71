"""Operations on tensors so small that they are sent with the requests. The coordinator computes and sends the results.

That takes two messages instead of four for negotiation and exchange. Messages are most of the time of a small
operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import string_at

import torch
from torch import Tensor

from .operation import Operation
from .reductions import combine
from .requests import Bytes, Item, Request, Signature

# Limit for the tensors of one operation, summed over ranks.
_BYTES = 64 << 10


def fits(signature: Signature, tensors: Sequence[Tensor], size: int) -> bool:
    """Return whether the tensors should be sent with the request. ``size``: number of ranks of the job."""
    if signature.kind not in ("allreduce", "allgather") or sum([x.nbytes for x in tensors]) * size > _BYTES:
        return False
    if len(signature.dtypes) > 1 and len(set(signature.dtypes)) > 1:
        return False
    return signature.device == "cpu" and signature.is_plain


def to_bytes(tensors: Sequence[Tensor]) -> bytes:
    """Return the elements of all tensors, concatenated."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return string_at(tensors[0].data_ptr(), tensors[0].nbytes)
    dense = [x.contiguous() for x in tensors]
    return b"".join([string_at(x.data_ptr(), x.nbytes) for x in dense])


def compute(signature: Signature, requests: Sequence[Mapping[int, Request]], ranks: Sequence[int]) -> bytes:
    """Return the results of fused operations, concatenated. Runs on rank 0, with the coordinator's lock held."""
    present = [rank for rank in ranks if rank in requests[0]]
    if signature.kind == "allgather":
        return b"".join([part for each in requests for part in _gathered(each, present)])
    dtype = getattr(torch, signature.dtypes[0])
    parts = [_flat(bytearray().join([each[rank].data or b"" for each in requests]), dtype) for rank in present]
    scaling = signature.scaling(dtype, len(ranks))
    for part in parts:
        scaling.scale_before_(part)
    total = combine(parts, signature.op or "Sum")
    scaling.scale_after_(total)
    return to_bytes([total])


def _gathered(requests: Mapping[int, Request], present: Sequence[int]) -> list[Bytes]:
    signature = requests[present[0]].signature
    if len(signature.shapes) == 1:
        return [requests[rank].data or b"" for rank in present]
    pieces: list[list[Bytes]] = [[] for _ in signature.shapes]
    for rank in present:
        data, rows, at = requests[rank].data or b"", requests[rank].numbers, 0
        for i, (shape, dtype) in enumerate(zip(signature.shapes, signature.dtypes, strict=True)):
            nbytes = rows[i] * torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            pieces[i].append(data[at : at + nbytes])
            at += nbytes
    return [part for each in pieces for part in each]


def hand_out(operations: Sequence[Operation | None], items: Sequence[Item], data: Bytes) -> None:
    """Give the operations of one rank their results."""
    mine = [(operation, item) for operation, item in zip(operations, items, strict=True) if operation is not None]
    if not mine:
        return
    if mine[0][0].signature.kind == "allgather":
        _hand_out_rows(mine, data)
        return
    at = 0
    for operation, _ in mine:
        results = []
        for i, x in enumerate(operation.tensors):
            piece = _flat(bytearray(data[at : at + x.nbytes]), x.dtype)
            at += x.nbytes
            piece = piece if x.dim() == 1 else piece.view(x.shape)
            results.append(piece if operation.outputs is None else operation.outputs[i].copy_(piece))
        operation.result = results


def _hand_out_rows(mine: Sequence[tuple[Operation, Item]], data: Bytes) -> None:
    at = 0
    for operation, item in mine:
        results = []
        count = len(operation.tensors)
        for i, x in enumerate(operation.tensors):
            rows = sum(item.numbers[i::count])
            rest = x.shape[1:]
            nbytes = rows * rest.numel() * x.element_size()
            piece = _flat(bytearray(data[at : at + nbytes]), x.dtype)
            results.append(piece.view(rows, *rest) if rest else piece)
            at += nbytes
        operation.result = results


def _flat(data: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
