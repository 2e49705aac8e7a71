"""Elementwise reductions: within a process, and over the ranks of a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import codecs
from ..collectives import Scaling, reduce_flat
from ..transport import Transport
from ..transport.composed import by_rank

_RAW = codecs.get("raw").bare

_COMBINERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Min": torch.minimum,
    "Max": torch.maximum,
    "Product": torch.mul,
}


def neutral(op: str, dtype: torch.dtype) -> int | float | bool:
    """Return the neutral element of a reduction: the value that changes no result."""
    if op == "Product":
        return 1
    if op in ("Average", "Sum"):
        return 0
    if dtype is torch.bool:
        return op == "Min"
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if dtype.is_floating_point:
        return float("inf") if op == "Min" else float("-inf")
    return limits.max if op == "Min" else limits.min


def combine(parts: Sequence[Tensor], op: str) -> Tensor:
    """Return the reduction of tensors of equal length, in their order. 16-bit floats are rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        if op in _COMBINERS:
            total = _COMBINERS[op](total, part.to(wide))
        elif dtype is torch.bool:
            total |= part
        else:
            total += part
    return total.to(dtype)


def reduce_as(op: str, x: Tensor, transport: Transport, scaling: Scaling) -> None:
    """Replace the contiguous ``x`` by its scaled reduction over ranks, with the same bits on every rank."""
    x = x.view(-1)
    if op in ("Average", "Sum") and x.dtype is not torch.bool:
        reduce_flat(x, _RAW, transport, scaling)
        return
    scaling.scale_before_(x)
    size, rank = transport.size, transport.rank
    bounds = [x.numel() * r // size for r in range(size + 1)]
    shares = [x[bounds[r] : bounds[r + 1]].view(torch.uint8) for r in range(size)]
    mine = x[bounds[rank] : bounds[rank + 1]]
    parts = x.new_empty(size, mine.numel())
    transport.exchange(by_rank(shares, [part.view(torch.uint8) for part in parts]))
    mine.copy_(combine(list(parts), op))
    transport.exchange(by_rank([mine.clone().view(torch.uint8)] * size, shares))
    scaling.scale_after_(x)
