"""The clock of a device: it asks, and never waits unless it is told to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusionlayer.process.clock import HOST, DeviceClock, clock_of


class Event:
    """Stands for torch.cuda.Event."""

    reached = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.stream: object = None

    def record(self, stream: object) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.reached and end.reached, "CUDA raises an error then"
        return 250.0


def test_a_device_is_asked_and_only_finish_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    for name, stand_in in {
        "Event": Event,
        "current_stream": lambda device: f"stream of {device}",
        "synchronize": waited.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device = torch.device("cuda", 1)
    clock = clock_of(device)
    assert isinstance(clock, DeviceClock) and clock_of(torch.device("cpu")) is HOST
    start: Any = clock.stamp()
    end: Any = clock.stamp()
    assert start.stream == "stream of cuda:1"
    for first, second in ((False, False), (True, False), (False, True)):
        start.reached, end.reached = first, second
        assert clock.seconds(start, end) is None
    start.reached = end.reached = True
    assert clock.seconds(start, end) == 0.25, "CUDA tells milliseconds"
    assert not waited
    assert clock.waited(start, end) == 0.25
    assert waited == [device]
