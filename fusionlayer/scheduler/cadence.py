"""The present step of an engine: what leaves in it, as a plan may let a bucket leave once in several steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch import Tensor

from ..base.errors import ConfigError, UsageError
from ..base.plan import FusionPlan, TensorInfo
from .plan_controller import PlanController

__all__ = ["Cadence"]


class Cadence:
    """The number of the present step, the tensors that leave in it, and the gradients that have arrived.

    What leaves follows from the plan and the number of the step alone.

    Args:
        holds: results wait to be taken, any number of steps.
        overlaps: results are held for the next forward.

    Attributes:
        holds: as given.
        step: number of the present step.
        arrived: its gradients so far, by name.
        due: the tensors that leave in it, by name.
        skips: whether there are buckets that do not leave in each step.
        leaving: numbers of the buckets that leave in it, in their order; only if ``skips``.
    """

    def __init__(self, holds: bool, overlaps: bool) -> None:
        self.holds = holds
        self._overlaps = overlaps
        self.step = 0
        self.arrived: dict[str, Tensor] = {}
        self.due: Mapping[str, TensorInfo] = {}
        self.skips = False
        self.leaving: Sequence[int] = ()

    def settle(self, plan: FusionPlan | None, tensors: Mapping[str, TensorInfo]) -> None:
        """Find out what leaves in the step, before its first gradient.

        Args:
            plan: of the step; None: it makes one, and all tensors leave.
            tensors: of the plan, by name.
        """
        self.due = tensors
        self.skips = plan is not None and plan.skips
        if plan is not None and self.skips:
            self.leaving = plan.due(self.step)
            self.due = {name: tensors[name] for index in self.leaving for name in plan.buckets[index].names}

    def check(self, plan: FusionPlan, plan_controller: PlanController | None) -> None:
        """Raise ``ConfigError`` if the plan has buckets that skip steps, and the engine needs each in each step."""
        if not plan.skips:
            return
        why = ""
        if plan_controller is not None:
            why = "planners that need costs expect each bucket in each step; leave them out"
        elif self._overlaps:
            why = "overlap_forward expects each bucket in each step; leave it out"
        elif not self.holds:
            why = "this trainer sends each bucket in each step; expected a plan without 'every'"
        if why:
            raise ConfigError(f"plan: it has buckets that leave once in several steps, but {why}")

    def refuse_begun(self, what: str) -> None:
        """Raise ``UsageError`` if the step has begun while ``what``, a clause, happens."""
        if self.arrived:
            raise UsageError(f"{what} after the first gradient of step {self.step}; do it between two steps")

    def refuse_missing(self) -> NoReturn:
        """Raise ``UsageError`` that tells which gradients are missing at the end of the step."""
        missing = [name for name in self.due if name not in self.arrived]
        raise UsageError(
            f"{len(missing)} of {len(self.due)} gradients have not come in step {self.step}, the first is that of "
            f"{missing[0]!r}: backward ended without it; use the parameter in each forward, or freeze it"
        )

    def refuse(self, name: str, tensors: Mapping[str, TensorInfo]) -> NoReturn:
        """Raise ``UsageError`` for the gradient of a tensor that is not ``due``."""
        if name not in tensors:
            raise UsageError(f"gradient {name!r} is not one of this engine's {len(tensors)} tensors")
        raise UsageError(
            f"gradient {name!r} was submitted in step {self.step}, in which it does not leave; submit those in due"
        )
