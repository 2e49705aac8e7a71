"""``ReductionPolicy``: what ``Reducer`` and ``Connection`` ask of the policy of a distributed optimizer's steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..base.plan import TensorInfo
from .construction import EnginePlanning, GradientOptions


class ReductionPolicy(ABC):
    """The part of a ``StepPolicy`` by which gradients are reduced. It imports no ``Reducer``, which imports it.

    Attributes:
        takes_gradients: hooks submit gradients as backward makes them. False: the policy submits tensors itself.
        may_end_with_backward: the end of ``backward`` may wait for the results. False: only ``step`` does.
        retries: a step whose exchange has failed can be made again, so its gradients stay pending.
        undoable: the engine keeps what error feedback was before a step.
        handles_overflow: ``GradScaler`` calls ``step`` also where it has found gradients that are not finite.
        holds_results: results stay in the engine until they are taken; gradients stay unchanged.
        before_step: called before the first tensor of a step of the engine is submitted; None: nothing is to be done.
        contribution: called with a parameter whose gradient is complete, or at the end of a step with one without a
            gradient: it puts the values to send into ``parameter.grad``. None: gradients are sent.
    """

    takes_gradients = True
    may_end_with_backward = True
    retries = False
    undoable = False
    handles_overflow = False
    holds_results = False
    before_step: Callable[[], object] | None = None
    contribution: Callable[[Tensor], object] | None = None

    def options(self, options: GradientOptions) -> GradientOptions:
        """Return the planning options of the present steps, from those of the user."""
        return options

    def more_tensors(self, tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
        """Return tensors to send besides those of the parameters, which ``tensors`` describe."""
        return []

    def arrange(self, planning: EnginePlanning, tensors: Sequence[TensorInfo], nodes: Sequence[int]) -> EnginePlanning:
        """Return the planning of these steps, from that of steps that send ``tensors``."""
        return planning

    @abstractmethod
    def attach(self, reducer: Any) -> None:
        """Begin with a new engine of the ``Reducer``, or with none in a job of one rank."""

    @abstractmethod
    def detach(self) -> None:
        """Let the reducer go, whose optimizer has ended."""

    def recover(self, error: BaseException) -> bool:
        """Return whether backward continues after an exchange has failed in a hook, because ``step`` makes it again."""
        return False

    @abstractmethod
    def is_in_flight(self, parameter: Tensor) -> bool:
        """Return whether a parameter has something that is not reduced yet, though it may be frozen by now."""

    @abstractmethod
    def stand_in(self) -> None:
        """Take part in a step of the other ranks after this rank has joined; update nothing."""

    @abstractmethod
    def leave(self) -> None:
        """Let operations in flight end, before this rank leaves the job."""
