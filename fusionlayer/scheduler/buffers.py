"""Buffers: they hand the gradients of a bucket to a collective, and its results back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.errors import FusionLayerError, TransportError
from ..base.plan import Bucket
from ..base.seeds import derive_seed
from ..codecs import Codec, PackedResidual
from ..collectives import AllReduce, scale_
from ..native.wire import DTYPE_CODES
from ..observe.timeline import PROFILER_STATE, Timeline
from ..transport import Transport
from .compression_error import EVERY, MEASURING, ErrorProbe

_NOTHING = nullcontext()
_SHOWN = 3  # names of tensors in an error
# Stands for a tensor's name where one tensor holds all gradients of its bucket.
_WHOLE = ""

PACKING = 8
"""Makes the seed that rounds a residual differ from the seed that rounds values."""


class BufferSettings(NamedTuple):
    """The settings that all buffers of an engine share.

    Attributes:
        prescale: factor on every gradient before the sum.
        postscale: factor on the sum.
        device: the device of the gradients.
        timeline: record of the buffers' work.
        in_place: results replace the gradients; otherwise gradients stay unchanged and ``run`` releases them.
    """

    prescale: float
    postscale: float
    device: torch.device
    timeline: Timeline
    in_place: bool = True


class Buffer(ABC):
    """Holds the gradients of a bucket from their arrival until their results are taken.

    Hooks call ``put``, with the engine's lock held. A communication thread calls ``run`` once the buffer is full. The
    thread that needs the results calls ``take`` after ``run`` has returned. These calls never overlap for one buffer,
    so it has no lock.

    Args:
        bucket: the tensors of the buffer, and their slots.
        codec: the bucket's codec, with its settings for the present steps.
        settings: those of the engine.

    Attributes:
        remember: called with names of tensors before encoding changes their kept state; None: nothing is kept.
        nbytes: the bytes of the gradients, uncompressed.
        full: every gradient of the bucket has been put, and it was not launched since. The thread that launches it
            changes this, not a lane: a bucket in flight, with an earlier step's gradients, must not be launched again.
        seed: the seed of the codec's noise in the next ``run``; None: it follows from step and bucket.
        done: called on the lane's thread and stream when the next ``run`` has ended or failed; None: nothing is.
        encloses: the messages of ``run`` can carry ``enclosed``.
        enclosed: (size, n) uint8, for the next ``run``: its row of this rank is sent, the others are filled; or None.
        probe: measures the codec's loss; None: nothing does.
    """

    def __init__(self, bucket: Bucket, codec: Codec, settings: BufferSettings) -> None:
        self.bucket = bucket
        self.nbytes = bucket.nbytes
        self.codec = codec
        self._prescale, self._postscale, self._device, self._timeline, self._in_place = settings
        self.remember: Callable[[Iterable[str]], None] | None = None
        self.full = False
        self.seed: int | None = None
        self.done: Callable[[], None] | None = None
        self.encloses = False
        self.enclosed: Tensor | None = None
        self.probe: ErrorProbe | None = None
        self._step = 0
        self._gradients: dict[str, Tensor] = {}
        self._results: dict[str, Tensor] = {}
        # On CUDA: the last event of each stream on which gradients have arrived; the streams that own the memory of the
        # buffer and of the gradients in the last ``run``; the end of the last work on all this.
        self._arrivals: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._owners = [torch.cuda.current_stream(self._device)] if self._device.type == "cuda" else []
        self._done: torch.cuda.Event | None = None

    def put(self, name: str, gradient: Tensor, step: int) -> None:
        """Take a gradient (any shape of the slot's size) of a step; the last step's results must have been taken."""
        # Not ``detach()``: results that replace gradients must not raise the version of the caller's tensor, which
        # reveals changes by others.
        self._gradients[name] = gradient.data
        self._step = step
        self.full = len(self._gradients) == len(self.bucket.slots)
        if gradient.is_cuda:
            stream = torch.cuda.current_stream(self._device)
            self._arrivals[stream] = stream.record_event()

    def put_whole(self, flat: Tensor, step: int) -> None:
        """Take all gradients at once: ``flat`` (numel,) has each in its slot. Results replace them."""
        for slot in self.bucket.slots:
            self.put(slot.name, flat[slot.offset : slot.offset + slot.numel], step)

    def follow(self) -> None:
        """Let the current stream wait for the gradients; a second call does nothing more."""
        # Backward has only queued the kernels that write the gradients, perhaps on several streams.
        for arrival in self._arrivals.values():
            torch.cuda.current_stream(self._device).wait_event(arrival)

    @abstractmethod
    def run(self, transport: Transport, seed: int) -> None:
        """Sum the gradients over ranks, scaled, and release them; the buffer is then empty.

        A subclass calls ``_begin`` and ``_end`` if there are ``_arrivals``, and keeps the sums in ``_results``.
        """

    def _begin(self) -> None:
        self.join()
        self.follow()

    def _end(self) -> None:
        self._note_work()
        self._owners = [*self._owners[:1], *self._arrivals]
        self._arrivals.clear()

    def read(self) -> Mapping[str, Tensor]:
        """Return the results of the last ``run`` by name, to be read on the current stream before they are taken."""
        self.join()
        return self._results

    def take(self) -> dict[str, Tensor]:
        """Return the results of the last ``run`` by name, to be used on the current stream."""
        results, self._results = self._results, {}
        if self._done is not None:
            self.join()
            # When memory is freed, the allocator gives it to the next work of its owner.
            for owner in self._owners:
                owner.wait_event(self._done)
            stream = torch.cuda.current_stream(self._device)
            if not self._in_place and stream != self._owners[0]:
                for result in results.values():
                    result.record_stream(stream)
        return results

    def join(self) -> None:
        """Let the current stream wait for the work that the last ``run``, or the constructor, has queued."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def _note_work(self) -> None:
        """Let ``join`` wait for the current stream's work. A constructor calls it when it has filled its memory."""
        if self._device.type == "cuda":
            self._done = torch.cuda.current_stream(self._device).record_event()

    def _note_used(self, gradients: Iterable[Tensor]) -> None:
        """Note that the current stream reads gradients; subclasses call it after their last look at them.

        In place, they live until ``take``, which waits for that. Else ``run`` releases them.
        """
        if self._device.type == "cuda" and not self._in_place:
            for gradient in gradients:
                gradient.record_stream(torch.cuda.current_stream(self._device))


class FlatBuffer(Buffer):
    """Copies the gradients of a bucket into one flat tensor, which the collective encodes: fuse, then compress.

    With ``in_place`` flat memory is not copied: that of a gradient alone in its bucket, and of gradients that the
    caller has fused.

    Args:
        bucket, codec, settings: as in ``Buffer``.
        all_reduce: the bucket's collective.
        residual: (bucket.numel,) f32 error feedback, the same in 8 bits, or None.
        encloses: the collective can carry ``enclosed``.
    """

    def __init__(
        self,
        bucket: Bucket,
        codec: Codec,
        settings: BufferSettings,
        *,
        all_reduce: AllReduce,
        residual: Tensor | PackedResidual | None,
        encloses: bool,
    ) -> None:
        super().__init__(bucket, codec, settings)
        self._dtype: torch.dtype = getattr(torch, bucket.dtype)
        self._all_reduce = all_reduce if self._dtype in DTYPE_CODES else _plain_sum
        self.encloses = encloses and self._dtype in DTYPE_CODES
        self._packed = residual if isinstance(residual, PackedResidual) else None
        self._residual = None if isinstance(residual, PackedResidual) else residual
        self._may_stay = self._in_place and len(bucket.slots) == 1 and bucket.slots[0].numel == bucket.numel
        self._flat: Tensor | None = None
        self._between_slots = _between_slots(bucket)
        if not self._in_place:
            self._make_flat()  # here and not in ``run``: it belongs to the stream of the thread that takes the results
        self._note_work()

    def put_whole(self, flat: Tensor, step: int) -> None:
        """Take all gradients at once, without a copy."""
        self.put(_WHOLE, flat, step)
        self.full = True

    def _make_flat(self) -> Tensor:
        bucket, residual = self.bucket, self._residual
        self._flat = flat = torch.zeros(bucket.numel, dtype=self._dtype, device=self._device)
        self._slots = {slot.name: flat[slot.offset : slot.offset + slot.numel] for slot in bucket.slots}
        self._gaps = self._gaps_of(flat, residual)
        return flat

    def run(self, transport: Transport, seed: int) -> None:
        """Sum the gradients over ranks, scaled, and release them; the buffer is then empty."""
        # One method for all of it, and no span without a reader, because every bucket of every step runs this.
        if self._arrivals:
            self._begin()
        gradients, self._gradients = self._gradients, {}
        given = list(gradients.values())
        observed = self._timeline.enabled or getattr(*PROFILER_STATE)
        stays = self._may_stay and given[0].is_contiguous() and given[0].dtype == self._dtype or _WHOLE in gradients
        if stays:
            flat = given[0].view(-1)
            if self._prescale != 1:
                flat.mul_(self._prescale)
            if self._between_slots:
                torch._foreach_zero_(self._gaps_of(flat, self._residual))
        else:
            flat = self._make_flat() if self._flat is None else self._flat
            slots = [self._slots[name].view(gradient.shape) for name, gradient in gradients.items()]
            with self._timeline.part("MEMCPY_IN_FUSION_BUFFER") if observed else _NOTHING:
                self._pack(flat, slots, given)
            self._note_used(given)
        if self.remember is not None:
            self.remember(self.bucket.names)
        residual, packed = self._residual, self._packed
        if packed is not None:
            # In the lane's memory: the lane encodes one bucket after the other.
            scratch = transport.scratch("residual", 4 * packed.numel, self._device)
            residual = packed.unpack(scratch.view(torch.float32))
        probe = self.probe if self._step % EVERY in MEASURING else None
        if probe is not None:
            probe.begin(flat, residual, seed, self._step)
        all_reduce = partial(self._all_reduce, flat, self.codec, transport, seed=seed, residual=residual)
        if self.enclosed is not None:
            all_reduce, self.enclosed = partial(all_reduce, enclosed=self.enclosed), None
        if observed:
            with self._timeline.span(self.bucket.algorithm.upper(), codec=self.codec, elements=self.bucket.numel):
                all_reduce()
        else:
            all_reduce()
        if probe is not None:
            probe.end(residual)
        if self._postscale != 1:
            scale_(flat, self._postscale)
        if packed is not None and residual is not None:
            packed.pack(residual, derive_seed(seed, transport.rank, PACKING))
        if not stays and self._in_place:
            with self._timeline.part("MEMCPY_OUT_FUSION_BUFFER") if observed else _NOTHING:
                torch._foreach_copy_(given, slots)
        self._results = gradients if stays or self._in_place else dict(zip(gradients, slots, strict=True))
        if self._arrivals:
            self._end()

    def _gaps_of(self, *tensors: Tensor | None) -> list[Tensor]:
        """Return the parts between the slots, which are set to zero each step.

        Otherwise the last step's rounding noise in them would enter a scale.
        """
        return [x[gap] for x in tensors if x is not None for gap in self._between_slots]

    def _pack(self, flat: Tensor, slots: list[Tensor], given: list[Tensor]) -> None:
        """Copy gradients times prescale into the slots of ``flat``, with zeros between them."""
        # On a device a launch for each tensor would take the host longer than a second pass over the memory takes the
        # device. On the CPU the reverse holds. A conversion between the two would round twice.
        at_once = self._device.type != "cpu" and all(gradient.dtype == self._dtype for gradient in given)
        if self._prescale == 1 or at_once:
            torch._foreach_copy_(slots, given)
        else:
            for slot, gradient in zip(slots, given, strict=True):
                torch.mul(gradient, self._prescale, out=slot)
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        if at_once and self._prescale != 1:
            flat.mul_(self._prescale)


def _plain_sum(x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None) -> None:
    """Replaces every collective for types that codecs do not encode."""
    transport.all_reduce(x)


def _between_slots(bucket: Bucket) -> list[slice]:
    """Return the parts of a flat tensor between the slots."""
    ends = [0, *(slot.offset + slot.numel for slot in bucket.slots)]
    starts = [*(slot.offset for slot in bucket.slots), bucket.numel]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


@contextmanager
def located(step: int, index: int, bucket: Bucket, transport: Transport) -> Iterator[None]:
    """Raise every error of the ``with`` block again, with step, bucket and tensors in its message.

    The new message has all of the old one, so a traceback shows the new error alone.
    """
    try:
        yield
    except FusionLayerError as error:
        names = bucket.names
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        message = f"step {step}, bucket {index} ({shown}): {error}"
        if isinstance(error, TransportError):
            sequence = transport.sequence if error.sequence is None else error.sequence
            raise TransportError(message, error.ranks, index, names, sequence) from None
        located_error = type(error)(message)
        vars(located_error).update(vars(error))
        raise located_error from None
