"""Clocks: one interface for the time of the host and of a device, so that measurements work with both.

A stamp marks a moment in the work of the thread that takes it. On the host that moment has come when the stamp is
taken. On a device the stamp is an event of the current stream: the device may reach it later, and only the caller of
``finish`` waits for it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Stamp = Any
"""A moment, as its clock marks it: seconds on the host, an event on a device."""


class Clock(ABC):
    """Marks moments and computes the seconds between them.

    Attributes:
        device: the measured device, which holds the tensors.
        lags: whether the host runs ahead of the timed work. Seconds are then read later, and may be missing.
        replays: calls between two stamps when a single call is measured. Launches of a device take about as long as
            short kernels, so several follow on each other.
    """

    device: torch.device
    lags: bool
    replays: int

    @abstractmethod
    def stamp(self) -> Stamp:
        """Mark the present moment of the calling thread's work; on a device, of its current stream. Never waits."""

    @abstractmethod
    def seconds(self, start: Stamp, end: Stamp) -> float | None:
        """Return the seconds from ``start`` to ``end``, or None before both have come. Never waits."""

    @abstractmethod
    def worked(self) -> Stamp:
        """Mark a moment as ``stamp`` does, but of a clock that runs only while something computes.

        On the host it counts the CPU seconds of the process. A device is taken to compute all the time.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until every stamp that was taken has come. Only measurements between steps call this."""

    def replayed(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a function that makes the device repeat the work of ``call``; on the host ``call`` itself.

        ``call`` has been made before. On a device its kernels are launched by one call, however many they are.
        """
        return call

    def waited(self, start: Stamp, end: Stamp) -> float:
        """Return the seconds from ``start`` to ``end``, when both have come: it waits as ``finish`` does."""
        self.finish()
        seconds = self.seconds(start, end)
        assert seconds is not None
        return seconds


class HostClock(Clock):
    """The time of the host: a stamp is a number of seconds, and has always come."""

    device = torch.device("cpu")
    lags = False
    replays = 1

    def stamp(self) -> float:
        """Return the present time in seconds."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the difference."""
        return end - start

    def worked(self) -> float:
        """Return the CPU seconds of the process, of all its threads."""
        return time.process_time()

    def finish(self) -> None:
        """Do nothing."""


class DeviceClock(Clock):
    """The time of a CUDA device: a stamp is a timed event of the calling thread's current stream."""

    lags = True
    replays = 8

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stamp(self) -> torch.cuda.Event:
        """Record a timed event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Ask both events whether the device has reached them."""
        if not (end.query() and start.query()):
            return None
        return float(start.elapsed_time(end)) / 1e3

    def worked(self) -> torch.cuda.Event:
        """Record a timed event."""
        return self.stamp()

    def replayed(self, call: Callable[[], object]) -> Callable[[], object]:
        """Capture the kernels of ``call`` as a CUDA graph; return its replay, or ``call`` if it cannot be captured.

        A call that asks the device for a number cannot. The replay keeps the call, and with it the tensors that only
        the call references: its inputs and outputs must not go back to the allocator.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # Other threads are free meanwhile, such as the one that watches the ranks.
            with torch.cuda.device(self.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call()
        except RuntimeError:
            torch.cuda.set_stream(stream)  # torch does not leave the stream of a capture that has failed
            return call
        return partial(_replay, graph, call)

    def finish(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.device)


def _replay(graph: torch.cuda.CUDAGraph, _call: Callable[[], object]) -> None:
    graph.replay()


HOST = HostClock()
"""The clock of everything on the CPU."""


def clock_of(device: torch.device) -> Clock:
    """Return the clock that times the work of a device."""
    return DeviceClock(device) if device.type == "cuda" else HOST
