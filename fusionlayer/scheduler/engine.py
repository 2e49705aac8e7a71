"""The engine: takes gradients as they arrive, sends buckets in plan order and hands results back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import collectives
from ..clock import Clock, clock_of
from ..codecs import Codec
from ..collectives import UNSCALED, Scaling
from ..errors import ConfigError, UsageError, again
from ..plan import Bucket, FusionPlan, TensorInfo
from ..timeline import Timeline
from ..transport import Transport
from .agreement import Agreement
from .fusing import check_pairs
from .lane import put_first
from .layout import BufferMaker, Layout
from .memory import Memory
from .plan_controller import PlanController, StepTimer
from .planners import Planner
from .results import Sent
from .traffic import Traffic
from .worker import Job

__all__ = ["Engine"]


class Engine(Traffic):
    """Sums gradients over ranks while backward goes on: on threads of its own, or, over NCCL, on streams of its own.

    In each step the caller submits every tensor once, in any order, with ``submit``. Then it calls ``synchronize``
    once, or ``end_step`` and ``take`` for each bucket. If no plan is given, the first step learns the order in which
    gradients arrive and makes the plan. From the second step on, a bucket leaves as soon as it and all buckets before
    it are complete. Before the first payload the ranks compare plan and options.

    A caller that fuses gradients itself, as DDP does, calls ``submit_bucket`` in place of ``submit``. The plan then
    consists of these buckets.

    A plan may let a bucket leave once in several steps (``Bucket.every``). Then ``due`` names the tensors of each step,
    and a step without any sends nothing.

    Args:
        tensors: every tensor of a step, in any order.
        transport: used by the engine alone from now on, and closed with it.
        codec: of all gradients, or of each by its name, for the plan that the engine makes. A given plan has its own.
        algorithm: collective for that plan; None chooses.
        ahead: encode each tensor by itself as it arrives, ahead of fusion, in that plan. None: if ``algorithm`` gathers
            such messages; without an ``algorithm``, as the codec does by default.
        planner: makes that plan.
        plan: fixed plan; ``codec``, ``algorithm``, ``ahead`` and ``planner`` are then ignored.
        device: of all gradients.
        memory: keeps error feedback; a new one, of 32 bits, by default.
        error_feedback: send what the codec lost with the next gradient; None: where the codec says that it pays.
        scaling: factors before and after the sum.
        timeline: record of the threads' work.
        lanes: buckets that are under way at once; while one is encoded or decoded, another travels. Over NCCL one lane
            does: its calls wait for nothing.
        hold_results: gradients stay as they are, and results wait for ``take``: any number of steps, but not beyond the
            next gradient of their bucket.
        overlap_forward: hold results, which the caller takes one by one while the next forward runs. After some steps
            buckets leave in the order in which forward needs them: of the complete ones, the one that backward
            completed last.
        plan_controller: watches the steps and may give the engine another plan between two of them.
        clock: times the steps; None: that of the ``device``.
        name: of the threads.

    Attributes:
        memory: as given.
        plan_controller: as given.
        plan: the present one; None before the first step.
        step: number of the present step.
        failure: the error that a step has failed with, or None. The engine is then closed, and every call raises it.
    """

    def __init__(
        self,
        tensors: Sequence[TensorInfo],
        transport: Transport,
        *,
        codec: Codec | Mapping[str, Codec],
        planner: Planner,
        device: torch.device,
        algorithm: str | None = None,
        ahead: bool | None = None,
        plan: FusionPlan | None = None,
        memory: Memory | None = None,
        error_feedback: bool | None = None,
        scaling: Scaling = UNSCALED,
        timeline: Timeline | None = None,
        lanes: int = 1,
        hold_results: bool = False,
        overlap_forward: bool = False,
        plan_controller: PlanController | None = None,
        clock: Clock | None = None,
        name: str = "fusionlayer",
    ) -> None:
        for each in [codec] if isinstance(codec, Codec) else codec.values():
            collectives.choose(each, transport.size, algorithm, ahead=ahead)
        clock = clock_of(device) if clock is None else clock
        super().__init__(transport, device, timeline or Timeline(None, transport.rank), clock)
        self.memory = memory or Memory()
        self._overlap_forward = overlap_forward
        self._holds = hold_results or overlap_forward
        self.step = 0
        self._agreement = Agreement(
            {tensor.name: tensor for tensor in tensors},
            codec,
            algorithm,
            ahead,
            planner,
            (
                f"scaling {scaling}",
                f"feedback {error_feedback} in {self.memory.bits} bits",
                f"hold {hold_results}",
                f"overlap {overlap_forward}",
            ),
            plan_controller,
            self._timeline,
        )
        self._maker = BufferMaker(
            self.memory,
            device,
            scaling,
            self._timeline,
            error_feedback,
            in_place=not self._holds,
            rank=self.rank,
            size=self.size,
            at_once=transport.only_queues(device),
        )
        self.plan: FusionPlan | None = None
        self._next_plan: FusionPlan | None = None
        if plan is not None:
            self.switch(plan)
            self.plan = plan
        # Guards what ``submit`` and ``submit_bucket`` change: _arrived, the buffers, what the sender has sent, and the
        # beginning of a step. Hooks call them, and hooks may run on several threads of backward at once. The end of a
        # step takes no lock, because no hook runs then. Lanes never take it, so a thread that holds it may wait for a
        # lane.
        self._lock = threading.Lock()
        self._open(transport, lanes, name, learns_order=overlap_forward)
        self._expect(plan_controller)

    def switch(self, plan: FusionPlan) -> None:
        """Adopt another plan when the next step begins; all ranks call it between the same two steps.

        Each tensor keeps its error feedback. Before the first payload the ranks compare the plans.

        In the middle of a period too: which buckets leave follows from the step's number alone. Results that nobody has
        taken keep the numbers of their buckets. They must be taken before a step with tensors of the new plan ends.

        Raises:
            ConfigError: the plan is for other tensors or ranks, a bucket names a codec and a collective that are
                unknown or do not go together, or some do not leave in every step, which this engine cannot do.
        """
        plan.check(self._agreement.tensors.values(), self.size)
        check_pairs(plan)
        if plan.skips:
            self._refuse_skipping()
        self._next_plan = plan
        if not self._arrived:
            self._settle_due()

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
    ) -> None:
        """Sum these tensors from now on; all ranks call it before the first gradient of the same step.

        That step is as a first one: it learns the order of arrival, and the ranks compare before the first payload.
        Each tensor keeps its error feedback. Until the results of the last step are taken, its buckets stay.

        Args:
            tensors: every tensor of a step from now on; none, and steps are empty.
            why: what has changed on this rank, for the errors of ranks where it has not.
            codec, algorithm, ahead, plan, plan_controller: as for a new engine.

        Raises:
            UsageError: the step has gradients already.
            ConfigError: the plan is for other tensors or ranks.
            PlanMismatch, TransportError: as from ``synchronize``, if no tensors are left.
        """
        if self.failure is not None:
            raise again(self.failure)
        if self._arrived:
            raise UsageError(f"the tensors of step {self.step} change after its first gradient; change them before")
        before = self._agreement
        self._agreement = replace(
            before,
            tensors={tensor.name: tensor for tensor in tensors},
            codec=codec,
            algorithm=algorithm,
            ahead=ahead,
            plan_controller=plan_controller,
            why=why,
        )
        try:
            if plan is not None:
                self.switch(plan)
        except BaseException:
            self._agreement = before
            raise
        self.plan, self._next_plan = None, plan
        self._expect(plan_controller)
        if not tensors:
            # No gradient will begin this step, so the ranks agree at once.
            self.plan, self._next_plan = FusionPlan((), self.size), None
            try:
                self._compare(self.plan).wait()
            except BaseException as error:
                self._fail(error)

    @property
    def due(self) -> AbstractSet[str]:
        """Names of the tensors that leave in the present step."""
        return self._due.keys()

    @property
    def pending(self) -> AbstractSet[str]:
        """Names submitted so far in the current step: a live view, which changes with each ``submit``."""
        return self._arrived.keys()

    @property
    def may_leave_out(self) -> bool:
        """Whether ``leave_out`` is possible: there is no plan yet, no plan controller, and results are not held."""
        no_plan = self.plan is None and self._next_plan is None
        return no_plan and self.plan_controller is None and not self._holds

    def leave_out(self, names: Collection[str]) -> frozenset[str]:
        """Remove the tensors that at least one rank names, and return their names.

        All ranks call it together, in the first step.

        Raises:
            PlanMismatch: ranks disagree on model or options.
            TransportError: a peer was lost, stopped or too late.
        """
        out: list[frozenset[str]] = []
        self.put(lambda transport: out.append(self._agreement.leave_out(self.step, names, transport)))()
        for name in out[0]:
            self._arrived.pop(name, None)
        return out[0]

    def submit(self, name: str, gradient: Tensor) -> None:
        """Take a gradient; its scaled sum over ranks replaces it, or if results are held, waits for ``take``.

        Raises:
            UsageError: the gradient was submitted twice, is not one of the step's tensors, has another size, or its
                last result has not been taken; or a CUDA graph is captured.
            FusionLayerError: an earlier step has failed; the same error again.
        """
        if self.failure is not None or self._device.type == "cuda":
            self._check_sound(f"gradient {name!r} arrives")
        arrived = None if self._watch is None else self._clock.stamp()
        with self._lock:
            tensor = self._due.get(name)
            if tensor is None:
                raise self._unexpected(name)
            if gradient.numel() != tensor.numel:
                raise UsageError(f"gradient {name!r} has {gradient.numel()} elements, expected {tensor.numel}")
            if name in self._arrived:
                raise UsageError(f"gradient {name!r} was submitted twice in step {self.step}; synchronize() in between")
            if self._results.untaken and self.awaits(name):
                raise UsageError(f"gradient {name!r} was submitted before its result of the last step was taken")
            try:
                if not self._arrived:
                    self._begin_step()
                self._arrived[name] = gradient
                if self._layout.buffers:
                    self._put(name, gradient)
                if self._watch is not None:
                    self._watch.note_gradient(name, arrived)
            except BaseException as error:
                self._fail(error)

    def submit_bucket(self, index: int, bucket: Bucket, flat: Tensor, seed: int, done: Callable[[], None]) -> None:
        """Take all gradients of a bucket and send it at once; the scaled sum over ranks replaces the gradients.

        All ranks submit the same buckets, in the order of their numbers. A bucket may differ from the last step's: the
        plan then changes, and the ranks compare the new bucket before its payload.

        Args:
            index: number of the bucket in the step, from 0 on.
            bucket: its tensors, codec and collective.
            flat: (bucket.numel,) gradients, each in its slot.
            seed: of the codec's noise.
            done: called on the lane's thread and stream when the result is in place, or when there will be none.

        Raises:
            UsageError: another bucket comes next, or a CUDA graph is captured.
            FusionLayerError: an earlier step has failed; the same error again.
        """
        self._check_sound(f"gradient {bucket.names[0]!r} arrives")
        with self._lock:
            sent = len(self._sender.jobs)
            if index != sent:
                raise UsageError(f"bucket {index} was submitted, but bucket {sent} comes next in step {self.step}")
            try:
                if not self._arrived:
                    self._begin_step()
                self._lay_out(index, bucket)
                self._arrived.update(dict.fromkeys(bucket.names, flat))
                buffer = self._layout.buffers[index]
                buffer.put_whole(flat, self.step)
                self._sender.send(index, buffer, self.step, seed, done)
            except BaseException as error:
                self._fail(error)

    def end_step(self) -> None:
        """End the step without waiting for its results.

        Raises:
            UsageError: tensors are missing, or results that were sent under another plan have not been taken.
            PlanMismatch: ranks disagree on model, plan or options.
            TransportError: a peer was lost, stopped or too late.
        """
        if self._skips and not self._due:
            self._end_empty_step()
            return
        if len(self._arrived) < len(self._due):
            missing = [name for name in self._due if name not in self._arrived]
            raise UsageError(
                f"{len(missing)} gradients were not submitted in step {self.step}, the first: {missing[0]!r}"
            )
        results, sender = self._results, self._sender
        if results.untaken and results.plan is not self.plan:
            self._refuse_untaken()
        try:
            if self.plan is None:
                # Nothing has been sent yet: the gradients were kept until the order of their arrival was complete.
                self.plan = self._first_plan()
                self._adopt(self.plan)
                for name, gradient in self._arrived.items():
                    self._put(name, gradient)
            elif self._overlap_forward and sender.order.due:
                self._lanes[0].put(sender.order.agree).wait()
            sender.order.end_step()
        except BaseException as error:
            self._fail(error)
        self._arrived.clear()
        buffers = self._layout.buffers
        results.untaken |= {index: Sent(job, buffers[index], self.step) for index, job in sender.jobs.items()}
        results.plan, results.bucket_of = self.plan, self._layout.bucket_of
        sender.jobs = {}
        self.step += 1
        if self._skips or self._next_plan is not None:
            self._settle_due()
        if self.plan_controller is not None and self.plan_controller.due(self.step - 1):
            try:
                self._ask_controller(self.plan_controller)
            except BaseException as error:
                self._fail(error)

    def synchronize(self) -> None:
        """End the step and wait until every gradient holds its result.

        Raises:
            UsageError: tensors are missing.
            PlanMismatch: ranks disagree on model, plan or options.
            TransportError: a peer was lost, stopped or too late; it names rank, bucket, tensors and sequence.
        """
        self.end_step()
        for index in list(self._results.untaken):
            self.take(index)

    def state_dict(self) -> dict[str, Any]:
        """Wait for the results that nobody has taken, and return "step" and copies of these "results" by name.

        They stay to be taken. Error feedback is in ``memory``.

        Raises:
            UsageError: the present step has gradients already.
            FusionLayerError: a step has failed.
        """
        self._check_between("a state is saved")
        try:
            results = self._results.save()
        except BaseException as error:
            self._fail(error)
        return {"step": self.step, "results": results}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called: with its step, and with its results to be taken.

        All ranks call it between the same two steps, with what each of them has saved. Results belong to buckets of the
        plan, so the plan must be known by then.

        Raises:
            ConfigError: the results are not those of whole buckets of the plan.
            UsageError: the present step has gradients already.
            FusionLayerError: a step has failed.
        """
        self._check_between("a state is loaded")
        try:
            self._results.settle()
        except BaseException as error:
            self._fail(error)
        self._results.load(saved["results"], self._coming_plan, saved["step"] - 1, self._device)
        self.step = saved["step"]
        self._settle_due()

    def _check_between(self, what: str) -> None:
        """Raise what a step has failed with, or that a step has begun while ``what``, a clause, happens."""
        self._check_sound(what)
        if self._arrived:
            raise UsageError(f"{what} after the first gradient of step {self.step}; do it between two steps")

    def _unexpected(self, name: str) -> UsageError:
        tensors = self._agreement.tensors
        if name not in tensors:
            return UsageError(f"gradient {name!r} is not one of this engine's {len(tensors)} tensors")
        return UsageError(
            f"gradient {name!r} was submitted in step {self.step}, in which it does not leave; submit those in due"
        )

    def _refuse_skipping(self) -> None:
        """Raise ``ConfigError`` if this engine cannot have buckets that leave once in several steps."""
        why = ""
        if self._agreement.plan_controller is not None:
            why = "autotune and planners that need costs expect each bucket in each step; leave them out"
        elif self._overlap_forward:
            why = "overlap_forward expects each bucket in each step; leave it out"
        elif not self._holds:
            why = "this trainer sends each bucket in each step; expected a plan without 'every'"
        if why:
            raise ConfigError(f"plan: it has buckets that leave once in several steps, but {why}")

    def _refuse_untaken(self) -> None:
        if self._results.plan != self.plan:
            index = min(self._results.untaken)
            raise UsageError(
                f"the plan has changed, but bucket {index} of the one before has not been taken; take what is untaken, "
                "then end the step"
            )

    # ---- between steps ----------------------------------------------------------------------------------------------

    def _expect(self, plan_controller: PlanController | None) -> None:
        """Begin anew with the tensors that the ranks are to agree on, and without buffers."""
        self.plan_controller = plan_controller
        self._watch = None if plan_controller is None else StepTimer(self._clock)
        self._sender.watch = self._results.watch = self._watch
        self._layout = self._laid_out(FusionPlan((), self.size))
        self._sender.begin_anew(0)
        self._settle_due()

    @property
    def _coming_plan(self) -> FusionPlan | None:
        """The plan of the next gradient; None if the next step makes one."""
        return self.plan if self._next_plan is None else self._next_plan

    def _settle_due(self) -> None:
        """Find out which tensors leave in the present step, before its first gradient."""
        plan, tensors = self._coming_plan, self._agreement.tensors
        self._due = tensors
        self._skips = plan is not None and plan.skips
        if plan is not None and self._skips:
            self._leaving = plan.due(self.step)
            self._due = {name: tensors[name] for index in self._leaving for name in plan.buckets[index].names}

    def _end_empty_step(self) -> None:
        if self.failure is not None:
            raise again(self.failure)
        self.step += 1
        self._settle_due()

    # ---- called with the lock held, or at the end of a step when no hook can run ------------------------------------

    def _begin_step(self) -> None:
        """Adopt the next plan, if there is one, and the codecs' settings for this step."""
        if self._watch is not None and self.plan_controller is not None and self._watch.begin(self.step):
            self.plan_controller.note_step(self, self.step - 1, self._watch.read())
        self._timeline.settle()
        if self._next_plan is not None:
            self.plan, self._next_plan = self._next_plan, None
            self._compare(self.plan)
            self._adopt(self.plan)
        elif self._layout.codecs_change and self._layout.is_stale(self.step):
            assert self.plan is not None
            self._results.settle()
            self._layout.renew(self.plan, self.step)
            self._sender.begin_anew(len(self.plan.buckets))
        if self._skips:
            self._sender.order.sequence = self._leaving

    def _ask_controller(self, plan_controller: PlanController) -> None:
        """Ask for the next plan on a lane, when all lanes are idle.

        The training thread waits for the answer, so it and the lane never use the controller at the same time.
        """
        # The controller measures: a bucket on another lane would falsify that.
        for index in self._results.untaken:
            self._results.wait_for(index)
        start = self._clock.stamp()
        plans: list[FusionPlan | None] = []

        def ask(transport: Transport) -> None:
            with self._timeline.span("PLAN", step=self.step - 1):
                plans.append(plan_controller.next_plan(transport))

        self._lanes[0].put(ask).wait()
        if plans[0] is not None:
            self.switch(plans[0])
        if self._watch is not None:
            self._watch.leave_out(start)

    def _compare(self, plan: FusionPlan) -> Job:
        """Compare a plan with the other ranks' before any lane sends what is put later; return the job."""
        return put_first(self._lanes, partial(self._agreement.compare, self.step, plan))

    def _first_plan(self) -> FusionPlan:
        """Return the plan by rank 0's order of arrival; the training thread, which reads no tensors, waits for it."""
        plans: list[FusionPlan] = []
        make = self._agreement.make_plan
        put_first(self._lanes, lambda transport: plans.append(make(self.step, self._arrived, transport))).wait()
        return plans[0]

    def _adopt(self, plan: FusionPlan) -> None:
        # New buffers take over the residuals, so no old buffer may still change them. Results may still be untaken.
        self._results.settle()
        self._layout = self._laid_out(plan)
        self._sender.begin_anew(len(plan.buckets))

    def _lay_out(self, index: int, bucket: Bucket) -> None:
        """Put ``bucket`` into the plan at ``index``, unless it is there already, and drop all buckets after it."""
        known = () if self.plan is None else self.plan.buckets
        if index < len(known) and known[index] == bucket:
            return
        self.plan = FusionPlan((*known[:index], bucket), self.size)
        self._compare(self.plan)
        self._layout.cut_to(index, bucket, self.step)
        self._sender.begin_anew(index + 1)

    def _laid_out(self, plan: FusionPlan) -> Layout:
        return Layout(plan, self.step, self._maker, self._agreement.tensors)

    def _put(self, name: str, gradient: Tensor) -> None:
        index = self._layout.bucket_of[name]
        buffer = self._layout.buffers[index]
        buffer.put(name, gradient, self.step)
        if buffer.full:
            if self._overlap_forward:
                self._sender.order.note_complete(index)
            self._sender.launch(self._layout.buffers, self.step)
