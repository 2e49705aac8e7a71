"""A communication hook that gives DistributedDataParallel the same codecs, collectives and background thread."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .. import collectives, context
from ..codecs import Codec, PartsCodec
from ..errors import ConfigError
from ..functional import make_codec
from ..plan import Bucket, Slot
from ..planning.autotune import Autotune
from ..scheduler import AheadBuffer, Job, Memory, Worker, located
from ..seeds import derive_seed
from ..timeline import Timeline
from ..transport import Transport
from .construction import GradientOptions, autotuning
from .ddp_fused import FusingHook

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["CommHook", "register"]


def register(
    model: DistributedDataParallel,
    codec: str | Codec | None = None,
    algorithm: str | None = None,
    error_feedback: bool | None = None,
    ahead: bool | None = None,
    autotune: bool | Autotune | None = None,
    **codec_options: Any,
) -> CommHook | FusingHook:
    """Send the gradients of ``model`` compressed, over the ranks of its process group; call it before training.

    DDP keeps choosing the buckets, save with ``autotune``; each is averaged on a thread of its own while backward goes
    on. What a failure raises comes out of ``backward()``.

    Args:
        model: wrapped by DistributedDataParallel, without another communication hook.
        codec: name or codec of what travels; None takes the configured one.
        algorithm: name of a collective; None chooses by codec and number of ranks.
        error_feedback: send what the codec lost with the next gradient; None: where the codec is biased and coarse.
        ahead: encode the gradients of a bucket one by one; False encodes the bucket as it is. None: as ``algorithm``
            needs it, or without one as is best for the codec: one by one for those that sparsify.
        autotune: fuse gradients by plans instead, the configured planner's first, and search for the one with the
            shortest measured steps while training runs. The hook gets gradients when a bucket of DDP's is full: small
            ones (``bucket_cap_mb=1``) leave plans most room. An ``Autotune`` says how; None takes the configured value.
        codec_options: options of a codec given by name.

    Returns:
        The hook: its ``state_dict`` belongs into the rank's checkpoint, ``close`` ends its thread.

    Raises:
        ConfigError: ``model`` is not wrapped by DDP, or names and options are unknown or do not fit each other.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"ddp.register got a {type(model).__name__}; wrap the model in DistributedDataParallel first")
    refused = sorted({"planner", "plan", "profile", "policy", "fidelity", "replan"} & codec_options.keys())
    if refused:
        raise ConfigError(
            f"ddp.register got {refused[0]}={codec_options[refused[0]]!r}; DDP makes its own buckets, which all travel "
            f"by one codec: wrap the optimizer in DistributedOptimizer for {refused[0]}"
        )
    if codec is None and context.settings().policy is not None:
        raise ConfigError(
            f"the configured policy {context.settings().policy} gives each gradient a codec, which DDP's buckets "
            "cannot have; give ddp.register a codec, or wrap the optimizer in DistributedOptimizer"
        )
    transport = context.transport(model.process_group)
    tuning = autotuning(autotune)
    if tuning is not None and transport.size > 1:
        options = GradientOptions(
            codec=codec,
            codec_options=codec_options,
            algorithm=algorithm,
            ahead=ahead,
            error_feedback=error_feedback,
            autotune=tuning,
        )
        fusing = FusingHook(model, options)
        model.register_comm_hook(fusing, lambda hook, bucket: hook(bucket))
        return fusing
    chosen = make_codec(codec, codec_options)
    settings = context.settings()
    ahead = settings.ahead if ahead is None else ahead
    algorithm = collectives.choose(chosen, transport.size, algorithm or settings.algorithm, ahead=ahead)
    ahead = algorithm in collectives.gather_names()
    hook = CommHook(
        {parameter: name for name, parameter in model.module.named_parameters()},
        transport.duplicate(),
        chosen.checked if settings.checksum else chosen.bare,
        algorithm,
        ahead,
        chosen.feedback_pays if error_feedback is None else error_feedback and not chosen.lossless,
        Timeline(settings.timeline, transport.rank),
    )
    # A function without annotations: DDP takes postponed ones for wrong ones.
    model.register_comm_hook(hook, lambda hook, bucket: hook(bucket))
    return hook


