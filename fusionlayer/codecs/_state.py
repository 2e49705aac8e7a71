"""What is kept of one tensor between steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["TensorState"]


@dataclass
class TensorState:
    """What sending a tensor of n elements leaves for its next step.

    Attributes:
        residual: (n,) f32, what has not been sent yet; None where nothing is kept.
        tensors: what else a codec keeps, (n,) f32 each, by name: DGC's "velocity".
        numbers: what a codec remembers of its last steps, by name: thresholds, ages, stages.
    """

    residual: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
