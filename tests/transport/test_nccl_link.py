"""The link over NCCL, with stand-ins for NCCL, events and the driver: what ends it, and what it says then."""

import os
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist

from fusionlayer.base.errors import UsageError
from fusionlayer.transport import _capture
from fusionlayer.transport.links import nccl, queueing
from fusionlayer.transport.links.base import DeviceError, LinkError
from fusionlayer.transport.links.nccl import NcclLink
from tests.transport.fake_nccl import accepts

EVENT = torch.cuda.Event
DEVICE = torch.device("cuda", 1)
RELAXED = 2


class Device:
    """What the device has reached: events by their numbers, two of each operation."""

    def __init__(self) -> None:
        self.events = 0
        self.reached = 0
        self.error = ""
        self.asked = threading.Semaphore(0)
        self.mode = 0
        self.asked_in_mode: set[int] = set()
        self.recorded: list[str] = []

    def event(self) -> Any:
        self.events += 1
        made = create_autospec(EVENT, instance=True, spec_set=True)
        made.record.side_effect = self.recorded.append
        made.query.side_effect = partial(self.query, self.events)
        return made

    def query(self, number: int) -> bool:
        self.asked.release()
        self.asked_in_mode.add(self.mode)
        if self.error:
            raise RuntimeError(self.error)
        return number <= self.reached

    def exchange_mode(self, mode: Any) -> None:
        self.mode, mode._obj.value = mode._obj.value, self.mode


class Group:
    """Stands in for torch's NCCL group."""

    Options = SimpleNamespace

    def __init__(self, store: object, rank: int, size: int, options: object) -> None:
        self.calls: list[str] = []
        self.environment = {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL")}
        self.debug = dist.get_debug_level()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: object) -> Any:
            assert accepts(name, len(given)), f"torch's {name} takes not {given}"
            self.calls.append(name)
            return create_autospec(dist.Work, instance=True, spec_set=True)

        return call


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the stream of {device}")
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=made.exchange_mode)
    monkeypatch.setattr(_capture.ctypes, "CDLL", lambda name: driver)
    return made


@pytest.fixture
def link(device: Device) -> NcclLink:
    return NcclLink(dist.HashStore(), 1, 2, 10.0, DEVICE)


