"""Costs of a top-k codec made of torch's operations: what a profile has where no codec has that name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusionlayer.scheduler.profiler import Points, cpu_seconds

__all__ = ["measure_sparse"]

DENSITY = 0.01


def measure_sparse(sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return the costs of sending 1 % of the elements as f32 and index, with error feedback."""
    curves: dict[str, Points] = {"encode": [], "decode": [], "sum": [], "recode": []}
    for size in sizes:
        x = torch.randn(size, generator=torch.Generator().manual_seed(0))
        residual, out = torch.zeros(size), torch.zeros(size)
        count = max(1, int(DENSITY * size))
        values, chosen = _largest(x, residual, count)
        encode = cpu_seconds(partial(_largest, x, residual, count), repeats)
        decode = cpu_seconds(partial(_scatter, values, chosen, out), repeats)
        found = {"encode": encode, "decode": decode, "sum": decode, "recode": encode + decode}
        for verb, seconds in found.items():
            curves[verb].append([size, seconds])
    return {"bits": DENSITY * 64, "lossless": False, "algorithm": "one_shot", **curves}


def _largest(x: Tensor, residual: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return values and places of the largest elements of ``x + residual``; the residual keeps the others."""
    residual += x
    chosen = residual.abs().topk(count, sorted=False).indices
    values = residual[chosen]
    residual[chosen] = 0
    return values, chosen


def _scatter(values: Tensor, chosen: Tensor, out: Tensor) -> None:
    out.zero_()
    out.index_add_(0, chosen, values)
