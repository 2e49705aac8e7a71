"""Sends and receives of messages of a codec, which a native backend carries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.seeds import derive_seed
from ..codecs import Codec
from .work import DecodedWork, JoinedWork

Native = Callable[[list[Tensor]], dist.Work]


class PointToPoint:
    """Compresses messages between one rank of a group and single ranks.

    Args:
        seed: the seed of stochastic rounding, different on each rank.

    Attributes:
        bytes_sent: bytes of the messages sent so far.
    """

    def __init__(self, seed: int) -> None:
        self.bytes_sent = 0
        self._seed = seed
        self._count = 0
        self._copies = itertools.count()
        self._leaving: dict[int, Tensor] = {}
        self._batch: list[dist.Work | Callable[[], Any]] | None = None

    def send(self, x: Tensor, codec: Codec, send: Native, on: torch.device) -> dist.Work:
        """Encode ``x`` now, and call ``send`` with the message, which is sent from device ``on``."""
        message = _room(codec, x, x.device)
        self._count += 1
        codec.encode(x.detach().view(-1), message, seed=derive_seed(self._seed, self._count))
        message = message.to(on)
        self.bytes_sent += message.numel()
        return self.send_copy(message, send, [x])

    def send_copy(self, x: Tensor, send: Native, results: Sequence[Tensor]) -> dist.Work:
        """Call ``send`` with a tensor that the caller does not keep; ``results`` are the returned work's."""
        number = next(self._copies)
        self._leaving[number] = x  # native backends do not keep a tensor alive while it is being sent
        return self.after(send([x]), partial(self._leaving.pop, number, None), results)

    def receive(self, out: Tensor, codec: Codec, receive: Native, on: torch.device) -> dist.Work:
        """Call ``receive`` with room for a message on device ``on``; a wait for the returned work decodes it."""
        message = _room(codec, out, on)
        return self.after(receive([message]), partial(_decode, codec, message, out.detach()), [out])

    def begin_batch(self) -> None:
        """Begin a batch. Until ``end_batch``, the works of single messages cannot be waited for."""
        self._batch = []

    @property
    def is_batch(self) -> bool:
        """Whether a batch has begun and not ended."""
        return self._batch is not None

    def join_batch(self, work: dist.Work) -> None:
        """Have the batch, if there is one, wait for ``work`` too."""
        if self._batch is not None:
            self._batch.append(work)

    def end_batch(self, work: dist.Work) -> dist.Work:
        """Return the caller's work for a batch, given the native ``work`` of the whole batch."""
        batch, self._batch = self._batch or [], None
        works = [each for each in batch if isinstance(each, dist.Work)]
        rest = [each for each in batch if not isinstance(each, dist.Work)]
        joined = JoinedWork([work, *works], ()) if works else work
        return DecodedWork(joined, lambda: [each() for each in rest], ()) if rest else joined

    def after(self, work: dist.Work, then: Callable[[], Any], results: Sequence[Tensor]) -> dist.Work:
        """Return a work that ends with ``then``, once: at a wait for it or, in a batch, at a wait for the batch."""
        if self._batch is not None:
            self._batch.append(then)
            return work
        return DecodedWork(work, then, results)


def _room(codec: Codec, x: Tensor, on: torch.device) -> Tensor:
    return torch.empty(codec.wire(x.numel(), x.dtype).capacity, dtype=torch.uint8, device=on)


def _decode(codec: Codec, message: Tensor, out: Tensor) -> None:
    codec.decode(message.to(out.device), out.view(-1))
