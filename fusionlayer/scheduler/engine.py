"""The engine: takes gradients as they arrive, sends buckets in plan order and hands results back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from .. import collectives
from ..base.errors import UsageError
from ..base.plan import Bucket, FusionPlan, TensorInfo
from ..codecs import Codec
from ..collectives import UNSCALED, Scaling
from ..observe.timeline import Timeline
from ..process.clock import Clock, clock_of
from ..transport import Transport
from .agreement import Agreement
from .cadence import Cadence
from .course import Course, check_plan
from .layout import BufferMaker
from .memory import Memory
from .plan_controller import PlanController
from .planners import Planner
from .traffic import Traffic
from .usage import Usage

__all__ = ["Engine"]


class Engine:
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
        undoable: keep what error feedback was before the present step, for ``Memory.state_before``, until
            ``Memory.forget``. It costs a copy of each residual in each step, on the lanes.
        shares: how much of a sum each rank computes, in buckets that can have shares and whose plan gives none: a whole
            number for each rank. Empty: equally much.
        plan_controller: watches the steps and may give the engine another plan between two of them.
        clock: times the steps; None: that of the ``device``.
        name: of the threads.

    Attributes:
        rank, size: this rank, and the number of ranks.
        memory, scaling: as given.
        course: the tensors, and the present plan.
        traffic: what is under way, and the failure.
        switch, enrol, leave_out: change plan or tensors between two steps; see ``Course``.
        put, take, take_all, awaits, drain, close, give_up, abandon, fail: deal with what is under way; see ``Traffic``.
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
        undoable: bool = False,
        shares: tuple[int, ...] = (),
        plan_controller: PlanController | None = None,
        clock: Clock | None = None,
        name: str = "fusionlayer",
    ) -> None:
        for each in [codec] if isinstance(codec, Codec) else codec.values():
            collectives.choose(each, transport.size, algorithm, ahead=ahead)
        clock = clock_of(device) if clock is None else clock
        timeline = timeline or Timeline(None, transport.rank)
        self.rank = transport.rank
        self.size = transport.size
        self.memory = memory or Memory()
        self.scaling = scaling
        self._device = device
        self._timeline = timeline
        self._clock = clock
        self._overlap_forward = overlap_forward
        holds = hold_results or overlap_forward
        agreement = Agreement(
            {tensor.name: tensor for tensor in tensors},
            codec,
            algorithm,
            ahead,
            planner,
            (
                f"scaling {scaling}",
                f"feedback {error_feedback} in {self.memory.bits} bits",
                f"overlap {overlap_forward}",
            ),
            plan_controller,
            timeline,
            hold_results,
            shares,
        )
        self._cadence = cadence = Cadence(holds, overlap_forward)
        if plan is not None:
            check_plan(plan, agreement, cadence, self.size)
        maker = BufferMaker(
            self.memory,
            device,
            scaling,
            timeline,
            error_feedback,
            in_place=not holds,
            rank=self.rank,
            size=self.size,
            at_once=transport.only_queues(device),
            undoable=undoable,
        )
        self.traffic = traffic = Traffic(
            transport,
            device,
            timeline,
            clock,
            lanes=lanes,
            name=name,
            learns_order=overlap_forward,
            release=cadence.arrived.clear,
        )
        self.course = course = Course(agreement, cadence, maker, traffic, plan, clock, timeline)
        # Attributes and not methods, which would only cost calls in each step of an optimizer.
        self.switch, self.enrol, self.leave_out = course.switch, course.enrol, course.leave_out
        self.put, self.take, self.take_all, self.awaits = traffic.put, traffic.take, traffic.take_all, traffic.awaits
        self.drain, self.close, self.give_up = traffic.drain, traffic.close, traffic.give_up
        self.abandon, self.fail = traffic.abandon, traffic.fail
        self._unused: list[str] = []
        self._usage: Usage | None = None
        self._marks = device if traffic.sends_at_once else torch.device("cpu")  # has the message of which are used
        # Guards what ``submit`` and ``submit_bucket`` change: what has arrived and been put, what the sender has sent,
        # and what a step begins with: plan and buffers of the course. Hooks call them, and hooks may run on several
        # threads of backward at once. The end of a step takes no lock, because no hook runs then. Lanes never take it,
        # so a thread that holds it may wait for a lane.
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        """Number of the present step."""
        return self._cadence.step

    @step.setter
    def step(self, step: int) -> None:
        self._cadence.step = step

    @property
    def plan(self) -> FusionPlan | None:
        """The present plan; None before the first step."""
        return self.course.plan

    @property
    def plan_controller(self) -> PlanController | None:
        """What may give the engine another plan between two steps."""
        return self.course.agreement.plan_controller

    @property
    def failure(self) -> BaseException | None:
        """The error that a step has failed with, or None. The engine is then closed, and every call raises it."""
        return self.traffic.failure

    @property
    def due(self) -> AbstractSet[str]:
        """Names of the tensors that leave in the present step."""
        return self._cadence.due.keys()

    @property
    def pending(self) -> AbstractSet[str]:
        """Names submitted so far in the current step: a live view, which changes with each ``submit``."""
        return self._cadence.arrived.keys()

    @property
    def untaken(self) -> frozenset[int]:
        """Buckets of steps that have ended whose results nobody has taken yet."""
        return frozenset(self.traffic.results.untaken)

    @property
    def may_leave_out(self) -> bool:
        """Whether ``leave_out`` is possible now."""
        return self.course.may_leave_out

    def bucket_of(self, name: str) -> int:
        """Return the number of the bucket in which a tensor travelled last."""
        return self.traffic.results.bucket_of[name]

    def submit(self, name: str, gradient: Tensor) -> None:
        """Take a gradient; its scaled sum over ranks replaces it, or if results are held, waits for ``take``.

        Raises:
            UsageError: the gradient was submitted twice, is not one of the step's tensors, has another size, or its
                last result has not been taken; or a CUDA graph is captured.
            FusionLayerError: an earlier step has failed; the same error again.
        """
        traffic, course, cadence = self.traffic, self.course, self._cadence
        if traffic.failure is not None or self._device.type == "cuda":
            traffic.check(f"gradient {name!r} arrives")
        at = None if course.watch is None else self._clock.stamp()
        with self._lock:
            tensor = cadence.due.get(name)
            if tensor is None:
                cadence.refuse(name, course.agreement.tensors)
            if gradient.numel() != tensor.numel:
                raise UsageError(f"gradient {name!r} has {gradient.numel()} elements, expected {tensor.numel}")
            if name in cadence.arrived:
                raise UsageError(
                    f"gradient {name!r} was submitted twice in step {cadence.step}; synchronize() in between"
                )
            if traffic.results.untaken and traffic.awaits(name):
                raise UsageError(f"gradient {name!r} was submitted before its result of the last step was taken")
            try:
                if not cadence.arrived:
                    self._begin_step()
                cadence.arrived[name] = gradient
                if course.layout.buffers:
                    self._put(name, gradient)
                if course.watch is not None:
                    course.watch.note_gradient(name, at)
            except BaseException as error:
                traffic.fail(error)

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
        traffic, course, cadence = self.traffic, self.course, self._cadence
        traffic.check(f"gradient {bucket.names[0]!r} arrives")
        with self._lock:
            sent = len(traffic.sender.jobs)
            if index != sent:
                raise UsageError(f"bucket {index} was submitted, but bucket {sent} comes next in step {cadence.step}")
            try:
                if not cadence.arrived:
                    self._begin_step()
                course.lay_out(index, bucket)
                cadence.arrived.update(dict.fromkeys(bucket.names, flat))
                buffer = course.layout.buffers[index]
                buffer.put_whole(flat, cadence.step)
                traffic.sender.send(index, buffer, cadence.step, seed, done)
            except BaseException as error:
                traffic.fail(error)

    def submit_unused(self, name: str, zeros: Tensor) -> None:
        """Take zeros, or what counts as such, for a tensor that this rank has not used; else as ``submit``.

        ``end_step(find_unused=True)`` then finds out whether any rank has used it.
        """
        self.memory.remember((name,))  # what it owes stays as it is if no rank has
        self.submit(name, zeros)
        self._unused.append(name)

    def unused(self) -> frozenset[str]:
        """Return the tensors of the last step that no rank has used, if ``end_step`` was to find out.

        Their results mean nothing. Once those are taken, ``memory.restore`` gives them their error feedback back.

        Raises:
            TransportError: a peer was lost, stopped or late.
        """
        try:
            return frozenset() if self._usage is None else self._usage.unused()
        except BaseException as error:
            self.fail(error)

    def end_step(self, find_unused: bool = False) -> None:
        """End the step without waiting for its results.

        Args:
            find_unused: ranks exchange, in one small message, which tensors they have used; the same on all ranks.

        Raises:
            UsageError: tensors are missing, or results that were sent under another plan have not been taken.
            PlanMismatch: ranks disagree on model, plan or options.
            TransportError: a peer was lost, stopped or too late.
        """
        traffic, course, cadence = self.traffic, self.course, self._cadence
        traffic.steps += 1
        if cadence.skips and not cadence.due:
            traffic.check()
            cadence.step += 1
            course.settle()
            return
        if len(cadence.arrived) < len(cadence.due):
            cadence.refuse_missing()
        results, sender = traffic.results, traffic.sender
        if results.untaken and results.plan is not course.plan:
            results.refuse_another(course.plan)
        try:
            if course.plan is None:
                # Nothing has been sent yet: the gradients were kept until the order of their arrival was complete.
                course.learn()
                for name, gradient in cadence.arrived.items():
                    self._put(name, gradient)
            elif self._overlap_forward and sender.order.due:
                traffic.queue(sender.order.agree).wait()
            if self._overlap_forward:
                sender.order.end_step()
            if find_unused:
                self._usage = Usage([*course.layout.bucket_of], {*self._unused}, self._marks, traffic.queue_next)
                self._unused = []
        except BaseException as error:
            traffic.fail(error)
        cadence.arrived.clear()
        results.keep(sender.jobs, course.layout, course.plan, cadence.step)
        sender.jobs = {}
        cadence.step += 1
        if cadence.skips or course.next is not None:
            course.settle()
        plan_controller = course.agreement.plan_controller
        if plan_controller is not None and plan_controller.due(cadence.step - 1):
            try:
                course.ask(plan_controller)
            except BaseException as error:
                traffic.fail(error)

    def synchronize(self) -> None:
        """End the step and wait until every gradient holds its result.

        Raises:
            UsageError: tensors are missing.
            PlanMismatch: ranks disagree on model, plan or options.
            TransportError: a peer was lost, stopped or too late; it names rank, bucket, tensors and sequence.
        """
        self.end_step()
        self.take_all()

    def state_dict(self) -> dict[str, Any]:
        """Wait for the results that nobody has taken, and return "step" and copies of these "results" by name.

        They stay to be taken. Error feedback is in ``memory``.

        Raises:
            UsageError: the present step has gradients already.
            FusionLayerError: a step has failed.
        """
        self._check_between("a state is saved")
        return {"step": self.step, "results": self.traffic.save()}

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
        self.traffic.load(saved["results"], self.course.coming, saved["step"] - 1)
        self.step = saved["step"]
        self.course.settle()

    def _check_between(self, what: str) -> None:
        """Raise what a step has failed with, or that a step has begun while ``what``, a clause, happens."""
        self.traffic.check(what)
        self._cadence.refuse_begun(what)

    # ---- called with the lock held, or at the end of a step when no hook can run ------------------------------------

    def _begin_step(self) -> None:
        """Tell the plan controller of the last step, and begin this one."""
        course, step = self.course, self._cadence.step
        plan_controller = course.agreement.plan_controller
        if course.watch is not None and plan_controller is not None and course.watch.begin(step):
            plan_controller.note_step(self, step - 1, course.watch.read())
        if self._timeline.enabled:
            self._timeline.settle()
        course.begin_step()

    def _put(self, name: str, gradient: Tensor) -> None:
        layout, sender, step = self.course.layout, self.traffic.sender, self._cadence.step
        index = layout.bucket_of[name]
        buffer = layout.buffers[index]
        buffer.put(name, gradient, step)
        if buffer.full:
            if self._overlap_forward:
                sender.order.note_complete(index)
            sender.launch(layout.buffers, step)
