"""On which thread a group's compressed calls run, and that their streams are in order; on a model of a GPU."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from fusionlayer.backend import work
from fusionlayer.backend.call_queue import CallQueue
from fusionlayer.base.errors import FusionLayerError
from fusionlayer.transport import Transport
from tests.scheduler.test_streams import Echo
from tests.streams import DEVICE, Gpu, Stream, planted
from tests.synthetic import gradient


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(work, "Future", lambda devices: Future())  # torch has no futures of a device that is a model
    with Gpu().installed(monkeypatch) as gpu:
        yield gpu


def calls(gpu: Gpu, at_once: bool) -> tuple[list[str], list[str]]:
    """Make calls of CPU and CUDA tensors in turn; return the names of the threads in order, and the races."""
    threads: list[str] = []
    queue = CallQueue("g", lambda: Echo(gpu, at_once), at_once=at_once)

    def send(x: Tensor, transport: Transport) -> None:
        if not x.is_cuda:
            late = threading.Event()
            threading.Timer(0.05, late.set).start()
            late.wait(180)  # a call that is made after this one must not overtake it
        threads.append(threading.current_thread().name)
        received = torch.empty_like(x)
        transport.exchange({0: (x, received)})
        x.add_(received)

    side = Stream()
    side.wait_stream(gpu.default)
    for step in range(3):
        values = gradient(100, step)
        with gpu.on(side):
            x = gpu.made(values.clone(), "backward")
            on_cpu = queue.submit("a sum", partial(send, values), [values])
            done = queue.submit("a sum", partial(send, x), [x])
            done.wait()
            x.add_(1)
            on_cpu.wait()
            assert torch.equal(x.elements, values + 1)
    queue.close(wait=True)
    with pytest.raises(FusionLayerError, match="was destroyed"):
        queue.submit("a sum", lambda _: None, [x])
    return threads, gpu.settle()


@pytest.mark.parametrize("at_once", [True, False], ids=["nccl", "gloo"])
def test_over_nccl_the_thread_of_the_program_launches(gpu: Gpu, at_once: bool) -> None:
    """Several communicators of a device need one order of launches on all ranks: that of the program."""
    threads, races = calls(gpu, at_once)
    here = threading.current_thread().name
    assert threads == ["fusionlayer group g", here if at_once else "fusionlayer group g"] * 3
    assert not races


def test_a_missing_wait_between_streams_is_found(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, work.Ticket, "on", "stream.wait_event(self._ready)", "pass")
    assert calls(gpu, True)[1]


@pytest.mark.parametrize("second", ["cpu", "cuda"])
@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_after_a_failure_no_call_runs(gpu: Gpu, first: str, second: str) -> None:
    """Calls of CPU tensors run on the queue's thread, those of CUDA tensors on this one; the failure is of both."""
    queue = CallQueue("g", lambda: Echo(gpu, True), at_once=True)
    tensors = {"cpu": torch.empty(3), "cuda": torch.empty(3, device=DEVICE)}

    def broken(transport: Transport) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        queue.submit("a sum", broken, [tensors[first]]).wait()
    with pytest.raises(ValueError, match="broken"):
        queue.submit("a sum", lambda transport: pytest.fail("a call ran after a failure"), [tensors[second]]).wait()
    queue.close(wait=False)
