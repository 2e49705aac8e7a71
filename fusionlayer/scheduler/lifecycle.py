"""An engine between its steps and at its end: another plan, other tensors, saved state, failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch

from ..base.errors import UsageError, again
from ..base.plan import FusionPlan, TensorInfo
from ..codecs import Codec
from ..observe.timeline import Timeline
from ..transport import Transport
from ..transport._capture import refuse_capture
from .lanes import Lanes
from .plan_controller import PlanController
from .plan_state import PlanState
from .results import Results
from .step import Step


class Lifecycle:
    """The part of ``Engine`` that its steps do not come by. The thread that ends steps calls all of it.

    Attributes:
        lanes: the communication threads or streams, and the buckets in flight.
        failure: the error that a step has failed with, or None. The engine is then closed, and every call raises it.
    """

    lanes: Lanes
    failure: BaseException | None
    _step: Step
    _plans: PlanState
    _results: Results
    _device: torch.device
    _timeline: Timeline

    @property
    def step(self) -> int:
        """Number of the present step."""
        return self._step.number

    @step.setter
    def step(self, step: int) -> None:
        self._step.number = step

    @property
    def plan(self) -> FusionPlan | None:
        """The present plan; None before the first step."""
        return self._plans.plan

    @property
    def plan_controller(self) -> PlanController | None:
        """The source of another plan for the engine between two steps."""
        return self._plans.agreement.plan_controller

    # ---- between steps ----------------------------------------------------------------------------------------------

    def switch(self, plan: FusionPlan) -> None:
        """Adopt another plan when the next step begins; all ranks call it between the same two steps.

        Each tensor keeps its error feedback. Before the first payload the ranks compare the plans.

        In the middle of a period too: which buckets are due follows from the step's number alone. Results that were not
        taken keep the numbers of their buckets. They must be taken before a step with tensors of the new plan ends.

        Raises:
            ConfigError: the plan is for other tensors or ranks, a bucket names a codec and a collective that are
                unknown or incompatible, or it skips steps, which this engine cannot do.
        """
        self._plans.switch(plan)

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

        That step is like a first one: it learns the order of arrival, and the ranks compare before the first payload.
        Each tensor keeps its error feedback. Until the results of the last step are taken, its buckets stay.

        Args:
            tensors: every tensor of a step from now on; none, and steps are empty.
            why: the change on this rank, for the errors of ranks without it. codec, algorithm, ahead, plan,
                plan_controller, hold_results: as for a new engine; ``hold_results`` None keeps the present value; all
                    results have been taken when it changes.

        Raises:
            UsageError: the step has gradients already.
            ConfigError: the plan is for other tensors or ranks.
            PlanMismatch, TransportError: as from ``synchronize``, if no tensors are left.
        """
        self._check()
        if self._step.arrived:
            raise UsageError(f"the tensors of step {self.step} change after its first gradient; change them before")
        agreement = replace(
            self._plans.agreement,
            tensors={tensor.name: tensor for tensor in tensors},
            codec=codec,
            algorithm=algorithm,
            ahead=ahead,
            plan_controller=plan_controller,
            why=why,
            hold_results=self._plans.agreement.hold_results if hold_results is None else hold_results,
        )
        job = self._plans.enrol(agreement, plan)
        if job is not None:
            try:
                job.wait()
            except BaseException as error:
                self.fail(error)

    @property
    def may_leave_out(self) -> bool:
        """Whether ``leave_out`` is possible: there is no plan yet, no plan controller, and results are not held."""
        plans = self._plans
        return plans.coming is None and plans.agreement.plan_controller is None and not self._step.holds

    def leave_out(self, names: Collection[str]) -> frozenset[str]:
        """Remove the tensors that at least one rank names, and return their names.

        All ranks call it together, in the first step.
        """
        out: list[frozenset[str]] = []
        leave_out, step = self._plans.agreement.leave_out, self._step
        self.put(lambda transport: out.append(leave_out(step.number, names, transport)))()
        for name in out[0]:
            step.arrived.pop(name, None)
        return out[0]

    def state_dict(self) -> dict[str, Any]:
        """Wait for the results that were not taken, and return "step" and copies of these "results" by name.

        They stay to be taken. Error feedback is in ``memory``.
        """
        self._check("a state is saved")
        self._step.refuse_begun("a state is saved")
        try:
            return {"step": self.step, "results": self._results.save()}
        except BaseException as error:
            self.fail(error)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was called: with its step, and with its results to be taken.

        All ranks call it between the same two steps, each with its own saved state. Results belong to buckets of the
        plan, so the plan must be known by then.
        """
        self._check("a state is loaded")
        self._step.refuse_begun("a state is loaded")
        try:
            self._results.settle()
        except BaseException as error:
            self.fail(error)
        self._results.load(saved["results"], self._plans.coming, saved["step"] - 1, self._device)
        self.step = saved["step"]
        self._plans.settle()

    def put(self, work: Callable[[Transport], None]) -> Callable[[], None]:
        """Queue ``work`` on the first lane, and return a function that waits for its end and raises its exception.

        All ranks call it in the same place: when a step's gradients are all submitted, or before the first step.
        """
        self._check()
        try:
            job = self.lanes.queue(work)
        except BaseException as error:
            self.fail(error)

        def wait() -> None:
            try:
                job.wait()
            except BaseException as error:
                self.fail(error)

        return wait

    # ---- ends -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until the device has done all messages of the steps that have ended.

        Over NCCL, results are only queued when they are taken. Call it before you save them, or what they have changed.
        """
        self._check("what steps have queued is waited for")
        try:
            for lane in self.lanes.all:
                if lane.is_at_once:
                    lane.transport.drain()
        except BaseException as error:
            self.fail(error)

    def close(self) -> None:
        """Let the buckets that were sent end, on the device too, then the threads, and close the transports.

        A second call does nothing.

        Raises:
            TransportError: over NCCL, a step whose results were taken could not end.
            UsageError: a CUDA graph is captured. The engine is closed in both cases.
        """
        # Other ranks wait for this rank's share of these buckets, so they are sent even if they are never taken here.
        for job, _, _ in self._results.untaken.values():
            with suppress(Exception):
                job.wait()
        try:
            if self.failure is None:
                self.drain()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Close the transports at once: operations in flight fail here and on the other ranks."""
        self.lanes.close()
        self._timeline.close()

    def abandon(self) -> None:
        """Give up, and wait until no lane works any more: then nothing changes gradients, results or error feedback."""
        self.give_up()
        for lane in self.lanes.all:
            lane.worker.join()

    def fail(self, error: BaseException) -> NoReturn:
        """Release the gradients, close the transports and raise the first cause."""
        # Peers are out of step with this rank now, so nothing may be sent any more. Results are waited for in the order
        # of the plan, but lanes fail in any order: an early bucket may have failed because a later one did.
        first = self.lanes.cause
        cause = error if first is None or not isinstance(error, Exception) else again(first)
        self.failure = again(cause).with_traceback(None)
        self.give_up()
        self._step.arrived.clear()
        self._results.untaken.clear()
        if cause is error:
            raise error
        raise cause from cause.__cause__  # what was waited for has failed with it, and says nothing more

    def _check(self, what: str | None = None) -> None:
        """Raise the error of a failed step, or ``UsageError`` if a CUDA graph is captured while ``what``, a clause,
        happens."""
        if self.failure is not None:
            raise again(self.failure)
        if what is not None and self._device.type == "cuda":
            refuse_capture(what)
