"""Copies of tensors to memory that a link can reach: pinned host memory for gloo, the device for NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def space(xs: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on this type of device unchanged, and uninitialised ones on ``device`` for the others."""
    return [x if x.device.type == device.type else _empty_like(x, device) for x in xs]


def bring(xs: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors, copied to ``device`` where they are elsewhere. A tensor that occurs twice is copied once.

    Results on the host may be read at once, results on a device by the current stream.
    """
    copies: dict[tuple[int, int], Tensor] = {}
    brought = []
    for x in xs:
        if x.device.type == device.type:
            brought.append(x)
            continue
        key = (x.data_ptr(), x.numel())
        if key not in copies:
            # Dropping these tensors early is safe: torch reuses pinned memory only after its copies are done.
            copies[key] = _empty_like(x, device).copy_(x, non_blocking=True)
        brought.append(copies[key])
    for source in {x.device for x in xs if x.is_cuda and device.type == "cpu"}:
        torch.cuda.current_stream(source).synchronize()
    return brought


def bring_back(copies: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Copy the tensors that ``space`` or ``bring`` has made back into ``xs``; on CUDA, by the current stream."""
    for copy, x in zip(copies, xs, strict=True):
        if copy is not x:
            x.copy_(copy, non_blocking=x.is_cuda)


def _empty_like(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=device.type == "cpu")