def test_torchs_watchdog_is_off_in_the_group_alone(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process, or abort it where the device has failed: seen on an H200."""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert NcclLink(dist.HashStore(), 1, 2, 10.0, DEVICE)._group.environment == dict.fromkeys(names, "0")
    assert not set(names) & set(os.environ)
    monkeypatch.setenv(names[0], "3")
    assert NcclLink(dist.HashStore(), 1, 2, 10.0, DEVICE)._group.environment == {names[0]: "3", names[1]: "0"}
    assert os.environ[names[0]] == "3" and names[1] not in os.environ


def test_torchs_debug_level_switches_no_watchdog_on(device: Device) -> None:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        assert NcclLink(dist.HashStore(), 1, 2, 10.0, DEVICE)._group.debug == dist.DebugLevel.INFO
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    finally:
        dist.set_debug_level(level)


def test_events_are_those_of_the_links_device_whatever_the_threads_current_one_is(
    device: Device, link: NcclLink
) -> None:
    sum_once(link)
    assert device.recorded == ["the stream of cuda:1"] * 2


def sum_once(link: NcclLink) -> None:
    link.all_reduce(torch.zeros(4), 0)


@pytest.mark.parametrize(
    "after, end",
    [(["drain"], "shutdown"), ([], "abort"), (["drain", "sum"], "abort"), (["drain", "sum", "drain"], "shutdown")],
    ids=str,
)
def test_what_the_device_has_done_is_sent_to_the_end_and_all_else_is_cut_off(
    device: Device, link: NcclLink, after: list[str], end: str
) -> None:
    device.reached = 100
    sum_once(link)
    for what in after:
        link.drain() if what == "drain" else sum_once(link)
    link.close()
    link.close()
    assert link._group.calls[-1] == end and len({"shutdown", "abort"} & {*link._group.calls}) == 1
    with pytest.raises(LinkError, match="the connections are closed"):
        sum_once(link)


def test_drain_waits_for_the_device_or_for_the_end_of_the_link(device: Device, link: NcclLink) -> None:
    errors: list[LinkError] = []

    def drain() -> None:
        try:
            link.drain()
        except LinkError as error:
            errors.append(error)

    def drain_until(then: Callable[[], None]) -> None:
        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        for _ in range(3):
            assert device.asked.acquire(timeout=180)
        assert thread.is_alive()
        then()
        thread.join(180)
        assert not thread.is_alive()

    sum_once(link)
    drain_until(lambda: setattr(device, "reached", device.events))
    assert not errors
    sum_once(link)
    drain_until(link.close)
    assert [str(error) for error in errors] == ["the connections are closed"] and link._group.calls[-1] == "abort"


def test_the_time_of_an_operation_begins_when_the_device_begins_it(
    device: Device, link: NcclLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(queueing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    sum_once(link)
    sum_once(link)

    def overdue_after(seconds: float, reached: int) -> bool:
        now[0] += seconds
        device.reached = reached
        return link.overdue() is not None

    assert not overdue_after(50, 0), "backward before it takes its time"
    assert not overdue_after(0, 1) and not overdue_after(9, 1) and not overdue_after(0, 2)
    assert not overdue_after(50, 3) and not overdue_after(9, 3) and overdue_after(2, 3)
    link.close()
    with pytest.raises(LinkError, match="timed out"):
        link.drain()
    assert device.asked_in_mode == {RELAXED} and device.mode == 0, "a capture of another thread goes on"


@pytest.mark.parametrize("seen_by", ["the watch", "the next call"])
def test_a_device_that_fails_is_told_as_itself(
    device: Device, link: NcclLink, seen_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sum_once(link)
    text = "CUDA error: an illegal memory access was encountered"

    def abort() -> None:
        raise RuntimeError(f"{text}, in a device that lets nothing be ended")

    monkeypatch.setattr(link._group, "abort", abort, raising=False)
    if seen_by == "the watch":
        device.error = f"{text}\nSearch for `cudaErrorIllegalAddress'"
        assert link.overdue()
        link.close()
    else:

        def fail(*_: object) -> None:
            raise dist.DistBackendError(f"NCCL error: unhandled cuda error\n{text}")

        monkeypatch.setattr(link._group, "allreduce", fail, raising=False)
        text = "NCCL error: unhandled cuda error"
    with pytest.raises(DeviceError, match=f"^the device of rank 1 has failed: {text}$") as told:
        sum_once(link)
    assert told.value.ranks == (1,)


def test_a_device_that_fails_is_not_asked_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be captured is called, and names the rank; the question alone would not."""

    def fail() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    _capture.refuse_capture("rank 1: a sum is called")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match="rank 1: a sum is called while a CUDA graph is captured"):
        _capture.refuse_capture("rank 1: a sum is called")


def test_numbers_of_16_bits_which_nccl_does_not_have_are_summed(
    link: NcclLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of a sum of 16: what does not fit is lost in front."""

    def double(tensors: list[torch.Tensor]) -> Any:
        assert tensors[0].dtype is torch.int32
        tensors[0].mul_(2)
        return create_autospec(dist.Work, instance=True, spec_set=True)

    monkeypatch.setattr(link._group, "allreduce", double, raising=False)
    x = torch.tensor([1, -3, 30_000], dtype=torch.int16)
    link.all_reduce(x, 0)
    assert x.tolist() == [2, -6, 60_000 - (1 << 16)]


def test_kernels_that_wait_for_others_end_with_the_link(
    device: Device, link: NcclLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_word", lambda: torch.zeros(1, dtype=torch.int32))
    words = []
    for _ in range(2):
        with link.launching() as stop:
            words.append(stop)
    assert words[0] is words[1] and not stop.item() and not link.overdue()
    link.close()
    assert stop.item(), "a kernel would wait for ever"
    with pytest.raises(LinkError), link.launching():
        pass
