"""Makes the engines and the plans of a distributed optimizer, from its arguments and its step policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from .. import context
from ..base.plan import TensorInfo
from ..collectives import Scaling
from ..functional import Average, Group, ReduceOp
from ..observe.timeline import Timeline
from ..scheduler import Engine
from . import overlap
from .construction import Arrange, GradientOptions, make_engine, make_planning
from .enrolment import Enrolment
from .parameters import describe
from .reduction_policy import ReductionPolicy
from .replicas import Replicas


@dataclass(frozen=True)
class Connection:
    """The arguments for an optimizer's engines, also after a change of ranks or parameters.

    Attributes:
        options: how to fuse and encode.
        policy: may change the options and the values that are sent.
        enrolment: the parameters.
        replicas: the tensors that must be equal on all ranks.
        op, predivide: how gradients are scaled.
        groups: buckets that the user gives.
        group: process group or transport; None: all ranks.
        overlapped: the model whose forward overlaps the step's end; None: none does.
    """

    options: GradientOptions
    policy: ReductionPolicy
    enrolment: Enrolment
    replicas: Replicas
    op: ReduceOp
    predivide: float
    groups: int | Sequence[Sequence[Tensor]] | None
    group: Group
    overlapped: nn.Module | None

    def check_later(self, names: Mapping[Tensor, str], arrange: Arrange) -> None:
        """Raise ``ConfigError`` for wrong options of later steps, whose planning ``arrange`` returns."""
        place, tensors = context.transport(self.group), self._describe(names)
        planning = make_planning(self.options, tensors, place.rank, place.node_sizes, self.enrolment.device, False)
        arrange(planning, tensors, place.node_sizes)

    def connect(self, names: Mapping[Tensor, str], rejoining: bool = False) -> tuple[Engine | None, Timeline]:
        """Return an engine for the parameters in ``names``, and its timeline; no engine in a job of one rank."""
        transport = context.transport(self.group)
        scaling = Scaling(1 / transport.size if self.op is Average else 1.0)
        if self.op is Average and self.predivide != 1.0:
            scaling = Scaling(1 / self.predivide, self.predivide / transport.size)
        timeline = Timeline(context.settings().timeline if transport.size > 1 else None, transport.rank)
        tensors = self._describe(names)
        engine = make_engine(
            self.policy.options(self.options),
            tensors,
            transport,
            self.enrolment.device,
            arrange=self.policy.arrange,
            more=self.policy.more_tensors(tensors),
            scaling=scaling,
            timeline=timeline,
            overlap_forward=self.overlapped is not None,
            hold_results=self.policy.holds_results,
            undoable=self.policy.undoable,
            idle=self._idle(names),
        )
        if transport.size == 1:
            # It was made to have all options checked, so that a mistake shows before there are other ranks.
            engine.close()
            return None, timeline
        engine.put(partial(self.replicas.unite, rejoining=rejoining))()
        return engine, timeline

    def plan_anew(self, engine: Engine, names: Mapping[Tensor, str], why: str) -> None:
        """Let the step that begins make a plan for the parameters in ``names``; ``why`` is a clause for the log."""
        if self.overlapped is not None:
            overlap.check_parameters(names, self.overlapped)
        tensors = self._describe(names)
        overlaps = self.overlapped is not None
        options = self.policy.options(self.options)
        device, idle = self.enrolment.device, self._idle(names)
        planning = self.policy.arrange(
            make_planning(options, tensors, engine.rank, engine.nodes, device, overlaps, idle=idle, changed=True),
            tensors,
            engine.nodes,
        )
        engine.enrol(
            [*tensors, *self.policy.more_tensors(tensors)],
            why,
            codec=planning.codec,
            algorithm=planning.algorithm,
            ahead=planning.ahead,
            plan=planning.plan,
            plan_controller=planning.plan_controller,
            hold_results=self.policy.holds_results,
        )

    def _describe(self, names: Mapping[Tensor, str]) -> list[TensorInfo]:
        return describe(names, self.groups, self.enrolment.names)

    def _idle(self, names: Mapping[Tensor, str]) -> list[str]:
        return [name for parameter, name in self.enrolment.names.items() if parameter not in names]
