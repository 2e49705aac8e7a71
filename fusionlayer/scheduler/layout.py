"""The buffers of a plan's buckets, and which bucket each tensor is in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache

import torch

from .. import codecs, collectives
from ..base.plan import Bucket, FusionPlan, TensorInfo
from ..codecs import Codec, PartsCodec
from ..collectives import Scaling
from ..observe.timeline import Timeline
from .ahead import AheadBuffer
from .buffers import Buffer, FlatBuffer
from .memory import Memory

__all__ = ["BufferMaker", "Layout"]

_logger = logging.getLogger("fusionlayer")

_READING = ("gather_v", "oktopk", "omnireduce")  # collectives that read the sizes of their messages on the host


class BufferMaker:
    """Makes the buffers of an engine.

    Args:
        memory: keeps error feedback.
        device: of all gradients.
        scaling: factors before and after the sum.
        timeline: record of the buffers' work.
        error_feedback: send what the codec lost with the next gradient; None: where the codec says that it pays.
        in_place: results replace the gradients.
        rank: this rank.
        size: number of ranks.
        at_once: jobs run on the thread of the hooks, so a wait for the device holds up backward.
        undoable: ``Memory.state_before`` tells what error feedback was before the present step.

    Attributes:
        in_place: of the buffers that are made from now on.
    """

    def __init__(
        self,
        memory: Memory,
        device: torch.device,
        scaling: Scaling,
        timeline: Timeline,
        error_feedback: bool | None,
        in_place: bool,
        rank: int,
        size: int,
        at_once: bool,
        undoable: bool = False,
    ) -> None:
        self._undoable = undoable
        self._memory = memory
        self._device = device
        self._scaling = scaling
        self._timeline = timeline
        self._error_feedback = error_feedback
        self.in_place = in_place
        self._rank = rank
        self._size = size
        self._at_once = at_once

    def codec_of(self, bucket: Bucket) -> Codec:
        """Return a bucket's codec; warn if it waits for the device where that holds up backward."""
        codec = codecs.get(bucket.codec, **bucket.options, header=False)
        if self._at_once and (codec.waits or bucket.algorithm in _READING):
            _warn_of_waiting(str(codec) if codec.waits else f"the collective {bucket.algorithm}")
        return codec

    def make(self, index: int, bucket: Bucket, codec: Codec, tensors: Mapping[str, TensorInfo]) -> Buffer:
        """Return a buffer that takes over the error feedback of its tensors.

        Args:
            index: number of the bucket in its plan.
            bucket: its slots and its collective.
            codec: the bucket's, with its settings for the present step.
            tensors: by name, for their shapes.
        """
        memory, device = self._memory, self._device
        feedback = codec.feedback_pays if self._error_feedback is None else self._error_feedback
        feedback = feedback and not codec.lossless
        if not bucket.ahead and isinstance(codec, PartsCodec):
            codec = codec.for_parts(memory.parts(bucket, [_shape(tensors[name]) for name in bucket.names]))
        scaling = self._scaling
        common = (bucket, codec, scaling.before, scaling.after, device, self._timeline, self.in_place)
        if not bucket.ahead:
            memory.attach(bucket.names, codec)
            residual = memory.flat(bucket, device) if feedback else None
            all_reduce = collectives.by_shares(bucket.algorithm, bucket.shares)
            return self._remembering(FlatBuffer(*common, all_reduce=all_reduce, residual=residual))
        states = {slot.name: memory.state(slot.name, slot.numel, device, feedback=feedback) for slot in bucket.slots}
        gather = collectives.get_gather(bucket.algorithm)
        return self._remembering(
            AheadBuffer(*common, index=index, gather=gather, states=states, rank=self._rank, size=self._size)
        )

    def _remembering(self, buffer: Buffer) -> Buffer:
        if self._undoable:
            buffer.remember = self._memory.remember
        return buffer


class Layout:
    """The buffers of the present plan; another plan has another layout.

    Args:
        plan: the buckets.
        step: the present step, for the codecs' settings.
        maker: makes the buffers.
        tensors: of the plan, by name.

    Attributes:
        buffers: of the buckets, by their numbers.
        bucket_of: the number of the bucket that a tensor is in, by its name.
        codecs_change: whether a codec has settings that change with the steps.
    """

    def __init__(self, plan: FusionPlan, step: int, maker: BufferMaker, tensors: Mapping[str, TensorInfo]) -> None:
        self._maker = maker
        self._tensors = tensors
        self._codecs = [maker.codec_of(bucket) for bucket in plan.buckets]
        self.codecs_change = any(map(_changes, self._codecs))
        self.bucket_of = {name: index for index, bucket in enumerate(plan.buckets) for name in bucket.names}
        self.buffers: list[Buffer] = []
        self.renew(plan, step)

    def is_stale(self, step: int) -> bool:
        """Return whether codecs have other settings in this step than the buffers were made with."""
        return any(
            codec.at_step(step) != buffer.codec for codec, buffer in zip(self._codecs, self.buffers, strict=True)
        )

    def renew(self, plan: FusionPlan, step: int) -> None:
        """Make the buffers anew, with the codecs' settings for this step."""
        self.buffers = [
            self._maker.make(index, bucket, codec.at_step(step), self._tensors)
            for index, (bucket, codec) in enumerate(zip(plan.buckets, self._codecs, strict=True))
        ]

    def cut_to(self, index: int, bucket: Bucket, step: int) -> None:
        """Put ``bucket`` in the place of number ``index``, and drop all buckets after it."""
        self._codecs[index:] = [self._maker.codec_of(bucket)]
        self.codecs_change = any(map(_changes, self._codecs))
        self.buffers[index:] = [self._maker.make(index, bucket, self._codecs[index].at_step(step), self._tensors)]


@cache
def _warn_of_waiting(what: str) -> None:
    """Warn once in a process."""
    _logger.warning(
        "%s makes the host wait for the device in each sum, and over NCCL backward waits meanwhile; compare its steps "
        "with those of codec='raw' (docs/gpu.md)",
        what,
    )


def _changes(codec: Codec) -> bool:
    return type(codec).at_step is not Codec.at_step


def _shape(tensor: TensorInfo) -> tuple[int, ...]:
    return (tensor.numel,) if tensor.shape is None else tensor.shape
