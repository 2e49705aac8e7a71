"""Which part of a DTensor a rank publishes."""

from __future__ import annotations

from typing import Any

import torch

from .snapshot import Box, Shard

__all__ = ["is_sharded", "shard_of"]


def is_sharded(x: Any) -> bool:
    """Return whether ranks hold different parts of ``x``."""
    return type(x).__name__ == "DTensor" and any(each.is_shard() for each in x.placements) and x.device_mesh.size() > 1


def shard_of(x: Any) -> Shard | None:
    """Return what this rank publishes of a DTensor: nothing if another rank has the same part; None: it has no box."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Replicate
    from torch.distributed.tensor.placement_types import Shard as Cut

    if not all(type(each) in (Cut, Replicate) for each in x.placements):  # partial sums, FSDP2 over rows that are cut
        return None
    place = x.device_mesh.get_coordinate()
    copies = [at for at, each in zip(place or (), x.placements, strict=False) if isinstance(each, Replicate)]
    if place is None or any(copies):
        nothing: Box = ((0, 0),) * x.dim()
        return Shard(nothing, tuple(x.shape))
    shape, starts = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    if torch.Size(shape) != x.to_local().shape:
        return None
    if not all(shape):
        starts = (0,) * x.dim()
    return Shard(tuple(zip(starts, shape, strict=True)), tuple(x.shape))
