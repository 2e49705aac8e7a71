"""Which tensors and which plan an engine has: how ranks agree on them, when others take their place, and buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..base.errors import UsageError
from ..base.plan import Bucket, FusionPlan, TensorInfo
from ..codecs import Codec
from ..observe.timeline import Timeline
from ..process.clock import Clock
from ..transport import Transport
from .agreement import Agreement
from .cadence import Cadence
from .fusing import check_pairs
from .layout import BufferMaker, Layout
from .plan_controller import PlanController, StepTimer
from .traffic import Traffic
from .worker import Job

__all__ = ["Course", "check_plan"]


class Course:
    """The tensors of an engine, its present plan and the next one. Ranks compare each before the first payload.

    It has no lock: the engine calls it with its own lock held, or when no hook can run.

    Args:
        agreement: what ranks compare, and what the first plan is made with.
        cadence: knows the present step.
        maker: makes buffers.
        traffic: sends buckets; its lanes compare.
        plan: fixed plan, which ``check_plan`` has checked; None: the first step makes one.
        clock: times the steps.
        timeline: shows how long the plan controller takes.

    Attributes:
        agreement: as given, or of the tensors that were enrolled last.
        plan: the present one; None before the first step.
        next: the one that the next step begins with; None: the present one stays, or the first step makes one.
        layout: the buffers of the present plan.
        watch: times the steps for the plan controller; None: there is none.
    """

    def __init__(
        self,
        agreement: Agreement,
        cadence: Cadence,
        maker: BufferMaker,
        traffic: Traffic,
        plan: FusionPlan | None,
        clock: Clock,
        timeline: Timeline,
    ) -> None:
        self.agreement = agreement
        self._cadence = cadence
        self._maker = maker
        self._traffic = traffic
        self._clock = clock
        self._timeline = timeline
        self.plan = self.next = plan
        self._begin_anew()

    @property
    def coming(self) -> FusionPlan | None:
        """The plan of the next gradient; None if the next step makes one."""
        return self.plan if self.next is None else self.next

    def settle(self) -> None:
        """Find out which tensors leave in the present step, before its first gradient."""
        self._cadence.settle(self.coming, self.agreement.tensors)

    # ---- between steps ----------------------------------------------------------------------------------------------

    def switch(self, plan: FusionPlan) -> None:
        """Adopt another plan when the next step begins; all ranks call it between the same two steps.

        Each tensor keeps its error feedback. Before the first payload the ranks compare the plans.

        In the middle of a period too: which buckets leave follows from the step's number alone. Results that nobody has
        taken keep the numbers of their buckets. They must be taken before a step with tensors of the new plan ends.

        Raises:
            ConfigError: the plan is for other tensors or ranks, a bucket names a codec and a collective that are
                unknown or do not go together, or some do not leave in every step, which this engine cannot do.
        """
        check_plan(plan, self.agreement, self._cadence, self._traffic.size)
        self.next = plan
        if not self._cadence.arrived:
            self.settle()

    def enrol(
        self,
        tensors: Sequence[TensorInfo],
        why: str,
        *,
        codec: Codec | Mapping[str, Codec],
        algorithm: str | None = None,
        ahead: bool | None = None,
        plan: FusionPlan | None = None,
        plan_controller: PlanController | None = None,
        hold_results: bool | None = None,
    ) -> None:
        """Sum these tensors from now on; all ranks call it before the first gradient of the same step.

        That step is as a first one: it learns the order of arrival, and the ranks compare before the first payload.
        Each tensor keeps its error feedback. Until the results of the last step are taken, its buckets stay.

        Args:
            tensors: every tensor of a step from now on; none, and steps are empty.
            why: what has changed on this rank, for the errors of ranks where it has not.
            codec, algorithm, ahead, plan, plan_controller, hold_results: as for a new engine; ``hold_results`` stays
                as it is where it is None, and all results have been taken where it changes.

        Raises:
            UsageError: the step has gradients already.
            ConfigError: the plan is for other tensors or ranks.
            PlanMismatch, TransportError: as from ``synchronize``, if no tensors are left.
        """
        self._traffic.check()
        if self._cadence.arrived:
            raise UsageError(
                f"the tensors of step {self._cadence.step} change after its first gradient; change them before"
            )
        agreement = replace(
            self.agreement,
            tensors={tensor.name: tensor for tensor in tensors},
            codec=codec,
            algorithm=algorithm,
            ahead=ahead,
            plan_controller=plan_controller,
            why=why,
            hold_results=self.agreement.hold_results if hold_results is None else hold_results,
        )
        if hold_results is not None:
            self._cadence.holds, self._maker.in_place = hold_results, not hold_results
        if plan is not None:
            check_plan(plan, agreement, self._cadence, self._traffic.size)
        self.agreement = agreement
        self.plan, self.next = None, plan
        self._begin_anew()
        if not tensors:
            # No gradient will begin this step, so the ranks agree at once.
            self.plan, self.next = FusionPlan((), self._traffic.size), None
            try:
                self._compare(self.plan).wait()
            except BaseException as error:
                self._traffic.fail(error)

    @property
    def may_leave_out(self) -> bool:
        """Whether ``leave_out`` is possible: there is no plan yet, no plan controller, and results are not held."""
        return self.coming is None and self.agreement.plan_controller is None and not self._cadence.holds

    def leave_out(self, names: Collection[str]) -> frozenset[str]:
        """Remove the tensors that at least one rank names, and return their names.

        All ranks call it together, in the first step.

        Raises:
            PlanMismatch: ranks disagree on model or options.
            TransportError: a peer was lost, stopped or too late.
        """
        out: list[frozenset[str]] = []
        leave_out, step = self.agreement.leave_out, self._cadence.step
        self._traffic.put(lambda transport: out.append(leave_out(step, names, transport)))()
        for name in out[0]:
            self._cadence.arrived.pop(name, None)
        return out[0]

    def ask(self, plan_controller: PlanController) -> None:
        """Ask for the next plan on a lane, when all lanes are idle.

        The training thread waits for the answer, so it and the lane never use the controller at the same time.
        """
        results, step = self._traffic.results, self._cadence.step
        # The controller measures: a bucket on another lane would falsify that.
        for index in results.untaken:
            results.wait_for(index)
        start = self._clock.stamp()
        plans: list[FusionPlan | None] = []

        def ask(transport: Transport) -> None:
            with self._timeline.span("PLAN", step=step - 1):
                plans.append(plan_controller.next_plan(transport))

        self._traffic.queue(ask).wait()
        if plans[0] is not None:
            self.switch(plans[0])
        if self.watch is not None:
            self.watch.leave_out(start)

    # ---- within a step ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Adopt the next plan, if there is one, and the codecs' settings for this step."""
        if self.next is not None:
            self.plan, self.next = self.agreement.shared(self.next), None
            self._compare(self.plan)
            self._adopt(self.plan)
        elif self.layout.codecs_change and self.layout.is_stale(self._cadence.step):
            assert self.plan is not None
            self._traffic.results.settle()
            self.layout.renew(self.plan, self._cadence.step)
            self._traffic.sender.begin_anew(len(self.plan.buckets))
        if self._cadence.skips:
            self._traffic.sender.order.sequence = self._cadence.leaving

    def learn(self) -> None:
        """Adopt the plan by rank 0's order of arrival; the training thread, which reads no tensors, waits for it."""
        plans: list[FusionPlan] = []
        make, step, arrived = self.agreement.make_plan, self._cadence.step, self._cadence.arrived
        self._traffic.queue_first(lambda transport: plans.append(make(step, arrived, transport))).wait()
        self.plan = plans[0]
        self._adopt(self.plan)

    def lay_out(self, index: int, bucket: Bucket) -> None:
        """Put ``bucket`` into the plan at ``index``, unless it is there already, and drop all buckets after it."""
        known = () if self.plan is None else self.plan.buckets
        if self.agreement.shares:  # asked for each bucket of each step
            (bucket,) = self.agreement.shared(FusionPlan((bucket,), self._traffic.size)).buckets
        if index < len(known) and known[index] == bucket:
            return
        self.plan = FusionPlan((*known[:index], bucket), self._traffic.size)
        self._compare(self.plan)
        self.layout.cut_to(index, bucket, self._cadence.step)
        self._traffic.sender.begin_anew(index + 1)

    def _begin_anew(self) -> None:
        """Have no buffers, and time the steps if there is a plan controller."""
        self.watch = None if self.agreement.plan_controller is None else StepTimer(self._clock)
        self._traffic.sender.watch = self._traffic.results.watch = self.watch
        self.layout = self._laid_out(FusionPlan((), self._traffic.size))
        self._traffic.sender.begin_anew(0)
        self.settle()

    def _compare(self, plan: FusionPlan) -> Job:
        """Compare a plan with the other ranks' before any lane sends what is put later; return the job."""
        return self._traffic.queue_first(partial(self.agreement.compare, self._cadence.step, plan))

    def _adopt(self, plan: FusionPlan) -> None:
        # New buffers take over the residuals, so no old buffer may still change them. Results may still be untaken.
        self._traffic.results.settle()
        self.layout = self._laid_out(plan)
        self._traffic.sender.begin_anew(len(plan.buckets))

    def _laid_out(self, plan: FusionPlan) -> Layout:
        return Layout(plan, self._cadence.step, self._maker, self.agreement.tensors)


def check_plan(plan: FusionPlan, agreement: Agreement, cadence: Cadence, size: int) -> None:
    """Raise ``ConfigError`` if an engine of ``size`` ranks cannot have this plan; ``Course.switch`` says when."""
    plan.check(agreement.tensors.values(), size)
    check_pairs(plan)
    cadence.check(plan, agreement.plan_controller)
