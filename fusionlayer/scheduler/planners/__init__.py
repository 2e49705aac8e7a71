"""Planners: how gradients are fused into buckets. ``get`` and ``names`` are the way to them."""

from ._base import Planner, registry

__all__ = ["Planner", "get", "names"]

get = registry.get
names = registry.names
