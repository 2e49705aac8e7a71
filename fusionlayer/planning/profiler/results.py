"""Turns measurements into the costs of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..cost_model import CodecCost, Curve, LinkCost
from .averages import Points


def as_curve(points: Points) -> Curve:
    """Return measured points as a cost."""
    return Curve(tuple((size, seconds) for size, seconds in points))


def as_codecs(found: Mapping[str, Mapping[str, Any]]) -> dict[str, CodecCost]:
    """Return the result of ``measure_codecs`` as costs."""
    return {name: CodecCost(**_with_curves(costs)) for name, costs in found.items()}


def as_link(found: Mapping[str, Any], overhead: float) -> LinkCost:
    """Return the result of ``measure_link`` as costs; ``overhead``: CPU seconds of a further message."""
    costs = _with_curves(found)
    named: dict[str, Any] = {key: costs.get(key) for key in ("cpu_per_byte", "exchange", "all_reduce", "sum_per_byte")}
    return LinkCost(costs["latency"], overhead, **named)


def _with_curves(costs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: as_curve(value) if isinstance(value, list) else value for key, value in costs.items()}
