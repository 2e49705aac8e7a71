"""A link between the ranks of a Horovod job, made of Horovod's all-to-all of uint8 with a length for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...base.errors import ConfigError, UsageError
from .._waiting import wait_until
from .base import LinkError, LinkMessage
from .checksums import compare, room, seal
from .exchange import ExchangeLink

_MOST_BYTES = (1 << 31) - 1  # Horovod counts in 32 bits


def import_horovod() -> Any:
    """Return the module ``horovod.torch``."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise ConfigError(f"transport 'horovod' needs Horovod, built for this torch: {error}") from error
    return hvd


def load_horovod() -> Any:
    """Return the module ``horovod.torch`` of an initialized Horovod."""
    hvd = import_horovod()
    if not hvd.is_initialized():
        raise UsageError("Horovod is not initialized; call horovod.torch.init() first")
    return hvd


class HorovodLink(ExchangeLink):
    """One rank's end of all processes of Horovod.

    Horovod matches the operations of ranks by name, so links with different names never receive each other's messages.

    Args:
        name: name of the transport.
        timeout: seconds that a call may take.
        checked: the ranks to which, and from which, messages carry a checksum.
    """

    def __init__(self, name: str, timeout: float, checked: frozenset[int]) -> None:
        self._hvd = load_horovod()
        super().__init__(self._hvd.rank(), self._hvd.size(), timeout, checked)
        self._name = name
        self._closed = False
        self._calls = 0

    def exchange(
        self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage], deadline: float | None = None
    ) -> None:
        deadline = self._deadline() if deadline is None else deadline
        if self._closed:
            raise LinkError(self._rank, "the link was closed")
        self._calls += 1
        sends = {peer: seal(data, 0) if peer in self._checked else data for peer, data, _ in outgoing}
        recvs = {message.peer: message.data for message in incoming}
        lengths = [sends[peer].numel() if peer in sends else 0 for peer in range(self._size)]
        if sum(lengths) > _MOST_BYTES:
            raise UsageError(f"{sum(lengths)} bytes in one call; Horovod's all-to-all takes {_MOST_BYTES}: cut it up")
        splits = torch.tensor(lengths, dtype=torch.int32, device="cpu")
        packed = (
            torch.cat([sends[peer] for peer in sorted(sends)])
            if sends
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        late = next(iter([*recvs, *sends]), self._rank)
        try:
            handle = self._hvd.alltoall_async(packed, splits, name=f"{self._name}/{self._calls}")
            if not wait_until(lambda: bool(self._hvd.poll(handle)), deadline, lambda: self._closed):
                raise LinkError(late, f"no end within {self._timeout:g} s")
            received, came = self._hvd.synchronize(handle)
        except RuntimeError as error:  # Horovod's own errors are subclasses
            raise LinkError(late, str(error)) from None
        for peer, piece in enumerate(received.split(came.tolist())):
            data = recvs.get(peer)
            checked = data is not None and peer in self._checked
            wanted = 0 if data is None else (room(data, 0) if checked else data).numel()
            if piece.numel() != wanted:
                raise LinkError(peer, f"rank {peer} sent {piece.numel()} bytes, {wanted} were expected")
            if data is not None and checked:
                compare(piece, data, 0, peer, self._rank)
            elif data is not None:
                data.copy_(piece)

    def close(self) -> None:
        self._closed = True
