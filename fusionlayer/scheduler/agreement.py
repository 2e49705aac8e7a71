"""The comparison before a plan's first payload, and the agreement on the first plan."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.errors import FusionLayerError, PlanMismatch
from ..base.plan import FusionPlan, TensorInfo
from ..codecs import Codec
from ..collectives import TAKES_SHARES
from ..observe.timeline import Timeline
from ..transport import Transport
from .fusing import check_pairs, fuse
from .plan_controller import PlanController
from .planners import Planner

_SHOWN = 3  # tensors in an error
_MOST_LIST_BYTES = 64 << 20


@dataclass
class Agreement:
    """The tensors and options of an engine, and the inputs of its first plan. All ranks must have the same.

    Its methods send, so they run on a lane, on all ranks together.

    Attributes:
        tensors: every tensor of a step, by name; ``leave_out`` removes some.
        codec: the codec of all gradients, or of each by its name.
        algorithm: collective; None chooses.
        ahead: encode each tensor by itself as it arrives; None: the codec's default.
        planner: makes the plan.
        options: further options, as texts.
        plan_controller: changes plans while training runs; None: nothing does.
        timeline: shows when ranks compare.
        hold_results: gradients stay unchanged, and results wait to be taken.
        shares: of a plan's buckets that can have shares and have none of their own; empty: equal ones.
        on_device: whether gradients are on a device.
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
    on_device: bool = False
    why: str = ""

    def compare(self, step: int, plan: FusionPlan | None, transport: Transport) -> None:
        """Raise ``PlanMismatch``, with ranks and tensors, unless model, options and plan equal those of other ranks."""
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
                differences = _tensors_that_differ(self.tensors.values(), transport)
                raise PlanMismatch(f"{error}{differences}", error.ranks) from None
        self.why = ""

    def shared(self, plan: FusionPlan) -> FusionPlan:
        """Return ``plan`` with the shares of the ranks."""
        return plan.shared(self.shares, TAKES_SHARES)

    def make_plan(self, step: int, arrived: Iterable[str], transport: Transport) -> FusionPlan:
        """Compare, take rank 0's order of arrival, plan with it, and compare the plans."""
        self.compare(step, None, transport)
        names = sorted(self.tensors)
        position = {name: i for i, name in enumerate(names)}
        order = torch.tensor([position[name] for name in arrived], device="cpu")
        transport.broadcast(order, 0)
        tensors = [self.tensors[names[i]] for i in order.tolist()]
        plan = fuse(
            tensors,
            self.planner,
            self.codec,
            transport.node_sizes,
            algorithm=self.algorithm,
            ahead=self.ahead,
            on_device=self.on_device,
        )
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


def _tensors_that_differ(tensors: Iterable[TensorInfo], transport: Transport) -> str:
    """Return a clause that names the tensors which not all ranks have, or have with the same size and type.

    All ranks call it together, after their digests have been found to differ. It is empty if all tensors are equal, or
    if a rank does not know its own order.
    """
    mine = json.dumps([(t.name, t.numel, t.dtype) for t in tensors]).encode()
    try:
        length = torch.tensor([len(mine)], device="cpu")
        transport.all_reduce_max(length)
        if int(length) > _MOST_LIST_BYTES:
            return ""
        every = transport.all_gather_bytes(mine.ljust(int(length)))
        lists: list[set[Any]] = [{tuple(tensor) for tensor in json.loads(each)} for each in every]
    except (FusionLayerError, ValueError):
        return ""  # a rank of another version, perhaps; that the digests differ is known
    differ = sorted({tensor[0] for tensor in set.union(*lists) - set.intersection(*lists)})
    if not differ:
        return ""
    shown = []
    for name in differ[:_SHOWN]:
        have = [rank for rank, tensors in enumerate(lists) if any(name == other for other, *_ in tensors)]
        where = f"only on ranks {have}" if len(have) < len(lists) else "of several sizes or types"
        shown.append(f"{name!r} {where}")
    more = f" and {len(differ) - _SHOWN} more" if differ[_SHOWN:] else ""
    return (
        f"; tensors that differ: {', '.join(shown)}{more}; freeze, unfreeze and add parameters on all ranks in one step"
    )
