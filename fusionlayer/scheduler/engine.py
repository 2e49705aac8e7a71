"""The engine: takes gradients as they come, sends buckets in plan order, hands results back."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import codecs, collectives
from ..codecs import Codec
from ..errors import UsageError
from ..plan import Bucket, FusionPlan, TensorInfo
from ..seeds import derive_seed
from ..timeline import Timeline
from ..transport import Transport
from ..wire import WIRE_VERSION
from .buffers import FlatBuffer
from .failure import located
from .memory import Memory
from .planners import Planner
from .worker import Job, Worker

__all__ = ["Engine", "Scaling"]

SLOT_ALIGNMENT = 128


@dataclass(frozen=True)
class Scaling:
    """Factors on each gradient before the sum over ranks and on the sum."""

    before: float = 1.0
    after: float = 1.0


class Engine:
    """Sums gradients over ranks on a thread of its own, while backward goes on.

    Each step: ``submit`` every tensor once, in any order; ``synchronize`` once. The first step learns the order in
    which gradients arrive and makes the plan, unless one is given; from the second step on a bucket leaves as soon as
    it and all buckets before it are complete. Before the first payload the ranks compare what they are about to do.

    Args:
        tensors: every tensor of a step, in any order.
        transport: used by the engine's thread alone from now on, and closed with the engine.
        codec: for the plan that is made here; a given plan names its own.
        algorithm: collective for that plan; None chooses.
        planner: makes that plan.
        plan: fixed plan; ``codec``, ``algorithm`` and ``planner`` are not used then.
        device: of all gradients.
        memory: where error feedback is kept; a new one by default.
        error_feedback: send what the codec lost with the next gradient; None: where the codec says that it pays.
        scaling: factors before and after the sum.
        checksum: put a verified header on every message.
        timeline: record of the thread's work.
        name: of the thread.

    Attributes:
        failure: what a step has failed with, or None. The engine is closed by then and raises it again and again.
    """

    def __init__(
        self,
        tensors: Sequence[TensorInfo],
        transport: Transport,
        *,
        codec: Codec,
        planner: Planner,
        device: torch.device,
        algorithm: str | None = None,
        plan: FusionPlan | None = None,
        memory: Memory | None = None,
        error_feedback: bool | None = None,
        scaling: Scaling = Scaling(),
        checksum: bool = False,
        timeline: Timeline | None = None,
        name: str = "fusionlayer",
    ) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._transport = transport
        self._codec = codec
        self._algorithm = algorithm or collectives.choose(codec.lossless, transport.size)
        collectives.get(self._algorithm)
        self._planner = planner
        self._device = device
        self.memory = memory or Memory()
        self._error_feedback = error_feedback
        self._scaling = scaling
        self._checksum = checksum
        self._timeline = timeline or Timeline(None, transport.rank)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if plan is not None:
            plan.check(tensors, transport.size)
            for bucket in plan.buckets:
                self._codec_of(bucket)
                collectives.get(bucket.algorithm)
        self.plan = plan
        self.rank = transport.rank
        self.size = transport.size
        self.step = 0
        self._buffers: list[FlatBuffer] = []
        self._bucket_of: dict[str, int] = {}
        self._arrived: dict[str, Tensor] = {}
        self._jobs: list[Job] = []
        self._next = 0
        self._lock = threading.Lock()
        self._worker = Worker(name)
        self._agreement: Job | None = None
        self.failure: BaseException | None = None

    @property
    def pending(self) -> frozenset[str]:
        """Names that have been submitted since the last ``synchronize``."""
        return frozenset(self._arrived)

    def submit(self, name: str, gradient: Tensor) -> None:
        """Take a gradient, which ``synchronize`` will have replaced by its scaled sum over ranks.

        Raises:
            UsageError: this step has it already, it is none of the engine's tensors, or it has another size.
            FusionLayerError: a step before has failed; the same error again.
        """
        if self.failure is not None:
            raise self.failure
        with self._lock:
            if name not in self._tensors:
                raise UsageError(f"gradient {name!r} is none of this engine's {len(self._tensors)} tensors")
            if gradient.numel() != self._tensors[name].numel:
                raise UsageError(
                    f"gradient {name!r} has {gradient.numel()} elements, expected {self._tensors[name].numel}"
                )
            if name in self._arrived:
                raise UsageError(f"gradient {name!r} was submitted twice in step {self.step}; synchronize() in between")
            self._arrived[name] = gradient
            try:
                if self._agreement is None and self.plan is not None:
                    self._agreement = self._worker.put(self._agree)
                    self._make_buffers(self.plan)
                if self._buffers:
                    self._buffers[self._bucket_of[name]].put(name, gradient)
                    self._launch()
            except BaseException as error:
                self._fail(error)
                raise

    def synchronize(self) -> None:
        """Wait until every gradient of this step holds its result; ends the step.

        Raises:
            UsageError: tensors are missing.
            PlanMismatch: ranks disagree on model, plan or options.
            TransportError: a peer was lost, stopped or too late; it names rank, bucket, tensors and sequence.
        """
        missing = [name for name in self._tensors if name not in self._arrived]
        if missing:
            raise UsageError(
                f"{len(missing)} gradients were not submitted in step {self.step}, the first: {missing[0]!r}"
            )
        try:
            if self.plan is None:
                self._agreement = self._worker.put(self._agree_and_plan)
                self._agreement.wait()
                assert self.plan is not None
                self._make_buffers(self.plan)
                for name, gradient in self._arrived.items():
                    self._buffers[self._bucket_of[name]].put(name, gradient)
                self._launch()
            for job in [self._agreement, *self._jobs]:
                if job is not None:
                    job.wait()
        except BaseException as error:
            self._fail(error)
            raise
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._arrived.clear()
        self._jobs.clear()
        self._next = 0
        self.step += 1

    def close(self) -> None:
        """End the thread and give the transport up. Twice is once."""
        self._worker.close()
        self._transport.close()
        self._timeline.close()

    # ---- called with the lock held, or by synchronize when no hook can run ------------------------------------------

    def _make_buffers(self, plan: FusionPlan) -> None:
        for index, bucket in enumerate(plan.buckets):
            codec = self._codec_of(bucket)
            all_reduce = collectives.get(bucket.algorithm)
            feedback = codec.feedback_pays if self._error_feedback is None else self._error_feedback
            residual = self.memory.flat(bucket, self._device) if feedback and not codec.lossless else None
            before, after = self._scaling.before, self._scaling.after
            self._buffers.append(FlatBuffer(bucket, codec, all_reduce, residual, before, after, self._device))
            self._bucket_of.update(dict.fromkeys(bucket.names, index))

    def _codec_of(self, bucket: Bucket) -> Codec:
        return codecs.get(bucket.codec, **bucket.options, header=self._checksum)

    def _fail(self, error: BaseException) -> None:
        """Let go of the peers, which are out of step with this rank now, and of the gradients."""
        self.failure = error
        self._arrived.clear()
        self.close()

    def _launch(self) -> None:
        while self._next < len(self._buffers) and self._buffers[self._next].full:
            self._jobs.append(self._worker.put(partial(self._run, self._next, self.step)))
            self._next += 1

    # ---- on the communication thread --------------------------------------------------------------------------------

    def _run(self, index: int, step: int) -> None:
        buffer = self._buffers[index]
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with (
            located(step, index, buffer.bucket, self._transport),
            torch.no_grad(),
            stream,
            self._timeline.span("ALLREDUCE", step=step, bucket=index),
        ):
            buffer.run(self._transport, self._timeline, derive_seed(step, index))

    def _agree(self) -> None:
        """Compare with the other ranks what this engine is about to do."""
        names = sorted(self._tensors)
        parts = [repr(self._tensors[name]) for name in names]
        parts += [
            f"wire {WIRE_VERSION}",
            f"scaling {self._scaling}",
            f"checksum {self._checksum}",
            f"feedback {self._error_feedback}",
        ]
        if self.plan is not None:
            parts.append(self.plan.digest().hex())
        else:
            parts += [str(self._codec), self._algorithm, str(self._planner)]
        digest = hashlib.sha256("\n".join(parts).encode()).digest()
        with self._timeline.span("NEGOTIATE_ALLREDUCE"):
            self._transport.check_agreement("the fusion plan (model, codec, options)", digest)

    def _agree_and_plan(self) -> None:
        """Compare, take rank 0's order of arrival, plan with it, and compare the plans."""
        self._agree()
        names = sorted(self._tensors)
        position = {name: i for i, name in enumerate(names)}
        order = torch.tensor([position[name] for name in self._arrived])
        self._transport.broadcast(order, 0)
        runs = self._planner([self._tensors[names[i]] for i in order.tolist()])
        codec = self._codec
        align = min(max(codec.block, 1), SLOT_ALIGNMENT)
        plan = FusionPlan.build(runs, self._transport.size, codec.name, codec.options, self._algorithm, align)
        plan.check(self._tensors.values(), self._transport.size)
        self._transport.check_agreement("the fusion plan that was made", plan.digest())
        self.plan = plan
