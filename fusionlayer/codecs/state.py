"""The state that is kept of one tensor between steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor


class StoredResidual(Protocol):
    """A residual in fewer bits, as ``PackedResidual`` keeps it between two steps."""

    numel: int

    def unpack(self, out: Tensor) -> Tensor:
        """Fill ``out`` (n,) f32 with the residual; return it."""

    def pack(self, x: Tensor, seed: int | None = None) -> None:
        """Keep the residual ``x`` (n,) f32; ``seed`` is for stochastic rounding; None rounds to the nearest."""


@dataclass
class TensorState:
    """The state that a codec keeps of a tensor of n elements for its next step.

    Attributes:
        residual: (n,) f32, the unsent values; None if nothing is kept.
        tensors: other tensors that a codec keeps on the device of its gradients, flat f32, by name, such as DGC's
            "velocity", (n,), or numbers that the host need not know, such as a "threshold" and its age.
        numbers: numbers of the host that a codec keeps, by name.
        packed: the residual in 8 bits, instead of ``residual`` between two steps; None: it is not packed.
        ADDED: names of ``tensors`` that add up, as residuals do, where one rank replaces several.
        SHARED: names of ``tensors`` that all ranks must hold alike.
    """

    ADDED: ClassVar = frozenset({"velocity"})
    SHARED: ClassVar = frozenset({"right"})

    residual: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    packed: StoredResidual | None = None


@dataclass(frozen=True)
class Part:
    """The place, shape and state of one tensor inside a flat tensor.

    Attributes:
        name: name of the tensor.
        shape: shape of the tensor.
        start: position of its first element in the flat tensor; the others follow in row-major order.
        state: the state that the codec keeps of it. Error feedback uses the residual of the collective, not that of
            this state.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    state: TensorState = field(default_factory=TensorState)

    @property
    def stop(self) -> int:
        """The position after its last element."""
        return self.start + math.prod(self.shape)
