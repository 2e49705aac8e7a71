"""What is kept of one tensor between steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Part", "TensorState"]


@dataclass
class TensorState:
    """What sending a tensor of n elements leaves for its next step.

    Attributes:
        residual: (n,) f32, what has not been sent yet; None where nothing is kept.
        tensors: what else a codec keeps, flat f32 each, by name: DGC's "velocity", (n,).
        numbers: what a codec remembers of its last steps, by name: thresholds, ages, stages.
    """

    residual: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A tensor inside a flat one that is summed as a whole.

    Attributes:
        name: of the tensor.
        shape: of the tensor.
        start: its first element in the flat one; the others follow in row-major order.
        state: what is kept of it; the residual is the collective's, not this one.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    state: TensorState = field(default_factory=TensorState)

    @property
    def stop(self) -> int:
        """Behind its last element."""
        return self.start + math.prod(self.shape)