class CommHook:
    """Averages DDP's buckets on a communication thread; error feedback is kept by parameter, not by bucket.

    Called for each bucket, in DDP's order, which is the same on all ranks.
    """

    def __init__(
        self,
        names: Mapping[Tensor, str],
        transport: Transport,
        codec: Codec,
        algorithm: str,
        ahead: bool,
        error_feedback: bool,
        timeline: Timeline,
    ) -> None:
        self._names = names
        self._transport = transport
        self._codec = codec
        self._algorithm = algorithm
        self._ahead = ahead
        self._feedback = error_feedback
        self._timeline = timeline
        self._memory = Memory()
        self._worker = Worker("fusionlayer ddp")
        self._residuals: dict[tuple[Slot, ...], Tensor | None] = {}
        self._buffers: dict[tuple[Slot, ...], AheadBuffer] = {}
        self._jobs: list[Job] = []
        self._sent = 0
        self._step = 0
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the reduction of one bucket; the future holds its average."""
        flat = bucket.buffer()
        index, number, layout = bucket.index(), self._sent, self._layout(bucket)
        step, codec = self._step, self._codec.at_step(self._step)
        gradients = dict(zip(layout.names, bucket.gradients(), strict=True))
        shapes = [tuple(gradient.shape) for gradient in gradients.values()]
        future: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else [])
        arrival = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
        if not self._jobs:
            # A future's error reaches DDP as a failed cast; one raised at the end of backward arrives as it is. It must
            # come after DDP's own end, which leaves the reducer in order and is queued with the last bucket.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._finish))
        self._sent += 1
        self._step += bucket.is_last()

        def reduce() -> None:
            with self._on_stream(flat, arrival), located(number, index, layout, self._transport), torch.no_grad():
                residual = self._residual(layout, shapes, flat)
                with self._timeline.span("ALLREDUCE", bucket=index, codec=str(codec)):
                    if self._ahead:
                        self._average_each(gradients, layout, index, codec, step)
                    else:
                        flat.mul_(1 / self._transport.size)
                        all_reduce = collectives.get(self._algorithm)
                        fitted = codec
                        if isinstance(codec, PartsCodec):
                            fitted = codec.for_parts(self._memory.parts(layout, shapes))
                        all_reduce(flat, fitted, self._transport, seed=derive_seed(number), residual=residual)
                future.set_result(flat)

        try:
            self._jobs.append(self._worker.put(reduce, abandoned=lambda: future.set_result(flat)))
        except BaseException:
            self.close()
            raise
        return future

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's error feedback by parameter name, and the numbers of buckets sent and of steps."""
        return {"sent": self._sent, "step": self._step, **self._memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` of the same rank returned."""
        self._sent, self._step = state["sent"], state.get("step", 0)
        self._memory.load_state_dict(state)

    def close(self) -> None:
        """End the thread and give the transport up; backward fails from then on."""
        self._worker.close()
        self._transport.close()
        self._timeline.close()

    def _finish(self) -> None:
        jobs, self._jobs = self._jobs, []
        try:
            for job in jobs:
                job.wait()
        except BaseException:
            self.close()
            raise

    def _layout(self, bucket: GradBucket) -> Bucket:
        """Return what the bucket holds; DDP lays its buckets out anew once or twice in the first steps."""
        flat = bucket.buffer()
        slots = tuple(
            Slot(self._names[parameter], gradient.numel(), int(gradient.storage_offset() - flat.storage_offset()))
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        )
        dtype = str(flat.dtype).removeprefix("torch.")
        codec = self._codec
        return Bucket(slots, flat.numel(), dtype, codec.name, codec.options, self._algorithm, self._ahead)

    def _average_each(
        self, gradients: Mapping[str, Tensor], layout: Bucket, index: int, codec: Codec, step: int
    ) -> None:
        """Replace each of ``gradients``, views of the bucket, by its average."""
        size, device = self._transport.size, next(iter(gradients.values())).device
        buffer = self._buffers.get(layout.slots)
        if buffer is None or buffer.codec != codec:
            buffer = self._buffers[layout.slots] = AheadBuffer(
                layout,
                codec,
                1 / size,
                1.0,
                device,
                self._timeline,
                index=index,
                gather=collectives.get_gather(self._algorithm),
                states={
                    slot.name: self._memory.state(slot.name, slot.numel, device, feedback=self._feedback)
                    for slot in layout.slots
                },
                rank=self._transport.rank,
                size=size,
            )
        for name, gradient in gradients.items():
            buffer.put(name, gradient, step)
        buffer.run(self._transport, derive_seed(step, index))
        buffer.take()

    def _residual(self, layout: Bucket, shapes: Sequence[tuple[int, ...]], flat: Tensor) -> Tensor | None:
        """Return the error feedback of a bucket that is encoded whole; a new layout is first compared over ranks."""
        if layout.slots not in self._residuals:
            self._transport.agree("the layout of a DDP bucket (model, codec, options)", layout, shapes)
            names = set(layout.names)
            kept = {slots: r for slots, r in self._residuals.items() if names.isdisjoint(slot.name for slot in slots)}
            whole = self._feedback and not self._ahead
            if not self._ahead:
                self._memory.attach(layout.names, self._codec)
            self._residuals = {**kept, layout.slots: self._memory.flat(layout, flat.device) if whole else None}
            self._buffers = {slots: buffer for slots, buffer in self._buffers.items() if slots in kept}
        return self._residuals[layout.slots]

    def _on_stream(self, flat: Tensor, arrival: torch.cuda.Event | None) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the thread works: for CUDA a stream that waits for the gradients."""
        if arrival is None:
            return contextlib.nullcontext()
        self._stream = self._stream or torch.cuda.Stream(flat.device)
        self._stream.wait_event(arrival)
        return torch.cuda.stream(self._stream)
