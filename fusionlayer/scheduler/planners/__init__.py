"""Planners: how gradients are fused into buckets. ``get`` and ``names`` are the way to them."""

from ._base import Planner, registry
from ._costs import Prediction, Span, StepCosts, predict

__all__ = ["Planner", "Prediction", "Span", "StepCosts", "get", "names", "predict"]

get = registry.get
names = registry.names
