"""The engine: takes gradients as they arrive, launches buckets in plan order and hands results back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from .. import collectives
from ..base.errors import UsageError
from ..base.plan import Bucket, FusionPlan, TensorInfo
from ..codecs import Codec
from ..collectives import UNSCALED, Scaling
from ..observe.timeline import PROFILER_STATE, Timeline
from ..process.clock import Clock, clock_of
from ..transport import Transport
from .agreement import Agreement
from .lanes import Lanes
from .lifecycle import Lifecycle
from .memory import Memory
from .plan_controller import PlanController
from .plan_state import BufferMaker, PlanState, check_plan
from .planners import Planner
from .results import Results
from .step import Step, Usage, all_used

_CPU = torch.device("cpu")


class Engine(Lifecycle):
    """Sums gradients over ranks while backward continues: on its own threads, or, over NCCL, on its own streams.

    In each step the caller submits every tensor that is ``due`` once, in any order, with ``submit``. Then it calls
    ``synchronize`` once, or ``end_step`` and ``take`` for each bucket. If no plan is given, the first step records the
    order of arrival of gradients and makes the plan. From the second step on, a bucket is launched as soon as it and
    all buckets before it are complete. Before the first payload the ranks compare plan and options.

    A caller that fuses gradients itself, as DDP does, calls ``submit_bucket`` instead of ``submit``. The plan then
    consists of these buckets. A plan may launch a bucket once in several steps (``Bucket.every``); a step without a due
    bucket sends nothing.

    Args:
        tensors: every tensor of a step, in any order.
        transport: used by the engine alone from now on, and closed with it.
        codec: the codec of all gradients, or of each by its name, for the plan that the engine makes. A given plan has
            its own.
        algorithm: collective for that plan; None chooses.
        ahead: encode each tensor by itself as it arrives, ahead of fusion, in that plan. None: if ``algorithm`` gathers
            such messages; without an ``algorithm``, as the codec does by default.
        planner: makes that plan.
        plan: fixed plan; ``codec``, ``algorithm``, ``ahead`` and ``planner`` are then ignored.
        device: the device of all gradients.
        memory: keeps error feedback; a new one, of 32 bits, by default.
        error_feedback: add the codec's loss to the next gradient; None: where the codec says that it pays.
        scaling: factors before and after the sum.
        timeline: record of the threads' work.
        lanes: buckets in flight at once; while one is encoded or decoded, another is sent. Over NCCL always one, whose
            calls never block.
        hold_results: gradients stay unchanged, and results wait for ``take``: any number of steps, but not beyond the
            next gradient of their bucket.
        overlap_forward: hold results, which the caller takes one by one while the next forward runs. After some steps
            buckets are launched in the order in which forward needs them: of the complete ones, the one that backward
            completed last.
        undoable: keep the error feedback from before the present step, for ``Memory.state_before``, until
            ``Memory.forget``. It costs a copy of each residual in each step, on the lanes.
        shares: the part of a sum that each rank computes, in buckets that can have shares and whose plan gives none: a
            whole number for each rank. Empty: equally much.
        plan_controller: watches the steps and may replace the engine's plan between two of them.
        clock: times the steps; None: the clock of the ``device``.
        name: the name of the threads.

    Attributes:
        rank, size: this rank, and the number of ranks.
        nodes: number of ranks of each node.
        memory, scaling: as given.
        failure: the error that a step has failed with, or None. The engine is then closed, and every call raises it.
        pending: names submitted so far in the current step: a live view.
        lanes: the communication threads or streams, and the buckets in flight.
        finds_unused: ranks find out which tensors none of them has used; the same on all ranks.
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
        self.nodes = nodes = transport.node_sizes
        for each in [codec] if isinstance(codec, Codec) else codec.values():
            collectives.choose(each, nodes, algorithm, ahead=ahead)
        self._clock = clock = clock_of(device) if clock is None else clock
        self._timeline = timeline = timeline or Timeline(None, transport.rank)
        self.rank, self.size = rank, size = transport.rank, transport.size
        self.memory, self.scaling, self._device = memory or Memory(), scaling, device
        self._overlap_forward = overlap_forward
        tensors_by_name = {tensor.name: tensor for tensor in tensors}
        feedback = f"feedback {error_feedback} in {self.memory.bits} bits"
        options = (f"scaling {scaling}", feedback, f"overlap {overlap_forward}")
        made_by = (codec, algorithm, ahead, planner, options, plan_controller)
        agreement = Agreement(tensors_by_name, *made_by, timeline, hold_results, shares, device.type != "cpu")
        # ``failure`` is set once, with the lock held or on the training thread. ``submit`` reads it before it takes the
        # lock: if it comes too early for that, the closed lanes refuse the bucket instead.
        self.failure: BaseException | None = None
        # Guards the step, the plan with its buffers, and the jobs of ``lanes``, which ``submit`` and ``submit_bucket``
        # change. Hooks call these, on several threads of backward at once. The end of a step takes no lock, as no hook
        # runs then: backward has ended, which orders its threads before the training thread. Lanes never take it, so a
        # thread that holds it may wait for a lane.
        self._lock = threading.Lock()
        holds = hold_results or overlap_forward
        self._step = Step(holds, overlap_forward)
        self.pending: AbstractSet[str] = self._step.arrived.keys()
        if plan is not None:
            check_plan(plan, agreement, self._step, size)
        at_once = transport.only_queues(device)
        factors = (device, scaling, timeline, error_feedback)
        maker = BufferMaker(self.memory, *factors, not holds, rank, size, at_once, undoable)
        self.lanes = Lanes(transport, device, timeline, clock, lanes, name, overlap_forward)
        self._results = Results(clock, timeline)
        self._plans = PlanState(agreement, self._step, maker, self.lanes, self._results, plan, clock)
        self.finds_unused = False
        self._unused: list[str] = []
        # Whether the last bucket of the present step carries which tensors are used, and the use of that step.
        self._carries = False
        self._next_usage: Usage | None = None
        self._usage: Usage | None = None  # of the last step; None: this rank has used all tensors

    @property
    def due(self) -> AbstractSet[str]:
        """Names of the tensors that are sent in the present step."""
        return self._step.due.keys()

    @property
    def untaken(self) -> frozenset[int]:
        """Buckets of steps that have ended whose results were not taken yet."""
        return frozenset(self._results.untaken)

    def awaits(self, name: str) -> bool:
        """Return whether a tensor's last result was not taken yet."""
        return self._results.bucket_of.get(name) in self._results.untaken

    def bucket_of(self, name: str) -> int:
        """Return the number of the bucket that last sent a tensor."""
        return self._results.bucket_of[name]

    # ---- within a step ----------------------------------------------------------------------------------------------

    def submit(self, name: str, gradient: Tensor) -> None:
        """Take a gradient; its scaled sum over ranks replaces it, or if results are held, waits for ``take``.

        Raises:
            UsageError: the gradient was submitted twice, is not one of the step's tensors, has another size, or its
                last result has not been taken; or a CUDA graph is captured.
            FusionLayerError: an earlier step has failed; the same error again.
        """
        step, plans, untaken = self._step, self._plans, self._results.untaken
        if self.failure is not None or self._device.type == "cuda":
            self._check(f"gradient {name!r} arrives")
        at = None if plans.watch is None else self._clock.stamp()
        with self._lock:
            tensor, arrived = step.due.get(name), step.arrived
            if tensor is None or tensor.numel != gradient.numel() or name in arrived:
                step.refuse(name, gradient.numel(), plans.agreement.tensors)
            if untaken and self._results.bucket_of.get(name) in untaken:
                step.refuse(name, gradient.numel(), plans.agreement.tensors)
            try:
                if not arrived and (plans.varies or plans.next is not None or self._timeline.enabled):
                    self._begin_step()
                arrived[name] = gradient
                index = plans.bucket_of.get(name)  # None before the first plan
                if index is not None:
                    buffer = plans.buffers[index]
                    buffer.put(name, gradient, step.number)
                    if buffer.full:
                        if self._overlap_forward:
                            self.lanes.order.note_complete(index)
                        enclose = self._enclose if self.finds_unused else None
                        self.lanes.launch(plans.buffers, step.number, enclose)
                if plans.watch is not None:
                    plans.watch.note_gradient(name, at)
            except BaseException as error:
                self.fail(error)

    def submit_bucket(self, index: int, bucket: Bucket, flat: Tensor, seed: int, done: Callable[[], None]) -> None:
        """Take all gradients of a bucket and launch it at once; the scaled sum over ranks replaces the gradients.

        All ranks submit the same buckets, in the order of their numbers. A bucket may differ from the last step's: the
        plan then changes, and the ranks compare the new bucket before its payload.
        """
        step, plans, lanes = self._step, self._plans, self.lanes
        self._check(f"gradient {bucket.names[0]!r} arrives")
        with self._lock:
            sent = len(lanes.jobs)
            if index != sent:
                raise UsageError(f"bucket {index} was submitted, but bucket {sent} comes next in step {step.number}")
            try:
                if not step.arrived:
                    self._begin_step()
                plans.lay_out(index, bucket)
                step.arrived.update(dict.fromkeys(bucket.names, flat))
                buffer = plans.buffers[index]
                buffer.put_whole(flat, step.number)
                buffer.seed, buffer.done = seed, done
                lanes.launch(plans.buffers, step.number)
            except BaseException as error:
                self.fail(error)

    def submit_unused(self, name: str, zeros: Tensor) -> None:
        """Take zeros, or their equivalent, for a tensor that this rank has not used; otherwise like ``submit``.

        Only with ``finds_unused``: ranks then find out at the end of the step whether any of them has used it.
        """
        self.memory.remember((name,))  # what it owes stays as it is if no rank has
        self._unused.append(name)  # before the last bucket is launched, which carries it
        self.submit(name, zeros)

    def unused(self) -> frozenset[str]:
        """Return the tensors of the last step that no rank has used, with ``finds_unused``.

        Their results mean nothing. Once those are taken, ``memory.restore`` restores their error feedback.
        """
        usage = self._usage
        if usage is None:
            return frozenset()
        try:
            usage.job.wait()
            return frozenset() if usage.uses_all else usage.unused()
        except BaseException as error:
            self.fail(error)

    def end_step(self) -> None:
        """End the step without waiting for its results.

        With ``finds_unused`` ranks exchange the used tensors: in the messages of the last bucket, or if its collective
        cannot carry them, in a message on another lane, if there are several.

        Raises:
            UsageError: tensors are missing, or results that were sent under another plan have not been taken.
            PlanMismatch: ranks disagree on model, plan or options.
            TransportError: a peer failed, stopped or timed out.
        """
        step, plans, lanes, results = self._step, self._plans, self.lanes, self._results
        lanes.steps += 1
        if step.skips and not step.due:
            self._check()
            step.number += 1
            plans.settle()
            return
        if len(step.arrived) < len(step.due):
            step.refuse_missing()
        if results.untaken and results.plan is not plans.plan:
            results.refuse_another(plans.plan)
        try:
            if plans.plan is None:
                # Nothing has been sent yet: the gradients were kept until the order of arrival was complete.
                plans.learn()
                for name, gradient in step.arrived.items():
                    plans.buffers[plans.bucket_of[name]].put(name, gradient, step.number)
                lanes.launch(plans.buffers, step.number, self._enclose if self.finds_unused else None)
            elif self._overlap_forward and lanes.order.due:
                lanes.queue(lanes.order.agree).wait()
            if self._overlap_forward:
                lanes.order.end_step()
            if self.finds_unused:
                usage, self._next_usage = self._next_usage, None
                if not self._carries:
                    usage = self._send_usage()
                elif usage is not None:
                    usage.job = lanes.jobs[lanes.order.sequence[-1]]
                self._usage, self._carries = usage, False
        except BaseException as error:
            self.fail(error)
        step.arrived.clear()
        for index, job in lanes.jobs.items():
            results.untaken[index] = job, plans.buffers[index], step.number
        results.plan, results.bucket_of = plans.plan, plans.bucket_of
        lanes.jobs = {}
        step.number += 1
        if step.skips or plans.next is not None:
            plans.settle()
        plan_controller = plans.agreement.plan_controller
        if plan_controller is not None and plan_controller.due(step.number - 1):
            try:
                plans.ask(plan_controller, self._timeline)
            except BaseException as error:
                self.fail(error)

    def synchronize(self) -> None:
        """End the step and wait until every gradient holds its result."""
        self.end_step()
        self.take_all()

    def take(self, index: int) -> dict[str, Tensor]:
        """Wait for a bucket of a step that has ended; return its results by name, each in its gradient's shape.

        The caller may use them until it submits the bucket's next gradient. Each bucket is taken once.
        """
        results = self._results
        try:
            if results.watch is not None or self._timeline.enabled or getattr(*PROFILER_STATE):
                holder = results.wait_for(index)
            else:
                job, holder, _ = results.untaken[index]
                job.wait()
        except BaseException as error:
            self.fail(error)
        del results.untaken[index]
        return holder.take()

    def take_all(self) -> None:
        """Wait for all results that were not taken, where they replace the gradients; raise as ``take`` does."""
        for index in sorted(self._results.untaken):
            self.take(index)

    # ---- called with the lock held, or at the end of a step when no hook can run ------------------------------------

    def _enclose(self) -> Tensor:
        """Return the bits that the last bucket of the step carries: by now all tensors have been submitted."""
        self._carries = True
        if not self._unused:  # what other ranks use does not matter then
            return all_used(len(self._plans.bucket_of)).repeat(self.size, 1)
        unused, self._unused = self._unused, []
        self._next_usage = Usage(self._plans.bucket_of, unused, self.size, _CPU)
        return self._next_usage.every

    def _send_usage(self) -> Usage:
        """Begin to exchange by a message which tensors ranks have used, where the last bucket has not carried it."""
        unused, self._unused = self._unused, []
        lanes = self.lanes
        usage = Usage(self._plans.bucket_of, unused, self.size, self._device if lanes.are_at_once else _CPU)
        # On the lane that would take the next bucket: it waits for the last one least.
        usage.job = lanes.all[len(lanes.jobs) % len(lanes.all)].put(usage.exchange)
        return usage

    def _begin_step(self) -> None:
        """Report the last step to the plan controller, and begin this one."""
        plans, number = self._plans, self._step.number
        plan_controller = plans.agreement.plan_controller
        if plans.watch is not None and plan_controller is not None and plans.watch.begin(number):
            plan_controller.note_step(self.plan, number - 1, plans.watch.read())
        if self._timeline.enabled:
            self._timeline.settle()
        plans.begin_step()
