"""The engine: takes gradients as they arrive, sends buckets in plan order and hands results back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache, partial
from typing import NoReturn

import torch
from torch import Tensor

from .. import codecs, collectives
from ..clock import Clock, Stamp, clock_of
from ..codecs import Codec, PartsCodec
from ..collectives import UNSCALED, Scaling
from ..errors import PlanMismatch, UsageError, again
from ..plan import Bucket, FusionPlan, TensorInfo
from ..seeds import derive_seed
from ..timeline import Timeline
from ..transport import Transport
from ..transport._capture import refuse_capture
from ..transport._clocks import measure_clock
from .ahead import AheadBuffer
from .buffers import Buffer, FlatBuffer
from .failure import located, tensors_that_differ
from .fusing import check_pairs, fuse
from .lane import Lane
from .memory import Memory
from .order import SendOrder
from .plan_controller import PlanController, StepTimer
from .planners import Planner
from .worker import Job

__all__ = ["Engine"]

_logger = logging.getLogger("fusionlayer")

_READING = ("gather_v", "oktopk")  # collectives that read the sizes of their messages on the host


class Engine:
    """Sums gradients over ranks while backward goes on: on threads of its own, or, over NCCL, on streams of its own.

    In each step the caller submits every tensor once, in any order, with ``submit``. Then it calls ``synchronize``
    once, or ``end_step`` and ``take`` for each bucket. If no plan is given, the first step learns the order in which
    gradients arrive and makes the plan. From the second step on, a bucket leaves as soon as it and all buckets before
    it are complete. Before the first payload the ranks compare plan and options.

    A caller that fuses gradients itself, as DDP does, calls ``submit_bucket`` in place of ``submit``. The plan then
    consists of these buckets.

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
        memory: keeps error feedback; a new one by default.
        error_feedback: send what the codec lost with the next gradient; None: where the codec says that it pays.
        scaling: factors before and after the sum.
        timeline: record of the threads' work.
        lanes: buckets that are under way at once; while one is encoded or decoded, another travels. Over NCCL one lane
            does: its calls wait for nothing.
        overlap_forward: the caller takes buckets one by one while the next forward runs. After some steps buckets leave
            in the order in which forward needs them: of the complete ones, the one that backward completed last.
        plan_controller: watches the steps and may give the engine another plan between two of them.
        clock: times the steps; None: that of the ``device``.
        name: of the threads.

    Attributes:
        plan_controller: as given.
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
        overlap_forward: bool = False,
        plan_controller: PlanController | None = None,
        clock: Clock | None = None,
        name: str = "fusionlayer",
    ) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._codec = codec
        for each in [codec] if isinstance(codec, Codec) else codec.values():
            collectives.choose(each, transport.size, algorithm, ahead=ahead)
        self._algorithm, self._ahead = algorithm, ahead
        self._planner = planner
        self._device = device
        self.memory = memory or Memory()
        self._error_feedback = error_feedback
        self._scaling = scaling
        self._timeline = timeline or Timeline(None, transport.rank)
        self._overlap_forward = overlap_forward
        self.plan_controller = plan_controller
        self._clock = clock_of(device) if clock is None else clock
        self._timeline.time_by(self._clock)
        self._watch = None if plan_controller is None else StepTimer(self._clock)
        self.rank = transport.rank
        self.size = transport.size
        self.step = 0
        self._why = ""  # why the tensors have changed, until the ranks have agreed on that
        self.plan: FusionPlan | None = None
        self._next_plan: FusionPlan | None = None
        if plan is not None:
            self.switch(plan)
            self.plan = plan
        self._codecs: list[Codec] = []
        self._codecs_change = False
        self._buffers: list[Buffer] = []
        self._bucket_of: dict[str, int] = {}
        if transport.only_queues(device):
            lanes = 1
        self._order = SendOrder(0, lanes, self._clock)
        self._arrived: dict[str, Tensor] = {}
        self._jobs: dict[int, Job] = {}
        self._ended: dict[int, tuple[Job, Buffer]] = {}
        self._ended_bucket_of: dict[str, int] = {}
        # Guards what ``submit`` and ``submit_bucket`` change: _arrived, _jobs, the buffers and the beginning of a step.
        # Hooks call them, and hooks may run on several threads of backward at once. The end of a step takes no lock,
        # because no hook runs then. Lanes never take it, so a thread that holds it may wait for a lane.
        self._lock = threading.Lock()
        transport.agree("the number of lanes", lanes)
        offset = measure_clock(transport, wanted=self._timeline.enabled)
        if offset is not None:
            self._timeline.note_clock(*offset, transport.size)
        self._lanes = [Lane(transport, device, name)]
        self._lanes += [Lane(transport.duplicate(), device, f"{name} {i}") for i in range(1, lanes)]
        self.failure: BaseException | None = None
        self._cause: BaseException | None = None  # the first error of any bucket; written by the lanes

    def switch(self, plan: FusionPlan) -> None:
        """Adopt another plan when the next step begins; all ranks call it between the same two steps.

        Each tensor keeps its error feedback. Before the first payload the ranks compare the plans.

        Raises:
            ConfigError: the plan is for other tensors or ranks, or a bucket names a codec and a collective that are
                unknown or do not go together.
        """
        plan.check(self._tensors.values(), self.size)
        check_pairs(plan)
        self._next_plan = plan

    def enrol(
        self,
        tensors: Sequence[TensorInfo],
        why: str,
        *,
        codec: Codec | Mapping[str, Codec],
        plan: FusionPlan | None = None,
        plan_controller: PlanController | None = None,
    ) -> None:
        """Sum these tensors from now on; all ranks call it before the first gradient of the same step.

        That step is as a first one: it learns the order of arrival, and the ranks compare before the first payload.
        Each tensor keeps its error feedback. Until the results of the last step are taken, its buckets stay.

        Args:
            tensors: every tensor of a step from now on; none, and steps are empty.
            why: what has changed on this rank, for the errors of ranks where it has not.
            codec, plan, plan_controller: as for a new engine.

        Raises:
            UsageError: the step has gradients already.
            ConfigError: the plan is for other tensors or ranks.
            PlanMismatch, TransportError: as from ``synchronize``, if no tensors are left.
        """
        if self.failure is not None:
            raise again(self.failure)
        if self._arrived:
            raise UsageError(f"the tensors of step {self.step} change after its first gradient; change them before")
        known, self._tensors = self._tensors, {tensor.name: tensor for tensor in tensors}
        try:
            if plan is not None:
                self.switch(plan)
        except BaseException:
            self._tensors = known
            raise
        self._why = why
        self._codec = codec
        self.plan, self._next_plan = None, plan
        self.plan_controller = plan_controller
        self._watch = None if plan_controller is None else StepTimer(self._clock)
        self._codecs, self._codecs_change = [], False
        self._buffers, self._bucket_of = [], {}
        self._order = SendOrder(0, len(self._lanes), self._clock)
        if not tensors:
            # No gradient will begin this step, so the ranks agree at once.
            self.plan, self._next_plan = FusionPlan((), self.size), None
            try:
                self._agree_first(partial(self._agree, self.step, self.plan)).wait()
            except BaseException as error:
                self._fail(error)

    @property
    def pending(self) -> AbstractSet[str]:
        """Names submitted so far in the current step: a live view, which changes with each ``submit``."""
        return self._arrived.keys()

    @property
    def untaken(self) -> frozenset[int]:
        """Buckets of the last step whose results nobody has taken yet."""
        return frozenset(self._ended)

    @property
    def may_leave_out(self) -> bool:
        """Whether ``leave_out`` is possible: there is no plan yet, no plan controller and no ``overlap_forward``."""
        no_plan = self.plan is None and self._next_plan is None
        return no_plan and self.plan_controller is None and not self._overlap_forward

    def leave_out(self, names: Collection[str]) -> frozenset[str]:
        """Remove the tensors that at least one rank names, and return their names.

        All ranks call it together, in the first step.

        Raises:
            PlanMismatch: ranks disagree on model or options.
            TransportError: a peer was lost, stopped or too late.
        """
        known = sorted(self._tensors)
        named = torch.tensor([float(name in names) for name in known])

        def agree(transport: Transport) -> None:
            self._agree(self.step, None, transport)
            transport.all_reduce(named)

        self.put(agree)()
        out = frozenset(name for name, count in zip(known, named.tolist(), strict=True) if count)
        for name in out:
            del self._tensors[name]
            self._arrived.pop(name, None)
        return out

    def put(self, work: Callable[[Transport], None]) -> Callable[[], None]:
        """Queue ``work`` on the first lane, and return a function that waits for its end and raises what it raised.

        All ranks call it in the same place: when a step's gradients are all submitted, or before the first step.
        """
        if self.failure is not None:
            raise again(self.failure)
        try:
            job = self._lanes[0].put(work)
        except BaseException as error:
            self._fail(error)

        def wait() -> None:
            try:
                job.wait()
            except BaseException as error:
                self._fail(error)

        return wait

    def bucket_of(self, name: str) -> int:
        """Return the index of the bucket in which a tensor travelled in the last step."""
        return self._ended_bucket_of[name]

    def awaits(self, name: str) -> bool:
        """Return whether the last step's result of a tensor has not been taken yet."""
        return self._ended_bucket_of.get(name) in self._ended

    def submit(self, name: str, gradient: Tensor) -> None:
        """Take a gradient; its scaled sum over ranks replaces it, or with ``overlap_forward`` waits for ``take``.

        Raises:
            UsageError: the gradient was submitted twice, is not one of the engine's tensors, has another size, or its
                result of the last step has not been taken; or a CUDA graph is captured.
            FusionLayerError: an earlier step has failed; the same error again.
        """
        if self.failure is not None or self._device.type == "cuda":
            self._check_sound(f"gradient {name!r} arrives")
        arrived = None if self._watch is None else self._clock.stamp()
        with self._lock:
            tensor = self._tensors.get(name)
            if tensor is None:
                raise UsageError(f"gradient {name!r} is not one of this engine's {len(self._tensors)} tensors")
            if gradient.numel() != tensor.numel:
                raise UsageError(f"gradient {name!r} has {gradient.numel()} elements, expected {tensor.numel}")
            if name in self._arrived:
                raise UsageError(f"gradient {name!r} was submitted twice in step {self.step}; synchronize() in between")
            if self._ended and self.awaits(name):
                raise UsageError(f"gradient {name!r} was submitted before its result of the last step was taken")
            try:
                if not self._arrived:
                    self._begin_step()
                self._arrived[name] = gradient
                if self._buffers:
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
            if index != len(self._jobs):
                raise UsageError(
                    f"bucket {index} was submitted, but bucket {len(self._jobs)} comes next in step {self.step}"
                )
            try:
                if not self._arrived:
                    self._begin_step()
                self._lay_out(index, bucket)
                self._arrived.update(dict.fromkeys(bucket.names, flat))
                self._buffers[index].put_whole(flat, self.step)
                self._send(index, seed, done)
            except BaseException as error:
                self._fail(error)

    def end_step(self) -> None:
        """End the step without waiting for its results.

        Raises:
            UsageError: tensors are missing.
            PlanMismatch: ranks disagree on model, plan or options.
            TransportError: a peer was lost, stopped or too late.
        """
        if len(self._arrived) < len(self._tensors):
            missing = [name for name in self._tensors if name not in self._arrived]
            raise UsageError(
                f"{len(missing)} gradients were not submitted in step {self.step}, the first: {missing[0]!r}"
            )
        try:
            if self.plan is None:
                # Nothing has been sent yet: the gradients were kept until the order of their arrival was complete.
                self._agree_first(partial(self._agree_and_plan, self.step)).wait()
                assert self.plan is not None
                self._make_buffers(self.plan)
                for name, gradient in self._arrived.items():
                    self._put(name, gradient)
            elif self._overlap_forward and self._order.due:
                self._lanes[0].put(self._order.agree).wait()
            self._order.end_step()
        except BaseException as error:
            self._fail(error)
        self._arrived.clear()
        self._ended = {index: (job, self._buffers[index]) for index, job in self._jobs.items()}
        self._ended_bucket_of = self._bucket_of
        self._jobs = {}
        self.step += 1
        if self.plan_controller is not None and self.plan_controller.due(self.step - 1):
            try:
                self._ask_controller(self.plan_controller)
            except BaseException as error:
                self._fail(error)

    def take(self, index: int) -> dict[str, Tensor]:
        """Wait for a bucket of the step that has ended; return its results by name, each in its gradient's shape.

        The caller may use them until it submits the bucket's first gradient of the next step. Each bucket is taken
        once.

        Raises:
            TransportError: a peer was lost, stopped or too late; it names rank, bucket, tensors and sequence.
        """
        try:
            job, buffer = self._ended[index]
            self._wait_for(index, job, buffer)
        except BaseException as error:
            self._fail(error)
        del self._ended[index]
        return buffer.take()

    def synchronize(self) -> None:
        """End the step and wait until every gradient holds its result.

        Raises:
            UsageError: tensors are missing.
            PlanMismatch: ranks disagree on model, plan or options.
            TransportError: a peer was lost, stopped or too late; it names rank, bucket, tensors and sequence.
        """
        self.end_step()
        for index in list(self._ended):
            self.take(index)

    def drain(self) -> None:
        """Wait until the device has done all messages of the steps that have ended.

        Over NCCL, results are only queued when they are taken. Whoever saves them, or what they have changed, calls it
        before.

        Raises:
            FusionLayerError: a step has failed; what it was to change is worthless.
        """
        self._check_sound("what steps have queued is waited for")
        try:
            for lane in self._lanes:
                lane.drain()
        except BaseException as error:
            self._fail(error)

    def close(self) -> None:
        """Let the buckets of the last step end, on the device too, then the threads, and close the transports.

        A second call does nothing.

        Raises:
            TransportError: over NCCL, a step whose results were taken could not end.
            UsageError: a CUDA graph is captured. The engine is closed in both cases.
        """
        # Other ranks wait for this rank's share of these buckets, so they travel even if nobody here takes them.
        for job, _ in self._ended.values():
            with suppress(Exception):
                job.wait()
        try:
            if self.failure is None:
                self.drain()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Close the transports at once: what is under way fails here and on the other ranks."""
        for lane in self._lanes:
            lane.close()
        self._timeline.close()

    def _check_sound(self, what: str) -> None:
        """Raise what a step has failed with, or that a CUDA graph is captured while ``what``, a clause, happens."""
        if self.failure is not None:
            raise again(self.failure)
        if self._device.type == "cuda":
            refuse_capture(what)

    # ---- called with the lock held, or at the end of a step when no hook can run ------------------------------------

    def _begin_step(self) -> None:
        """Adopt the next plan, if there is one, and the codecs' settings for this step."""
        if self._watch is not None and self.plan_controller is not None and self._watch.begin(self.step):
            self.plan_controller.note_step(self, self.step - 1, self._watch.read())
        self._timeline.settle()
        if self._next_plan is not None:
            self.plan, self._next_plan = self._next_plan, None
            self._agree_first(partial(self._agree, self.step, self.plan))
            self._make_buffers(self.plan)
        elif self._codecs_change and any(
            codec.at_step(self.step) != b.codec for codec, b in zip(self._codecs, self._buffers, strict=True)
        ):
            assert self.plan is not None
            self._make_buffers(self.plan)

    def _ask_controller(self, plan_controller: PlanController) -> None:
        """Ask for the next plan on a lane, when all lanes are idle.

        The training thread waits for the answer, so it and the lane never use the controller at the same time.
        """
        # The controller measures: a bucket on another lane would falsify that.
        for index, (job, buffer) in self._ended.items():
            self._wait_for(index, job, buffer)
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

    def _wait_for(self, index: int, job: Job, buffer: Buffer) -> None:
        start = None if self._watch is None else self._clock.stamp()
        with self._timeline.span("WAIT", step=self.step - 1, bucket=index):
            job.wait()
            if self._watch is not None or self._timeline.enabled:
                buffer.join()  # here already, so that what the device waits counts too
        if self._watch is not None:
            self._watch.note_waiting(start)

    def _agree_first(self, work: Callable[[Transport], None]) -> Job:
        """Queue ``work`` on the first lane; every other lane waits for it before it sends anything queued later."""
        first, *others = self._lanes
        agreement = first.put(work)
        # A payload on another lane could overtake the comparison, and a peer that disagrees would misread it. If
        # ``work`` fails, ``wait`` raises its error on each lane, so no lane sends anything more.
        for lane in others:
            lane.put(lambda _: agreement.wait())
        return agreement

    def _make_buffers(self, plan: FusionPlan) -> None:
        # New buffers take over the residuals, so no old buffer may still change them. Results may still be untaken.
        for job, buffer in self._ended.values():
            job.wait()
            buffer.join()
        self._codecs = [self._codec_of(bucket) for bucket in plan.buckets]
        self._codecs_change = any(type(codec).at_step is not Codec.at_step for codec in self._codecs)
        self._buffers = [
            self._make_buffer(index, bucket, codec.at_step(self.step))
            for index, (bucket, codec) in enumerate(zip(plan.buckets, self._codecs, strict=True))
        ]
        self._bucket_of = {name: index for index, bucket in enumerate(plan.buckets) for name in bucket.names}
        self._order = SendOrder(len(self._buffers), len(self._lanes), self._clock)

    def _lay_out(self, index: int, bucket: Bucket) -> None:
        """Put ``bucket`` into the plan at ``index``, unless it is there already, and drop all buckets after it."""
        known = () if self.plan is None else self.plan.buckets
        if index < len(known) and known[index] == bucket:
            return
        self.plan = FusionPlan((*known[:index], bucket), self.size)
        self._agree_first(partial(self._agree, self.step, self.plan))
        self._codecs[index:] = [self._codec_of(bucket)]
        self._codecs_change = any(type(codec).at_step is not Codec.at_step for codec in self._codecs)
        self._buffers[index:] = [self._make_buffer(index, bucket, self._codecs[index].at_step(self.step))]
        self._order = SendOrder(len(self._buffers), len(self._lanes), self._clock)

    def _make_buffer(self, index: int, bucket: Bucket, codec: Codec) -> Buffer:
        device = self._device
        feedback = codec.feedback_pays if self._error_feedback is None else self._error_feedback
        feedback = feedback and not codec.lossless
        scaling, in_place = self._scaling, not self._overlap_forward
        if not bucket.ahead and isinstance(codec, PartsCodec):
            codec = codec.for_parts(self.memory.parts(bucket, [self._shape(name) for name in bucket.names]))
        common = (bucket, codec, scaling.before, scaling.after, device, self._timeline, in_place)
        if not bucket.ahead:
            self.memory.attach(bucket.names, codec)
            residual = self.memory.flat(bucket, device) if feedback else None
            return FlatBuffer(*common, all_reduce=collectives.get(bucket.algorithm), residual=residual)
        states = {
            slot.name: self.memory.state(slot.name, slot.numel, device, feedback=feedback) for slot in bucket.slots
        }
        gather = collectives.get_gather(bucket.algorithm)
        return AheadBuffer(*common, index=index, gather=gather, states=states, rank=self.rank, size=self.size)

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors[name]
        return (tensor.numel,) if tensor.shape is None else tensor.shape

    def _codec_of(self, bucket: Bucket) -> Codec:
        codec = codecs.get(bucket.codec, **bucket.options, header=False)
        if self._lanes[0].is_at_once and (codec.waits or bucket.algorithm in _READING):
            _warn_of_waiting(str(codec) if codec.waits else f"the collective {bucket.algorithm}")
        return codec

    def _fail(self, error: BaseException) -> NoReturn:
        """Release the gradients, close the transports and raise the first cause."""
        # Peers are out of step with this rank now, so nothing may be sent any more. Results are waited for in the order
        # of the plan, but lanes fail in any order: an early bucket may have failed because a later one did.
        cause = error if self._cause is None or not isinstance(error, Exception) else again(self._cause)
        self.failure = again(cause).with_traceback(None)
        self.give_up()
        self._arrived.clear()
        self._ended.clear()
        if cause is error:
            raise error
        raise cause from error

    def _put(self, name: str, gradient: Tensor) -> None:
        index = self._bucket_of[name]
        buffer = self._buffers[index]
        buffer.put(name, gradient, self.step)
        if buffer.full:
            if self._overlap_forward:
                self._order.note_complete(index)
            self._launch()

    def _launch(self) -> None:
        """Send every complete bucket that is next in the order."""
        # A complete bucket waits for those before it: all ranks must send in the same order, whatever order their
        # gradients arrive in.
        order = self._order.sequence
        while len(self._jobs) < len(order) and self._buffers[order[len(self._jobs)]].full:
            index = order[len(self._jobs)]
            self._send(index, derive_seed(self.step, index))

    def _send(self, index: int, seed: int, done: Callable[[], None] | None = None) -> None:
        # The bucket's number in the order picks the lane, not which lane is free: each lane has its own transport, and
        # all ranks must send a bucket on the same one.
        lane = self._lanes[len(self._jobs) % len(self._lanes)]
        ready = self._timeline.now() if self._timeline.enabled else None
        work = partial(self._run, index, self._buffers[index], self.step, seed, ready, done)
        self._jobs[index] = lane.put(work, abandoned=done)

    # ---- in the jobs of lanes ---------------------------------------------------------------------------------------

    def _run(
        self,
        index: int,
        buffer: Buffer,
        step: int,
        seed: int,
        ready: Stamp | None,
        done: Callable[[], None] | None,
        transport: Transport,
    ) -> None:
        timeline = self._timeline
        timed = self._watch is not None or self._overlap_forward and self._order.measures
        if timeline.enabled or timed:
            buffer.follow()  # on a device the bucket is under way from here on, and not from the call
        if timeline.enabled and ready is not None:  # a timeline may begin in between
            timeline.record("QUEUE", ready, timeline.now(), row=f"bucket {index}", step=step, bucket=index)
        start = self._clock.stamp() if timed else None
        try:
            with timeline.bucket_span(transport, step=step, bucket=index):
                buffer.run(transport, seed)
        except BaseException:
            try:
                with located(step, index, buffer.bucket, transport):
                    raise
            except BaseException as told:
                self._cause = self._cause or told
                raise
        if timed:
            end = self._clock.stamp()
            self._order.note_sent(index, start, end)
            if self._watch is not None:
                self._watch.note_bucket(step, index, start, end)
        if done is not None:
            done()  # last: if anything before it fails, the lane calls it, as the job's ``abandoned``

    def _agree(self, step: int, plan: FusionPlan | None, transport: Transport) -> None:
        """Compare model, options and plan with the other ranks."""
        names = sorted(self._tensors)
        facts: list[object] = [
            [self._tensors[name] for name in names],
            f"scaling {self._scaling}",
            f"feedback {self._error_feedback}",
            f"overlap {self._overlap_forward}",
            f"step {step}",
            f"plan_controller {self.plan_controller}",
        ]
        if plan is not None:
            facts.append(plan)
        else:
            codec = self._codec if isinstance(self._codec, Codec) else [self._codec[name] for name in names]
            facts += [codec, self._algorithm, self._ahead, str(self._planner)]
        with self._timeline.span("NEGOTIATE_ALLREDUCE"):
            try:
                transport.agree("the fusion plan (model, codec, options)", *facts, why=self._why)
            except PlanMismatch as error:
                differences = tensors_that_differ(self._tensors.values(), transport)
                raise PlanMismatch(f"{error}{differences}", error.ranks) from None
        self._why = ""

    def _agree_and_plan(self, step: int, transport: Transport) -> None:
        """Compare, take rank 0's order of arrival, plan with it, and compare the plans.

        The training thread waits in ``end_step`` meanwhile, so nothing else reads or writes _arrived and plan.
        """
        self._agree(step, None, transport)
        names = sorted(self._tensors)
        position = {name: i for i, name in enumerate(names)}
        order = torch.tensor([position[name] for name in self._arrived])
        transport.broadcast(order, 0)
        tensors = [self._tensors[names[i]] for i in order.tolist()]
        plan = fuse(tensors, self._planner, self._codec, transport.size, algorithm=self._algorithm, ahead=self._ahead)
        plan.check(self._tensors.values(), transport.size)
        transport.agree("the fusion plan that was made", plan)
        self.plan = plan


@cache
def _warn_of_waiting(what: str) -> None:
    """Warn once in a process."""
    _logger.warning(
        "%s makes the host wait for the device in each sum, and over NCCL backward waits meanwhile; compare its steps "
        "with those of codec='raw' (docs/gpu.md)",
        what,
    )
