"""The buffer of a bucket whose gradients are encoded one by one, ahead of fusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.plan import Bucket
from ..base.seeds import derive_seed
from ..codecs import Codec, TensorState
from ..collectives import Gather, MessageSpan
from ..native.wire import aligned
from ..transport import Transport
from .buffers import PACKING, Buffer, BufferSettings


@dataclass
class _MessagePlace:
    """One tensor's part of the buffer: its message and state, and (n,) memory if it needs some."""

    message: MessageSpan
    payload: Tensor
    state: TensorState
    number: int
    staging: Tensor | None = None
    result: Tensor | None = None


class AheadBuffer(Buffer):
    """Encodes each gradient as it arrives into its own message in the bucket's payload: compress, then fuse.

    This is section 3.1 of SAFusion. ``put`` encodes on the caller's thread and stream, while backward continues.
    ``run`` gathers the payloads of all ranks and decodes each tensor's messages in rank order, straight into the
    gradient.

    Every message has a place of fixed size. So no sizes are exchanged, and no step allocates memory for gradients. One
    payload is enough: a gradient arrives only after the last step's results were taken, when nothing is being sent.
    """

    def __init__(
        self,
        bucket: Bucket,
        codec: Codec,
        settings: BufferSettings,
        *,
        index: int,
        gather: Gather,
        states: Mapping[str, TensorState],
        rank: int,
        size: int,
    ) -> None:
        super().__init__(bucket, codec, settings)
        self._index = index
        self._gather = gather
        self._rank = rank
        self._size = size
        self._dtype: torch.dtype = getattr(torch, bucket.dtype)
        self._messages = []
        end = 0
        for slot in bucket.slots:
            start, end = end, end + codec.wire(slot.numel, self._dtype).capacity
            self._messages.append(MessageSpan(slot.numel, self._dtype, start, end))
        self._payload = torch.zeros(aligned(end), dtype=torch.uint8, device=self._device)
        self._places = {
            slot.name: _MessagePlace(
                message,
                self._payload[message.start : message.stop],
                states[slot.name],
                derive_seed(*slot.name.encode()),
                # Here and not in ``run``: it belongs to the stream of the thread that takes the results.
                result=None if self._in_place else torch.empty(slot.numel, dtype=self._dtype, device=self._device),
            )
            for slot, message in zip(bucket.slots, self._messages, strict=True)
        }
        self._note_work()

    def put(self, name: str, gradient: Tensor, step: int) -> None:
        """Encode a gradient of any memory layout; with ``in_place`` its result replaces it later."""
        place = self._places[name]
        if self.remember is not None:
            self.remember((name,))
        self.join()  # on a GPU the last ``run`` may still read the payload, on a stream of its own
        with self._timeline.span("ENCODE", tensor=name, step=step, bucket=self._index):
            flat = gradient.detach()
            if self._is_flat(flat):
                flat = flat.view(-1)
            else:
                if place.staging is None:
                    place.staging = flat.new_empty(place.message.numel, dtype=self._dtype)
                flat = place.staging.view(gradient.shape).copy_(flat).view(-1)
            packed = place.state.packed
            if packed is not None:
                place.state.residual = packed.unpack(flat.new_empty(packed.numel, dtype=torch.float32))
            if flat.numel():
                self.codec.encode_tensor(
                    flat,
                    place.payload,
                    place.state,
                    scale=self._prescale,
                    ranks=self._size,
                    seed=self._seed(place, step),
                )
            if packed is not None and place.state.residual is not None:
                packed.pack(place.state.residual, derive_seed(step, place.number, self._rank, PACKING))
                place.state.residual = None
        self._note_used([gradient])
        super().put(name, gradient, step)

    def _seed(self, place: _MessagePlace, step: int) -> int:
        """Return the tensor's seed, which does not depend on its bucket."""
        # Ranks must draw the same random selection, but rounding noise has to be independent between them.
        return derive_seed(step, place.number) if self.codec.ahead else derive_seed(step, place.number, self._rank)

    def _is_flat(self, gradient: Tensor) -> bool:
        return gradient.is_contiguous() and gradient.dtype == self._dtype

    def run(self, transport: Transport, seed: int) -> None:
        """Gather the messages of all ranks, decode their sums and release the gradients; the buffer is then empty."""
        if self._arrivals:
            self._begin()
        gradients, self._gradients = self._gradients, {}
        every = self._exchange(transport)
        for name, gradient in gradients.items():
            with self._timeline.part("DECODE", tensor=name):
                place = self._places[name]
                out = self._target(place, gradient)
                self.codec.decode_sum(every[:, place.message.start : place.message.stop], out)
                if self._postscale != 1:
                    out.mul_(self._postscale)
                result = out.view(gradient.shape)
                if self._in_place and not self._is_flat(gradient):
                    result = gradient.copy_(result)
                self._results[name] = gradient if self._in_place else result
        if self._arrivals:
            self._end()

    def _exchange(self, transport: Transport) -> Tensor:
        """Return (size, nbytes) uint8: the payloads of all ranks."""
        nbytes = self._payload.numel()
        every = transport.scratch("incoming", self._size * nbytes, self._device).view(self._size, nbytes)
        if nbytes:
            with self._timeline.span(self.bucket.algorithm.upper(), codec=self.codec, bytes=nbytes):
                self._gather(self._payload, every, self._messages, self.codec, transport)
        return every

    def _target(self, place: _MessagePlace, gradient: Tensor) -> Tensor:
        """Return (n,) memory for a result: the gradient's own if it is in place, flat and of the bucket's type."""
        if place.result is not None:
            return place.result
        if self._is_flat(gradient):
            return gradient.view(-1)
        assert place.staging is not None
        return place.staging
