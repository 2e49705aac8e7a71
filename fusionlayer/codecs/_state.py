"""The state that is kept of one tensor between steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

if TYPE_CHECKING:
    from ._packed import PackedResidual

__all__ = ["Part", "TensorState"]


@dataclass
class TensorState:
    """What a codec keeps of a tensor of n elements for its next step.

    Attributes:
        residual: (n,) f32, what has not been sent yet; None if nothing is kept.
        tensors: other tensors that a codec keeps on the device of its gradients, flat f32, by name, such as DGC's
            "velocity", (n,), or numbers that the host need not know, such as a "threshold" and its age.
        numbers: numbers of the host that a codec keeps, by name.
        packed: the residual in 8 bits, in place of ``residual`` between two steps; None: it is not packed.
        ADDED: names of ``tensors`` that add up, as residuals do, where one rank replaces several.
        SHARED: names of ``tensors`` that all ranks must hold alike.
    """

    ADDED: ClassVar = frozenset({"velocity"})
    SHARED: ClassVar = frozenset({"right"})

    residual: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    packed: PackedResidual | None = None


@dataclass(frozen=True)
class Part:
    """The place, shape and state of one tensor inside a flat tensor.

    Attributes:
        name: name of the tensor.
        shape: shape of the tensor.
        start: place of its first element in the flat tensor; the others follow in row-major order.
        state: what the codec keeps of it. Error feedback uses the residual of the collective, not that of this state.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    state: TensorState = field(default_factory=TensorState)

    @property
    def stop(self) -> int:
        """The place behind its last element."""
        return self.start + math.prod(self.shape)
