"""Planning by the clock of a device: steps are told of late or never, and nobody waits for that but a measurement."""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusionlayer.base.plan import FusionPlan
from fusionlayer.planning.bucket_costs import BucketCosts
from fusionlayer.planning.cluster import Cluster
from fusionlayer.planning.collective_phases import ALGORITHMS
from fusionlayer.planning.cost_model import FREE, AlphaBeta, CodecCost, LinkCost
from fusionlayer.planning.profiler.codecs import busy_seconds
from fusionlayer.process.clock import DeviceClock
from fusionlayer.scheduler import StepSeconds
from fusionlayer.transport import Transport
from tests.fake_device import FakeDevice
from tests.loops import looped
from tests.ranks import over_threads

from .measured import costs_measured
from .test_online import USUAL, drive, make_planner, step_of

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


# ---- what is measured -----------------------------------------------------------------------------------------------


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
