"""Which tensors and which plan an engine has: how ranks agree on them, when another plan begins, and the buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch

from .. import codecs, collectives
from ..base.plan import Bucket, FusionPlan, TensorInfo
from ..codecs import Codec, PartsCodec
from ..collectives import Scaling
from ..collectives._base import encloses
from ..native.wire import DTYPE_CODES
from ..observe.timeline import Timeline
from ..process.clock import Clock
from ..transport import Transport
from .agreement import Agreement
from .ahead import AheadBuffer
from .buffers import Buffer, BufferSettings, FlatBuffer
from .compression_error import ErrorProbe
from .fusing import check_pairs
from .lanes import Job, Lanes
from .memory import Memory
from .plan_controller import PlanController, StepTimer
from .results import Results
from .step import Step

_logger = logging.getLogger("fusionlayer")

_READING = ("gather_v", "oktopk", "omnireduce")  # collectives that read the sizes of their messages on the host


class PlanState:
    """The tensors of an engine, its present plan with the buffers, and the next plan.

    Ranks compare each plan before the first payload. The engine calls all methods with its lock held, or when no hook
    can run.

    Attributes:
        agreement: what ranks compare, and what the first plan is made with, for the tensors that were enrolled last.
        plan: the present one; None before the first step.
        next: the one that the next step begins with; None: the present one stays, or the first step makes one.
        buffers: the buffers of the present plan's buckets, by their numbers; none until there is a plan.
        bucket_of: the number of the bucket that a tensor is in, by its name.
        watch: times the steps for the plan controller; None: there is none.
        varies: whether ``begin_step`` may have something to do though there is no next plan.
    """

    def __init__(
        self,
        agreement: Agreement,
        step: Step,
        maker: BufferMaker,
        lanes: Lanes,
        results: Results,
        plan: FusionPlan | None,
        clock: Clock,
    ) -> None:
        self.agreement = agreement
        self._step = step
        self._maker = maker
        self._lanes = lanes
        self._results = results
        self._size = maker.size
        self._clock = clock
        self.plan: FusionPlan | None
        self.next: FusionPlan | None
        self._begin_anew(plan)

    @property
    def coming(self) -> FusionPlan | None:
        """The plan of the next gradient; None if the next step makes one."""
        return self.plan if self.next is None else self.next

    def settle(self) -> None:
        """Find out which tensors are due in the present step, before its first gradient."""
        self._step.settle(self.coming, self.agreement.tensors)
        self._note_varying()

    # ---- between steps ----------------------------------------------------------------------------------------------

    def switch(self, plan: FusionPlan) -> None:
        """Adopt a plan, which ``check_plan`` checks, when the next step begins."""
        check_plan(plan, self.agreement, self._step, self._size)
        self.next = plan
        if not self._step.arrived:
            self.settle()

    def enrol(self, agreement: Agreement, plan: FusionPlan | None) -> Job | None:
        """Have other tensors and options, and a plan for them; None: the next step makes one.

        Returns the comparison of an empty plan if there are no tensors, because no gradient would begin that step.
        """
        if agreement.hold_results != self.agreement.hold_results:
            self._step.holds, self._maker.in_place = agreement.hold_results, not agreement.hold_results
        if plan is not None:
            check_plan(plan, agreement, self._step, self._size)
        self.agreement = agreement
        self._begin_anew(plan)
        if agreement.tensors:
            return None
        self.plan, self.next = FusionPlan((), self._size), None
        return self._compare(self.plan)

    def ask(self, plan_controller: PlanController, timeline: Timeline) -> None:
        """Ask for the next plan on a lane, when all lanes are idle.

        The training thread waits for the answer, so it and the lane never use the controller at the same time.
        """
        step = self._step.number
        # The controller measures: a bucket on another lane would falsify that.
        for index in self._results.untaken:
            self._results.wait_for(index)
        start = self._clock.stamp()
        plans: list[FusionPlan | None] = []

        def ask(transport: Transport) -> None:
            with timeline.span("PLAN", step=step - 1):
                assert self.plan is not None
                plan_controller.note_errors(self.plan, [buffer.probe for buffer in self.buffers])
                plans.append(plan_controller.next_plan(transport))

        self._lanes.queue(ask).wait()
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
        elif self._codecs_change and self._is_stale():
            assert self.plan is not None
            self._results.settle()
            self._make_buffers(self.plan)
        if self._step.skips:
            self._lanes.order.sequence = self._step.buckets

    def learn(self) -> None:
        """Adopt the plan by rank 0's order of arrival; the training thread, which reads no tensors, waits for it."""
        plans: list[FusionPlan] = []
        make, step, arrived = self.agreement.make_plan, self._step.number, self._step.arrived
        self._queue_first(lambda transport: plans.append(make(step, arrived, transport))).wait()
        self.plan = plans[0]
        self._adopt(self.plan)

    def lay_out(self, index: int, bucket: Bucket) -> None:
        """Put ``bucket`` into the plan at ``index``, unless it is there already, and drop all buckets after it."""
        known = () if self.plan is None else self.plan.buckets
        if self.agreement.shares:  # asked for each bucket of each step
            (bucket,) = self.agreement.shared(FusionPlan((bucket,), self._size)).buckets
        if index < len(known) and known[index] == bucket:
            return
        self.plan = FusionPlan((*known[:index], bucket), self._size)
        self._compare(self.plan)
        self._codecs[index:] = [self._maker.codec_of(bucket)]
        self.buffers[index:] = [self._buffer(index, bucket)]
        self._note_varying()
        self._lanes.begin_anew(index + 1)

    def _begin_anew(self, plan: FusionPlan | None) -> None:
        """Have no buffers until ``plan`` or a new one begins, and time the steps if there is a plan controller."""
        self.plan = self.next = plan
        self.watch = None if self.agreement.plan_controller is None else StepTimer(self._clock)
        self._lanes.watch = self._results.watch = self.watch
        self._lay_out(FusionPlan((), self._size))
        self.settle()

    def _compare(self, plan: FusionPlan) -> Job:
        """Compare a plan with the other ranks' before any lane sends later work; return the job."""
        return self._queue_first(partial(self.agreement.compare, self._step.number, plan))

    def _queue_first(self, work: Callable[[Transport], None]) -> Job:
        """Queue ``work`` on the first lane; every other lane waits for it before it sends anything queued later."""
        first, *others = self._lanes.all
        agreement = first.put(work)
        # A payload on another lane could overtake the comparison, and a peer that disagrees would misread it. If
        # ``work`` fails, ``wait`` raises its error on each lane, so no lane sends anything more.
        for lane in others:
            lane.put(lambda _: agreement.wait())
        return agreement

    def _adopt(self, plan: FusionPlan) -> None:
        # New buffers take over the residuals, so no old buffer may still change them. Results may still be untaken.
        self._results.settle()
        self._lay_out(plan)

    def _lay_out(self, plan: FusionPlan) -> None:
        self._codecs = [self._maker.codec_of(bucket) for bucket in plan.buckets]
        self.bucket_of = {name: index for index, bucket in enumerate(plan.buckets) for name in bucket.names}
        self._note_varying()
        self._make_buffers(plan)

    def _make_buffers(self, plan: FusionPlan) -> None:
        self.buffers = [self._buffer(index, bucket) for index, bucket in enumerate(plan.buckets)]
        self._lanes.begin_anew(len(plan.buckets))

    def _buffer(self, index: int, bucket: Bucket) -> Buffer:
        codec = self._codecs[index].at_step(self._step.number)
        return self._maker.make(index, bucket, codec, self.agreement.tensors)

    def _is_stale(self) -> bool:
        """Return whether codecs have other settings in this step than the buffers were made with."""
        step = self._step.number
        return any(
            codec.at_step(step) != buffer.codec for codec, buffer in zip(self._codecs, self.buffers, strict=True)
        )

    def _note_varying(self) -> None:
        self._codecs_change = any(type(codec).at_step is not Codec.at_step for codec in self._codecs)
        self.varies = self._codecs_change or self._step.skips or self.watch is not None


