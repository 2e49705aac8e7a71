"""A device that tests make up: streams and moments on a clock of its own, to which the host runs ahead."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from fusionlayer.process.clock import Clock
from fusionlayer.scheduler.ahead import AheadBuffer
from fusionlayer.scheduler.buffers import Buffer, FlatBuffer
from fusionlayer.scheduler.plan_state import PlanState

__all__ = ["FakeDevice", "Moment", "streams_joined"]


class Moment(NamedTuple):
    """A stamp: when the device reaches it, in seconds of the host."""

    at: float


class FakeDevice(Clock):
    """A device of one rank. Each of the rank's threads has a stream, which does its work in order."""

    device = torch.device("cpu")
    lags = True
    replays = 2

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0
        self._streams: dict[int, float] = {}
        self._worked = 0.0  # seconds of work, of all streams

    @property
    def _end(self) -> float:
        return max(self.now, self._streams.get(threading.get_ident(), 0.0))

    def work(self, seconds: float) -> None:
        """Queue work of so many seconds on the calling thread's stream."""
        self._streams[threading.get_ident()] = self._end + seconds
        self._worked += seconds

    def follow(self, moment: Moment) -> None:
        """Let the calling thread's stream wait for a moment of another stream."""
        self._streams[threading.get_ident()] = max(self._end, moment.at)

    def stamp(self) -> Moment:
        return Moment(self._end)

    def seconds(self, start: Moment, end: Moment) -> float | None:
        return end.at - start.at if max(start.at, end.at) <= self.now else None

    def worked(self) -> Moment:
        return self.stamp()

    def replayed(self, call: Callable[[], object]) -> Callable[[], object]:
        before = self._worked
        call()
        seconds = self._worked - before  # without the pauses in which the device waits for the host's next launch
        return lambda: self.work(seconds)

    def finish(self) -> None:
        self.waits += 1
        self.now = max(self.now, *self._streams.values(), 0.0)


@contextmanager
def streams_joined() -> Iterator[None]:
    """Let buffers order the streams of their engine's ``FakeDevice`` as they order those of CUDA."""

    def after(name: str, more: Callable[[Any, Any], object], buffers: type[Buffer] = Buffer) -> Any:
        real = getattr(buffers, name)

        def call(self: Any, *args: Any) -> Any:
            result = real(self, *args)
            if hasattr(self, "fake"):
                more(self, self.fake)
            return result

        return mock.patch.object(buffers, name, call)

    make_buffers = PlanState._make_buffers

    def made(self: Any, *args: Any) -> None:
        make_buffers(self, *args)
        for buffer in self.buffers if isinstance(self._clock, FakeDevice) else ():
            buffer.fake, buffer.arrived, buffer.ended = self._clock, [], []

    def note_arrival(buffer: Any, device: FakeDevice) -> None:
        buffer.arrived.append(device.stamp())

    def note_end(buffer: Any, device: FakeDevice) -> None:
        buffer.ended = [device.stamp()]
        buffer.arrived = []

    with (
        mock.patch.object(PlanState, "_make_buffers", made),
        after("put", note_arrival),
        after("follow", lambda buffer, device: [device.follow(moment) for moment in buffer.arrived]),
        after("run", note_end, FlatBuffer),
        after("run", note_end, AheadBuffer),
        after("join", lambda buffer, device: [device.follow(moment) for moment in buffer.ended]),
    ):
        yield
