"""Which tensors of a step some rank has used: ranks exchange one bit for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from ..transport import Transport
from .worker import Job

__all__ = ["Usage"]


class Usage:
    """Exchanges, at the end of a step, which tensors each rank has used.

    The message is sent while the step's last bucket is in flight, on another lane where there are several.

    Args:
        names: of all tensors of the step, in the same order on all ranks.
        unused: those that this rank has not used.
        device: holds the message: that of the gradients if the transport only queues work there, else the CPU.
        queue: queues the exchange, in the same place on all ranks.
    """

    def __init__(
        self,
        names: Sequence[str],
        unused: Collection[str],
        device: torch.device,
        queue: Callable[[Callable[[Transport], None]], Job],
    ) -> None:
        self._names = names
        self._found: frozenset[str] | None = None
        self._uses_all = not unused
        self._device = device
        self._mine = np.packbits([name not in unused for name in names] if unused else np.ones(len(names), np.bool_))
        self._every: Tensor | None = None
        self._done: torch.cuda.Event | None = None
        self._job = queue(self._exchange)

    def unused(self) -> frozenset[str]:
        """Return the tensors that no rank has used; wait for the exchange.

        It waits even if this rank has used all tensors: other ranks need its message, so it must not leave before.

        Raises:
            TransportError: a peer was lost, stopped or late.
        """
        if self._found is None:
            self._job.wait()
            if self._uses_all:
                self._found = frozenset()  # on a device this needs no wait for the message
                return self._found
            assert self._every is not None
            if self._done is not None:
                self._done.synchronize()
            used = np.unpackbits(np.bitwise_or.reduce(self._every.cpu().numpy(), axis=0), count=len(self._names))
            self._found = frozenset(compress(self._names, used == 0))
        return self._found

    def _exchange(self, transport: Transport) -> None:
        # On a device all of this is queued on the lane's stream.
        self._every = torch.empty(transport.size, self._mine.size, dtype=torch.uint8, device=self._device)
        with transport.doing("which tensors ranks have used"):
            transport.all_gather(torch.from_numpy(self._mine).to(self._device), self._every)
        if self._device.type == "cuda":
            self._done = torch.cuda.current_stream(self._device).record_event()
