"""Brings the arguments of process-group methods, which torch passes in several forms, into one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def tensors(given: Tensor | Sequence[Any]) -> list[Tensor]:
    """Return a list of tensors, given a tensor, a list of tensors, or a list that contains one list of tensors."""
    if isinstance(given, Tensor):
        return [given]
    each = list(given)
    return list(each[0]) if len(each) == 1 and not isinstance(each[0], Tensor) else each


def reduction(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the reduction that a caller asks for, directly or in an options object; SUM if it names none."""
    asked = args[0] if args else kwargs.get("opts", kwargs.get("op"))
    return dist.ReduceOp.SUM if asked is None else getattr(asked, "reduceOp", asked)


def rows(x: Tensor, splits: Iterable[int], size: int) -> list[Tensor] | None:
    """Return each rank's rows of ``x``; None if the splits do not fit: then the native backend raises the error."""
    if not x.dim():
        return None
    count, parts = x.shape[0], list(splits)
    if not parts and count % size == 0:
        parts = [count // size] * size
    if len(parts) != size or sum(parts) != count or min(parts) < 0:
        return None
    return list(x.split(parts))


def native_options(given: Any) -> Any:
    """Return ``given`` if it is an options object of gloo or NCCL, else None."""
    return given if isinstance(given, torch._C._distributed_c10d.Backend.Options) else None