def check_plan(plan: FusionPlan, agreement: Agreement, step: Step, size: int) -> None:
    """Raise ``ConfigError`` if an engine of ``size`` ranks cannot have this plan; ``Engine.switch`` says when."""
    plan.check(agreement.tensors.values(), size)
    check_pairs(plan)
    step.check(plan, agreement.plan_controller)


@dataclass
class BufferMaker:
    """Makes the buffers of an engine.

    Attributes:
        memory: keeps error feedback.
        device: the device of all gradients.
        scaling: factors before and after the sum.
        timeline: record of the buffers' work.
        error_feedback: add the codec's loss to the next gradient; None: where the codec says that it pays.
        in_place: results replace the gradients, in buffers that are made from now on.
        rank: this rank.
        size: number of ranks.
        at_once: jobs run on the thread of the hooks, so a wait for the device holds up backward.
        undoable: ``Memory`` keeps the error feedback from before the present step.
    """

    memory: Memory
    device: torch.device
    scaling: Scaling
    timeline: Timeline
    error_feedback: bool | None
    in_place: bool
    rank: int
    size: int
    at_once: bool
    undoable: bool

    def codec_of(self, bucket: Bucket) -> Codec:
        """Return a bucket's codec; warn if it waits for the device where that holds up backward."""
        codec = codecs.get(bucket.codec, **bucket.options, header=False)
        if self.at_once and (codec.waits or bucket.algorithm in _READING):
            _warn_of_waiting(str(codec) if codec.waits else f"the collective {bucket.algorithm}")
        return codec

    def make(self, index: int, bucket: Bucket, codec: Codec, tensors: Mapping[str, TensorInfo]) -> Buffer:
        """Return a buffer that takes over the error feedback of its tensors."""
        memory, device = self.memory, self.device
        feedback = codec.feedback_pays if self.error_feedback is None else self.error_feedback
        feedback = feedback and not codec.lossless
        if not bucket.ahead and isinstance(codec, PartsCodec):
            codec = codec.for_parts(memory.parts(bucket, [_shape(tensors[name]) for name in bucket.names]))
        settings = BufferSettings(self.scaling.before, self.scaling.after, device, self.timeline, self.in_place)
        buffer: Buffer
        if bucket.ahead:
            slots = bucket.slots
            states = {slot.name: memory.state(slot.name, slot.numel, device, feedback=feedback) for slot in slots}
            gather = collectives.get_gather(bucket.algorithm)
            buffer = AheadBuffer(
                bucket, codec, settings, index=index, gather=gather, states=states, rank=self.rank, size=self.size
            )
        else:
            memory.attach(bucket.names, codec)
            residual = memory.flat(bucket, device) if feedback else None
            all_reduce = collectives.by_shares(bucket.algorithm, bucket.shares)
            # On a device a message of its own is only queued there, and costs no time.
            enclosing = device.type == "cpu" and not bucket.shares and encloses(bucket.algorithm)
            buffer = FlatBuffer(bucket, codec, settings, all_reduce=all_reduce, residual=residual, encloses=enclosing)
            if not codec.lossless and getattr(torch, bucket.dtype) in DTYPE_CODES:
                buffer.probe = ErrorProbe(index, bucket, codec, self.rank)
        if self.undoable:
            buffer.remember = memory.remember
        return buffer


@cache
def _warn_of_waiting(what: str) -> None:
    """Warn once in a process."""
    _logger.warning(
        "%s makes the host wait for the device in each sum, and over NCCL backward waits meanwhile; compare its steps "
        "with those of codec='raw' (docs/gpu.md)",
        what,
    )


def _shape(tensor: TensorInfo) -> tuple[int, ...]:
    return (tensor.numel,) if tensor.shape is None else tensor.shape
