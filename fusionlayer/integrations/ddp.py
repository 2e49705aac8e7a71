"""A communication hook that gives DistributedDataParallel the same codecs, collectives and background thread."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .. import collectives, context
from ..codecs import Codec
from ..errors import ConfigError
from ..functional import make_codec
from ..plan import Bucket, Slot
from ..scheduler import Job, Memory, Worker, located
from ..seeds import derive_seed
from ..timeline import Timeline
from ..transport import Transport
from ..wire import WIRE_VERSION

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["CommHook", "register"]


def register(
    model: DistributedDataParallel,
    codec: str | Codec | None = None,
    algorithm: str | None = None,
    error_feedback: bool | None = None,
    **codec_options: Any,
) -> CommHook:
    """Send the gradients of ``model`` compressed, over the ranks of its process group; call it before training.

    DDP keeps choosing the buckets; each is averaged on a thread of its own while backward goes on. What a failure
    raises comes out of ``backward()``.

    Args:
        model: wrapped by DistributedDataParallel, without another communication hook.
        codec: name or codec of what travels; None takes the configured one.
        algorithm: name of a collective; None chooses by codec and number of ranks.
        error_feedback: send what the codec lost with the next gradient; None: where the codec is biased and coarse.
        codec_options: options of a codec given by name.

    Returns:
        The hook: its ``state_dict`` belongs into the rank's checkpoint, ``close`` ends its thread.

    Raises:
        ConfigError: ``model`` is not wrapped by DDP, or names and options are unknown.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"ddp.register got a {type(model).__name__}; wrap the model in DistributedDataParallel first")
    transport = context.transport(model.process_group)
    chosen = make_codec(codec, codec_options)
    settings = context.settings()
    hook = CommHook(
        {parameter: name for name, parameter in model.module.named_parameters()},
        transport.duplicate(),
        chosen.checked if settings.checksum else chosen.bare,
        algorithm or settings.algorithm or collectives.choose(chosen.lossless, transport.size),
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
        error_feedback: bool,
        timeline: Timeline,
    ) -> None:
        self._names = names
        self._transport = transport
        self._codec = codec
        self._algorithm = algorithm
        self._all_reduce = collectives.get(algorithm)
        self._feedback = error_feedback
        self._timeline = timeline
        self._memory = Memory()
        self._worker = Worker("fusionlayer ddp")
        self._residuals: dict[tuple[Slot, ...], Tensor | None] = {}
        self._jobs: list[Job] = []
        self._sent = 0
        self._step = 0
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the reduction of one bucket; the future holds its average."""
        flat = bucket.buffer()
        index, number, layout = bucket.index(), self._sent, self._layout(bucket)
        codec = self._codec.at_step(self._step)
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
                residual = self._residual(layout, flat)
                with self._timeline.span("ALLREDUCE", bucket=index, codec=str(codec)):
                    flat.mul_(1 / self._transport.size)
                    self._all_reduce(flat, codec, self._transport, seed=derive_seed(number), residual=residual)
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
        return Bucket(slots, flat.numel(), dtype, self._codec.name, self._codec.options, self._algorithm)

    def _residual(self, layout: Bucket, flat: Tensor) -> Tensor | None:
        """Return the bucket's error feedback; a layout that is new is first compared over ranks."""
        if layout.slots not in self._residuals:
            digest = hashlib.sha256(repr((layout, WIRE_VERSION)).encode()).digest()
            self._transport.check_agreement("the layout of a DDP bucket (model, codec, options)", digest)
            names = set(layout.names)
            kept = {slots: r for slots, r in self._residuals.items() if names.isdisjoint(slot.name for slot in slots)}
            self._residuals = {**kept, layout.slots: self._memory.flat(layout, flat.device) if self._feedback else None}
        return self._residuals[layout.slots]

    def _on_stream(self, flat: Tensor, arrival: torch.cuda.Event | None) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the thread works: for CUDA a stream that waits for the gradients."""
        if arrival is None:
            return contextlib.nullcontext()
        self._stream = self._stream or torch.cuda.Stream(flat.device)
        self._stream.wait_event(arrival)
        return torch.cuda.stream(self._stream)
