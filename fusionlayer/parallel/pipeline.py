"""Pipeline parallelism with stages that compress the activations and gradients they send."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from .. import codecs, context
from ..base.errors import ConfigError
from ..base.seeds import derive_seed
from ..codecs import Codec
from ..functional import make_codec
from ..native.wire import DTYPE_CODES
from ..transport import Transport

__all__ = ["PipelineStage"]

_FORWARD, _BACKWARD = 0, 1
_RAW = codecs.get("raw")

# The stages of this process in each group.
_stages: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[PipelineStage]] = weakref.WeakKeyDictionary()


class PipelineStage(pipelining.PipelineStage):
    """A ``torch.distributed.pipelining.PipelineStage`` that sends messages of a codec, for any of torch's schedules.

    Each activation for the next stage, and each gradient for the previous one, is one message of a fixed size, so no
    sizes are exchanged. Messages are sent as torch sends them, over its process group. Floats of 32 and 16 bits are
    compressed; other types are sent uncompressed. Tensors for a stage of the same rank are not compressed either. If
    the setting ``checksum`` asks for it, each message of floats has a header with a checksum, because torch sends none.

    Args:
        submodule: as in torch.
        stage_index: as in torch.
        num_stages: as in torch.
        device: as in torch.
        codec: name or codec of activations; None takes the configured one (``raw`` by default).
        gradient_codec: name or codec of gradients; None takes the codec of activations.
        warmup_steps: number of first training steps of the schedule that are sent uncompressed, while activations
            change fast.
        group: process group of the pipeline; None means all ranks. All its ranks make their first stage together. They
            may make another pipeline, also with other codecs, when all stages of the one before are deleted.
        codec_options: options of an activation codec given by name.
        **kwargs: as in torch.

    Raises:
        ConfigError: unknown names or options, or other stages that this rank still has have different ones.
        PlanMismatch: ranks disagree on codecs or warm-up.
        TransportError: not all ranks came in time.
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        codec: str | Codec | None = None,
        gradient_codec: str | Codec | None = None,
        warmup_steps: int = 0,
        codec_options: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        if warmup_steps < 0:
            raise ConfigError(f"warmup_steps={warmup_steps}; expected a number of steps, 0 for none")
        forward = make_codec(codec, codec_options or {}).bare
        backward = forward if gradient_codec is None else make_codec(gradient_codec, {}).bare
        super().__init__(submodule, stage_index, num_stages, device, group=group, **kwargs)
        self._codecs = (forward, backward)
        self._checked = _is_checked(context.transport(group), device)
        self._warmup_steps = warmup_steps
        self._steps = 0
        # Messages of this step. Sent ones must stay alive until torch has sent them. Received ones are decoded when the
        # stage uses them.
        self._sent: list[Tensor] = []
        self._arriving: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        checked = "with" if self._checked else "without"
        self._facts = f"{forward}, gradients {backward}, {warmup_steps} steps of warm-up, {checked} checksums"
        self._agree(group)

    def clear_runtime_states(self) -> None:
        """Begin a step; every schedule of torch calls it."""
        super().clear_runtime_states()
        self._steps += self.has_backward
        self._sent.clear()
        self._arriving.clear()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the activations of a microbatch."""
        return self._encode(super().get_fwd_send_ops(fwd_chunk_id), _FORWARD, fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the gradients of a microbatch."""
        return self._encode(super().get_bwd_send_ops(bwd_chunk_id), _BACKWARD, bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the activations of a microbatch."""
        return self._expect(super().get_fwd_recv_ops(fwd_chunk_id), _FORWARD, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradients of a microbatch."""
        return self._expect(super().get_bwd_recv_ops(bwd_chunk_id), _BACKWARD, bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._decode(_FORWARD, fwd_chunk_id)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._decode(_BACKWARD, bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _codec(self, direction: int) -> Codec:
        """Return the codec of this step's messages."""
        codec = self._codecs[direction]
        if codec.lossless or max(self._steps, 1) <= self._warmup_steps:
            codec = _RAW
        return codec.checked if self._checked else codec.bare

    def _messages(self, ops: list[dist.P2POp], codec: Codec) -> Iterable[tuple[int, dist.P2POp]]:
        """Return the operations that carry messages, with their indices; sender and receiver choose the same ones."""
        if codec == _RAW.bare:
            return []
        return [(i, op) for i, op in enumerate(ops) if op.tensor.dtype in DTYPE_CODES]

    def _encode(self, ops: list[dist.P2POp], direction: int, chunk: int) -> list[dist.P2POp]:
        codec = self._codec(direction)
        for i, op in self._messages(ops, codec):
            x = op.tensor.detach().contiguous().view(-1)
            message = self._message(codec, x)
            codec.encode(x, message, seed=derive_seed(self._steps, self.stage_index, direction, chunk, i))
            self._sent.append(message)
            op.tensor = message
        return ops

    def _expect(self, ops: list[dist.P2POp], direction: int, chunk: int) -> list[dist.P2POp]:
        arriving = self._arriving[direction, chunk] = []
        codec = self._codec(direction)
        for _, op in self._messages(ops, codec):
            message = self._message(codec, op.tensor)
            arriving.append((message, op.tensor.detach()))
            op.tensor = message
        return ops

    def _decode(self, direction: int, chunk: int) -> None:
        for message, out in self._arriving.pop((direction, chunk), []):
            flat = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
            self._codec(direction).decode(message, flat)
            if not out.is_contiguous():
                out.copy_(flat.view(out.shape))

    def _agree(self, group: dist.ProcessGroup | None) -> None:
        """Compare codecs and warm-up with this process's other stages; at a pipeline's first stage over ranks."""
        world = group or dist.group.WORLD
        assert world is not None
        others = _stages.setdefault(world, weakref.WeakSet())
        if others:
            gc.collect()  # deleted stages may be in cycles: all ranks must find the same of them gone
        for other in others:
            if other._facts != self._facts:
                raise ConfigError(
                    f"this stage has {self._facts}; other stages of this process {other._facts}: give all stages the "
                    "same, because each receives what another has sent; delete stages and schedule of a pipeline that "
                    "is done"
                )
        if not others:
            context.transport(group).agree("codecs or warm-up of pipeline stages", self._facts)
        others.add(self)

    @staticmethod
    def _message(codec: Codec, x: Tensor) -> Tensor:
        return torch.empty(codec.wire(x.numel(), x.dtype).capacity, dtype=torch.uint8, device=x.device)


def _is_checked(transport: Transport, device: torch.device) -> bool:
    """Return whether messages have checksums: by default between nodes, but not on a GPU, which would wait for them."""
    asked = context.settings().checksum
    return asked if asked is not None else len(transport.nodes) > 1 and device.type == "cpu"
