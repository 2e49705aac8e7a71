"""Planning by the clock of a device: steps are told of late or never, and nobody waits for that but a measurement."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusionlayer.base.plan import FusionPlan
from fusionlayer.planning.bucket_costs import BucketCosts
from fusionlayer.planning.cluster import Cluster
from fusionlayer.planning.collective_phases import ALGORITHMS
from fusionlayer.planning.cost_model import FREE, AlphaBeta, CodecCost, LinkCost
from fusionlayer.planning.prediction import PlannedBucket, Resources, predict
from fusionlayer.planning.profile import Gradient, Model
from fusionlayer.planning.profiler import (
    busy_seconds,
    disturbance,
    measure_collectives,
    measure_disturbance,
    measure_step,
)
from fusionlayer.planning.simulation import Compute, Load, run_step
from fusionlayer.process.clock import DeviceClock
from fusionlayer.scheduler import StepSeconds
from fusionlayer.transport import Transport
from tests.fake_device import FakeDevice
from tests.loops import looped
from tests.ranks import over_threads

from .measured import costs_measured
from .test_online import USUAL, drive, make_planner, step_of

pytestmark = pytest.mark.short

Steps = Sequence[StepSeconds | None]


def driven(
    by_rank: Sequence[Steps], **options: Any
) -> tuple[list[list[FusionPlan]], list[FakeDevice], int, list[float]]:
    """Return plans and device of each rank, how often costs were measured, and backward of each rank's profile."""
    devices = [FakeDevice() for _ in by_rank]

    def body(transport: Transport) -> tuple[list[FusionPlan], float]:
        planner = make_planner(transport, clock=devices[transport.rank], **options)
        plans = drive(planner, transport, by_rank[transport.rank])
        return plans, 0.0 if planner.profile is None else planner.profile.model.backward

    with costs_measured(latency=0.0, per_byte=1e-6) as network:
        found = over_threads(len(by_rank), body)
    assert network.ranks.count(0) == network.ranks.count(1)
    return [plans for plans, _ in found], devices, network.ranks.count(0), [backward for _, backward in found]


def late(steps: Steps, by: int = 1) -> list[StepSeconds | None]:
    """Return what a device tells that is ``by`` steps behind."""
    return [*[None] * by, *(None if each is None else replace(each, late=by) for each in steps)][: len(steps)]


# ---- the first plan -------------------------------------------------------------------------------------------------


def test_a_rank_whose_device_is_late_gets_the_plan_of_all() -> None:
    (first, second), devices, measured, backward = driven([USUAL[:8], late([step_of(0.03)] * 8)])
    assert first == second and len(first) == 1 and measured == 1
    assert backward == pytest.approx([0.02, 0.02]), "the mean of 10 ms and 30 ms"
    assert [device.waits for device in devices] == [0, 0]


def test_steps_go_on_until_every_rank_has_measured_one() -> None:
    silent: Steps = [None] * 5
    (first, second), devices, measured, _ = driven([USUAL[:12], [*silent, *USUAL[5:12]]])
    assert first == second and len(first) == 1 and measured == 1
    assert [device.waits for device in devices] == [2, 2], "each time when the steps to measure were over"


def test_what_a_device_tells_late_of_the_warm_up_does_not_count() -> None:
    # Step 0 warms up. When step 1 has ended the device tells of step 0, when step 2 has ended of step 1.
    steps = [step_of(99.0), step_of(0.02), step_of(0.01), step_of(0.01)]
    assert driven([late(steps)] * 2)[3] == pytest.approx([0.02, 0.02])


# ---- drift ----------------------------------------------------------------------------------------------------------


def gaps(steps: Steps) -> list[StepSeconds | None]:
    return [None if i % 3 == 2 else each for i, each in enumerate(steps)]


def test_drift_of_a_device_is_seen() -> None:
    slow = [*USUAL, *[step_of(0.03)] * 300]
    plans, devices, measured, _ = driven([late(gaps(slow)), late(slow)])
    assert plans[0] == plans[1] and measured == 2
    assert [device.waits for device in devices] == [0, 0]


