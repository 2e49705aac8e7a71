"""What the traffic of DeepSpeed is sent as, by the names of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BASELINE", "LIMITS", "section"]

BASELINE = "gloo"

_SECTIONS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    "raw": {"gradients": "raw"},
    "int8": {"gradients": "int8"},
    "int4": {"gradients": "int4"},
    "int4, no feedback": {"gradients": "int4", "error_feedback": False},
    "int8 all": {"gradients": "int8", "weights": "int8"},
    "zero++": {"zero_plus_plus": True},
    "1-bit": {"one_bit": True},
}

LIMITS = {"int8": 0.005, "int4": 0.01}
"""By how much of the baseline's a validation loss may differ."""


def section(name: str, kind: str) -> Mapping[str, Any] | None:
    """Return the section of a variant; ``ValueError`` if there is none of that name.

    Activations of pipelines and experts travel as the gradients do with int8, and as int8 with int4.
    """
    if name not in _SECTIONS:
        raise ValueError(f"{name!r} is not known; choose from {', '.join(_SECTIONS)}")
    found = _SECTIONS[name]
    if found is None or kind not in ("moe", "pipeline") or name not in ("int8", "int4"):
        return found
    return {**found, "activations": "int8"}
