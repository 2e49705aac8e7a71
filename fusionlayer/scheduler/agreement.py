"""What ranks compare before the first payload of a plan, and how they come to their first plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..base.errors import PlanMismatch
from ..base.plan import FusionPlan, TensorInfo
from ..codecs import Codec
from ..collectives import TAKES_SHARES
from ..observe.timeline import Timeline
from ..transport import Transport
from .failure import tensors_that_differ
from .fusing import check_pairs, fuse
from .plan_controller import PlanController
from .planners import Planner

__all__ = ["Agreement"]


@dataclass
class Agreement:
    """The tensors and options of an engine, and what it makes its first plan with. All ranks must have the same.

    Its methods send, so they run on a lane, on all ranks together.

    Attributes:
        tensors: every tensor of a step, by name; ``leave_out`` removes some.
        codec: of all gradients, or of each by its name.
        algorithm: collective; None chooses.
        ahead: encode each tensor by itself as it arrives; None as the codec does.
        planner: makes the plan.
        options: further options, as texts.
        plan_controller: changes plans while training runs; None: nothing does.
        timeline: shows when ranks compare.
        hold_results: gradients stay as they are, and results wait to be taken.
        shares: of a plan's buckets that can have shares and have none of their own; empty: equal ones.
        why: why the tensors have changed, for errors; forgotten when the ranks have agreed on that.
    """

    tensors: dict[str, TensorInfo]
    codec: Codec | Mapping[str, Codec]
    algorithm: str | None
    ahead: bool | None
    planner: Planner
    options: Sequence[str]
    plan_controller: PlanController | None
    timeline: Timeline
    hold_results: bool = False
    shares: tuple[int, ...] = ()
    why: str = ""

    def compare(self, step: int, plan: FusionPlan | None, transport: Transport) -> None:
        """Compare model, options and plan with the other ranks.

        Raises:
            PlanMismatch: they differ; the error names ranks and tensors.
        """
        names = sorted(self.tensors)
        facts: list[object] = [[self.tensors[name] for name in names], *self.options]
        facts += [f"step {step}", f"plan_controller {self.plan_controller}", f"hold {self.hold_results}"]
        facts.append(f"shares {self.shares}")
        if plan is not None:
            facts.append(plan)
        else:
            codec = self.codec if isinstance(self.codec, Codec) else [self.codec[name] for name in names]
            facts += [codec, self.algorithm, self.ahead, str(self.planner)]
        with self.timeline.span("NEGOTIATE_ALLREDUCE"):
            try:
                transport.agree("the fusion plan (model, codec, options)", *facts, why=self.why)
            except PlanMismatch as error:
                differences = tensors_that_differ(self.tensors.values(), transport)
                raise PlanMismatch(f"{error}{differences}", error.ranks) from None
        self.why = ""

    def shared(self, plan: FusionPlan) -> FusionPlan:
        """Return ``plan`` with the shares of the ranks."""
        return plan.shared(self.shares, TAKES_SHARES)

    def make_plan(self, step: int, arrived: Iterable[str], transport: Transport) -> FusionPlan:
        """Compare, take rank 0's order of arrival, plan with it, and compare the plans.

        Args:
            step: the present one.
            arrived: names of all tensors, in the order in which they arrived on this rank.
            transport: of the lane.
        """
        self.compare(step, None, transport)
        names = sorted(self.tensors)
        position = {name: i for i, name in enumerate(names)}
        order = torch.tensor([position[name] for name in arrived], device="cpu")
        transport.broadcast(order, 0)
        tensors = [self.tensors[names[i]] for i in order.tolist()]
        plan = fuse(tensors, self.planner, self.codec, transport.size, algorithm=self.algorithm, ahead=self.ahead)
        plan = self.shared(plan)
        plan.check(self.tensors.values(), transport.size)
        check_pairs(plan)
        transport.agree("the fusion plan that was made", plan)
        return plan

    def leave_out(self, step: int, names: Collection[str], transport: Transport) -> frozenset[str]:
        """Compare, remove the tensors that at least one rank names, and return their names."""
        known = sorted(self.tensors)
        named = torch.tensor([float(name in names) for name in known], device="cpu")
        self.compare(step, None, transport)
        transport.all_reduce(named)
        out = frozenset(name for name, count in zip(known, named.tolist(), strict=True) if count)
        for name in out:
            del self.tensors[name]
        return out
