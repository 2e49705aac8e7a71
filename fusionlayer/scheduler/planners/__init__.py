"""Planners: they fuse gradients into buckets. ``get`` returns one by name, ``names`` lists them."""

from ._base import Planner, registry
from ._costs import StepCosts

__all__ = ["Planner", "StepCosts", "get", "knows", "names"]

get = registry.get
knows = registry.knows
names = registry.names