def test_a_look_without_a_rank_finds_no_drift() -> None:
    """While one rank's device is silent, the others' steps tell nothing either."""
    slow: list[StepSeconds | None] = [step_of(0.03)] * 40
    plans, _, measured, _ = driven([[*USUAL, *slow], [*USUAL, *[None] * 40]])
    assert plans[0] == plans[1] and measured == 1
    assert driven([[*USUAL, *slow, *slow], [*USUAL, *[None] * 40, *slow]])[2] == 2


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_calls_are_measured_by_the_device_alone() -> None:
    device = FakeDevice()

    assert busy_seconds(lambda: device.work(0.25), 3, device) == 0.25


def test_what_the_host_takes_to_launch_kernels_is_not_counted() -> None:
    device = FakeDevice()

    def kernels() -> None:
        for _ in range(3):
            device.now += 1.0
            device.work(0.25)

    assert busy_seconds(kernels, 3, device) == 0.75


@pytest.mark.parametrize("reads", [False, True], ids=["captured", "asks the device"])
def test_the_clock_of_a_device_replays_what_can_be_captured(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, calls = ["the program's"], []

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    class Capture:
        """As torch's: where the capture has failed, its stream stays the current one."""

        def __init__(self, graph: Graph, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"

        def __enter__(self) -> None:
            streams.append("the capture's")

        def __exit__(self, *error: object) -> None:
            if reads:
                raise RuntimeError("operation failed due to a previous error during capture")
            streams.pop()

    for name, stand_in in {
        "CUDAGraph": Graph,
        "graph": Capture,
        "device": lambda device: nullcontext(),
        "current_stream": lambda device: streams[-1],
        "set_stream": lambda stream: streams.append(stream),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    filled = torch.zeros(1)
    known = weakref.ref(filled)
    replay = DeviceClock(torch.device("cuda", 0)).replayed(lambda filled=filled: calls.append("call"))  # type: ignore[misc]
    del filled
    replay()
    assert calls == ["call", "call" if reads else "replay"]
    assert known() is not None, "the graph writes into memory that has been given back"
    assert streams[-1] == "the program's"


class Wire:
    """Stands for a transport whose messages a device sends, a microsecond for each byte."""

    rank, size = 0, 2

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        self._device.work(1e-6 * x.nbytes)

    all_to_all = all_gather

    def all_reduce(self, x: Tensor) -> None:
        self._device.work(2e-6 * x.nbytes)

    def barrier(self) -> None:
        self._device.now += 1.0

    def broadcast(self, x: Tensor, root: int) -> None:
        pass


def test_collectives_are_measured_by_the_device() -> None:
    device = FakeDevice()
    found = measure_collectives(Wire(device), (1000, 2000), 2, 1.0, device)  # type: ignore[arg-type]
    assert found["one_shot"] == [[1000, pytest.approx(1e-3)], [2000, pytest.approx(2e-3)]]
    assert found["dense"] == [[1000, pytest.approx(2e-3)], [2000, pytest.approx(4e-3)]]
    assert found["two_shot"] == [[1000, pytest.approx(1.5e-3)], [2000, pytest.approx(3e-3)]]


class Layer(nn.Module):
    """Its forward takes the device 1 s, its backward 2 s."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self._device = device

    def forward(self, x: Tensor) -> Tensor:
        self._device.work(1.0)
        y = x * self.weight
        y.register_hook(lambda _: self._device.work(2.0))
        return y


def test_a_model_is_measured_by_the_device_while_the_host_runs_ahead() -> None:
    device = FakeDevice()
    layers = nn.Sequential(Layer(device), Layer(device))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            assert not device.waits
            return self.layers(x).sum()

    net = Net()
    found = measure_step(net, torch.optim.SGD(net.parameters(), lr=0.0), lambda _: [torch.ones(2)], 1, 3, device)
    assert (found["forward"], found["backward"], found["optimizer"]) == (2.0, 4.0, 0.0)
    assert found["ready"] == {"layers.1.weight": 2.0, "layers.0.weight": 4.0}
    assert found["used"] == {"layers.0.weight": 0.0, "layers.1.weight": 1.0}


def test_a_disturbance_is_what_the_computing_stream_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost on a device that does not work at all, however long the host takes."""
    monkeypatch.setattr(disturbance, "_DEVICE_ROWS", 1)
    assert over_threads(2, lambda transport: measure_disturbance(transport, 1, FakeDevice())) == [0.0, 0.0]


# ---- the model of a step --------------------------------------------------------------------------------------------

LINK = LinkCost(0.0, 0.0, 0.0, AlphaBeta(0.0, 1.0), AlphaBeta(0.0, 1.0))
PER_ELEMENT = AlphaBeta(0.0, 0.5)
INT8 = CodecCost(8, PER_ELEMENT, PER_ELEMENT, FREE, FREE)


@looped("algorithm", ["dense", "ring", "butterfly", "one_shot", "two_shot", "zipped", "integer_sum"])
def test_where_messages_leave_from_the_host_copies_come_before_and_after(algorithm: str) -> None:
    """Each byte of a message takes a copy engine as long as the link, there and back."""
    staged = Cluster(2, LINK, staging=AlphaBeta(0.0, 1.0))
    plain = ALGORITHMS[algorithm](64.0, INT8, replace(staged, staging=None), FREE)
    phases = [each for each in ALGORITHMS[algorithm](64.0, INT8, staged, FREE) if each.seconds]
    by_link = {link: sum(each.seconds for each in phases if each.link == link) for link in {p.link for p in phases}}
    assert by_link["copies to the host"] == by_link["copies from the host"] == pytest.approx(by_link["between"])
    assert sum(each.cpu for each in phases) == sum(each.cpu for each in plain), "copy engines compute nothing"
    assert BucketCosts(INT8, algorithm, staged, transfer=FREE).alone(64.0) == pytest.approx(
        BucketCosts(INT8, algorithm, replace(staged, staging=None), transfer=FREE).alone(64.0)
    ), "what was measured with the copies has them once"


def test_a_copy_engine_works_beside_the_other_and_beside_the_device() -> None:
    cluster = Cluster(2, LINK, staging=AlphaBeta(0.0, 1.0))
    load = Load(0.0, 0.0, 1.0, ALGORITHMS["one_shot"](8.0, replace(INT8, encode=FREE, decode=FREE), cluster, FREE))
    one, two = (run_step(Compute(0.0, 30.0, 0.0), [load] * 2, cores=1.0, lanes=lanes) for lanes in (1, 2))
    # Eight bytes take 8 s each: to the host, over the link, and back.
    assert one.spans[-1].end == 48.0 and one.seconds == 48.0
    assert two.spans[0].end == two.spans[1].end == 48.0, "in step they share each engine, and gain nothing"
    later = replace(load, ready=8.0)
    two = run_step(Compute(0.0, 30.0, 0.0), [load, later], cores=1.0, lanes=2)
    assert two.spans[1].end == 32.0 and two.seconds == 32.0, "a stage apart, each engine has a bucket"


def test_codecs_and_backward_share_a_device() -> None:
    tensors = (Gradient("a", 8, 4.0), Gradient("b", 8, 12.0))
    model = Model("m", 0.0, 12.0, 0.0, tensors)
    link = replace(LINK, exchange=FREE)
    costs = BucketCosts(replace(INT8, decode=FREE), "one_shot", Cluster(2, link))
    buckets = [PlannedBucket([each.name], costs) for each in tensors]
    device = predict(model, buckets, Resources(cores=1.0))
    # The first bucket's 4 s of encoding slow the rest of backward down by as much; the second one's follow.
    assert device.spans[1].ready == 16.0 and device.seconds == 20.0
    assert predict(model, buckets).seconds == 16.0
