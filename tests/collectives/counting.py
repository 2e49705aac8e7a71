"""One real rank of a job of any size: messages go nowhere, and what it sends and calls is counted."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from unittest import mock

from torch import Tensor

from fusionlayer import native
from fusionlayer.transport import Transport


class LoneRank(Transport):
    """Rank ``rank`` of ``size``. From other ranks it receives zeros, which most codecs decode to zeros.

    Attributes:
        sent: for each exchange the peer and the bytes of every message that it sends.
    """

    def __init__(self, rank: int, size: int, ranks_per_node: int = 1) -> None:
        self.rank, self.size, self.timeout = rank, size, 60.0
        ranks = range(size)
        self._nodes = tuple(tuple(ranks[first : first + ranks_per_node]) for first in ranks[::ranks_per_node])
        self.sent: list[dict[int, int]] = []

    def exchange(self, messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self.sent.append({peer: x.numel() for peer, (x, _) in messages.items() if peer != self.rank and x.numel()})
        for peer, (mine, room) in messages.items():
            room.copy_(mine) if peer == self.rank else room.zero_()

    def all_reduce(self, x: Tensor) -> None:
        raise NotImplementedError

    def broadcast(self, x: Tensor, root: int) -> None:
        raise NotImplementedError

    def send(self, x: Tensor, to: int, tag: int = 0) -> None:
        raise NotImplementedError

    def recv(self, x: Tensor, source: int, tag: int = 0) -> None:
        raise NotImplementedError

    def duplicate(self) -> Transport:
        raise NotImplementedError

    def subset(self, ranks: Sequence[int]) -> Transport:
        raise NotImplementedError

    def close(self) -> None:
        pass


@contextmanager
def native_calls() -> Iterator[list[str]]:
    """Yield the names of the core's functions that the block calls, in order."""
    names, call = list[str](), native.call

    def counted(verb: str, x: Tensor, *arguments: object) -> None:
        names.append(verb)
        call(verb, x, *arguments)

    with mock.patch.object(native, "call", counted):
        yield names


def python_calls(body: Callable[[], object]) -> int:
    """Return how many functions of Python and of C ``body`` calls."""
    count = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(look)
    try:
        body()
    finally:
        sys.setprofile(None)
    return count
