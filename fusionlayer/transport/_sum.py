"""The sum of the ranks' tensors, in one order and with one rounding, so that every rank gets the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Set ``out`` to parts[0] + parts[1] + ..., added in that order; ``out`` may be one of the parts.

    float16 and bfloat16 are added in float32 and rounded once. Shapes and dtypes are equal; ``out`` may be float32.
    """
    if len(parts) == 1:
        out.copy_(parts[0])
    elif len(parts) == 2 and parts[0].dtype == out.dtype:
        torch.add(parts[0], parts[1], out=out)
    else:
        wide = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part
        out.copy_(total)
