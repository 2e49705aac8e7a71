"""Copies of tensors where a link can reach them: pinned host memory for gloo, the device for NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["bring", "bring_back", "space"]


def space(xs: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors themselves where they are on such a device, else uninitialised ones of their shape there."""
    return [x if x.device.type == device.type else _empty_like(x, device) for x in xs]


def bring(xs: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors, or copies of them on the device; a tensor that stands there twice is copied once.

    What is on the host may be read at once, what is on the device by the current stream.
    """
    copies: dict[tuple[int, int], Tensor] = {}
    brought = []
    for x in xs:
        if x.device.type == device.type:
            brought.append(x)
            continue
        key = (x.data_ptr(), x.numel())
        if key not in copies:
            # torch keeps pinned memory that is given back, and does not give it out again before its copies are done.
            copies[key] = _empty_like(x, device).copy_(x, non_blocking=True)
        brought.append(copies[key])
    for source in {x.device for x in xs if x.is_cuda and device.type == "cpu"}:
        torch.cuda.current_stream(source).synchronize()
    return brought


def bring_back(copies: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Copy what ``space`` or ``bring`` has made to where it belongs, on the current stream if that is a device."""
    for copy, x in zip(copies, xs, strict=True):
        if copy is not x:
            x.copy_(copy, non_blocking=x.is_cuda)


def _empty_like(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=device.type == "cpu")
