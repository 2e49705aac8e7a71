"""Planners: how gradients are fused into buckets. ``get`` and ``names`` are the way to them."""

from ._base import Planner, registry
from ._costs import StepCosts

__all__ = ["Planner", "StepCosts", "get", "names"]

get = registry.get
names = registry.names
