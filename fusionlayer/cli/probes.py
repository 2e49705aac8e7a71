"""Checks of ``fusionlayer doctor`` that run in processes of their own, in case a library aborts its process."""

from __future__ import annotations

import torch

from .. import context
from ..functional import Sum, all_reduce


def sum_over_ranks() -> None:
    """Sum over the job's ranks with and without a codec. Rank 0 prints which transport moved the bytes."""
    context.init(timeout=60)
    rank, size = context.rank(), context.size()
    for codec in ("raw", "int8"):
        x = torch.full((5000,), float(rank + 1), device="cpu")
        all_reduce(x, codec=codec, op=Sum)
        torch.testing.assert_close(x, torch.full((5000,), size * (size + 1) / 2, device="cpu"), rtol=0.01, atol=0)
    if rank == 0:
        print(f"{size} processes, {type(context.transport()).__name__}", flush=True)
    context.shutdown()
