"""Engines with several lanes, and results that are taken bucket by bucket."""

import threading

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.base.errors import FusionLayerError, PlanMismatch, UsageError
from fusionlayer.codecs import Codec
from fusionlayer.scheduler import Engine, planners
from fusionlayer.scheduler.order import MEASURED, WARM_UP
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads, over_threads

from .engines import collective_named, exact_sum, gradients, make_engine, run_step

WORLD = 3


def take_all(engine: Engine, values: dict[str, Tensor], shift: int = 0) -> dict[str, Tensor]:
    """Submit all ``values``, starting at number ``shift`` of them, end the step and return copies of the results."""
    names = list(values)
    for name in names[shift:] + names[:shift]:
        engine.submit(name, values[name])
    engine.end_step()
    results: dict[str, Tensor] = {}
    for index in sorted(engine.untaken, reverse=True):
        results |= {name: result.clone() for name, result in engine.take(index).items()}
    return {name: results[name] for name in names}


@looped("codec", ["raw", "int4"])
@looped("overlap_forward", [False, True])
@looped("lanes", [1, 2, 3, 5])
@on_threads(WORLD)
def test_lanes_and_order_change_no_bit(transport: Transport, lanes: int, overlap_forward: bool, codec: str) -> None:
    steps = WARM_UP + MEASURED + 3
    options = {"codec": codecs.get(codec), "planner": planners.get("wfbp")}
    plain = make_engine(transport.duplicate(), **options)
    other = make_engine(transport.duplicate(), lanes=lanes, overlap_forward=overlap_forward, **options)
    for step in range(steps):
        expected = run_step(plain, gradients(transport.rank, step))
        run = take_all if overlap_forward else run_step
        results = run(other, gradients(transport.rank, step), shift=transport.rank)
        for name in expected:
            assert torch.equal(results[name], expected[name]), (step, name)
    plain.close()
    other.close()


def test_lanes_are_under_way_at_once() -> None:
    meeting = threading.Barrier(2 * WORLD)

    def together(x: Tensor, codec: Codec, transport: Transport, **_: object) -> None:
        meeting.wait(180)
        transport.all_reduce(x)

    def body(transport: Transport) -> None:
        engine = make_engine(
            transport, codec=codecs.get("raw"), algorithm="together", planner=planners.get("wfbp"), lanes=2
        )
        values = run_step(engine, gradients(transport.rank, 0))
        assert all(torch.allclose(values[n].double(), exact_sum(WORLD, 0)[n], atol=1e-6) for n in values)
        engine.close()

    with collective_named("together", together):
        over_threads(WORLD, body)


@on_threads(WORLD)
def test_gradients_are_left_alone_and_let_go_of(transport: Transport) -> None:
    engine = make_engine(transport, codec=codecs.get("raw"), overlap_forward=True)
    for step in range(2):
        values = gradients(transport.rank, step)
        results = take_all(engine, values)
        before = gradients(transport.rank, step)
        assert all(torch.equal(values[name], before[name]) for name in values)
        assert all(torch.allclose(results[n].double(), exact_sum(WORLD, step)[n], atol=1e-6) for n in values)
    engine.close()


@on_threads(WORLD)
def test_a_result_that_nobody_took_is_not_overwritten(transport: Transport) -> None:
    engine = make_engine(transport, codec=codecs.get("raw"), overlap_forward=True)
    take_all(engine, gradients(transport.rank, 0))
    for name, value in gradients(transport.rank, 1).items():
        engine.submit(name, value)
    engine.end_step()
    assert engine.untaken and engine.awaits("w0")
    with pytest.raises(UsageError, match="'w0' was submitted before its result of the last step was taken"):
        engine.submit("w0", gradients(transport.rank, 2)["w0"])
    for index in sorted(engine.untaken):
        engine.take(index)
    assert not engine.untaken and not engine.awaits("w0")
    results = take_all(engine, gradients(transport.rank, 2))
    assert all(torch.allclose(results[n].double(), exact_sum(WORLD, 2)[n], atol=1e-6) for n in results)
    engine.close()


def test_what_is_under_way_does_not_leave_again() -> None:
    """As where the next forward leaves a module out: a step begins while that module's bucket still travels."""
    has_begun = threading.Event()

    def body(transport: Transport) -> None:
        engine = make_engine(
            transport, codec=codecs.get("raw"), planner=planners.get("wfbp"), overlap_forward=True, lanes=1
        )
        take_all(engine, gradients(transport.rank, 0))
        assert engine.plan is not None
        first, *others = (name for bucket in engine.plan.buckets for name in bucket.names)
        values, later = gradients(transport.rank, 1), gradients(transport.rank, 2)
        engine.submit(first, values[first])
        if transport.rank > 0:
            assert has_begun.wait(180)
        for name in others:
            engine.submit(name, values[name])
        engine.end_step()
        engine.take(0)
        engine.submit(first, later[first])
        has_begun.set()
        for index in sorted(engine.untaken):
            engine.take(index)
        for name in others:
            engine.submit(name, later[name])
        engine.end_step()
        results = {name: x for index in sorted(engine.untaken) for name, x in engine.take(index).items()}
        assert all(torch.allclose(results[n].double(), exact_sum(WORLD, 2)[n], atol=1e-6) for n in results)
        engine.close()

    over_threads(WORLD, body)


@pytest.mark.parametrize("failing_bucket", [0, 1])
def test_a_failure_in_one_lane_ends_all_lanes_on_all_ranks(failing_bucket: int) -> None:
    numels: list[int] = []

    def fragile(x: Tensor, codec: Codec, transport: Transport, **_: object) -> None:
        if len(numels) and x.numel() == numels[failing_bucket] and transport.rank == 1:
            raise RuntimeError("the disk is on fire")
        transport.all_reduce(x)

    def body(transport: Transport) -> None:
        engine = make_engine(
            transport, codec=codecs.get("raw"), algorithm="fragile", planner=planners.get("wfbp"), lanes=2
        )
        run_step(engine, gradients(transport.rank, 0))
        assert engine.plan is not None
        ready.wait(180)
        if transport.rank == 0:
            numels.extend(bucket.numel for bucket in engine.plan.buckets)
        ready.wait(180)
        with pytest.raises((RuntimeError, FusionLayerError), match="the disk is on fire|lost|closed|left|rank 1"):
            run_step(engine, gradients(transport.rank, 1))
        assert engine.failure is not None
        with pytest.raises(type(engine.failure)):
            engine.submit("w0", gradients(transport.rank, 2)["w0"])

    ready = threading.Barrier(WORLD)
    with collective_named("fragile", fragile):
        over_threads(WORLD, body)


@on_threads(WORLD)
def test_ranks_must_agree_on_overlap(transport: Transport) -> None:
    engine = make_engine(transport, overlap_forward=transport.rank == 1, lanes=2)
    for name, value in gradients(transport.rank, 0).items():
        engine.submit(name, value)
    with pytest.raises(PlanMismatch, match=r"\[1\] differ from rank 0"):
        engine.end_step()


@on_threads(WORLD)
def test_ranks_must_agree_on_lanes(transport: Transport) -> None:
    with pytest.raises(PlanMismatch, match=r"number of lanes .* \[1\] differ from rank 0"):
        make_engine(transport, lanes=3 if transport.rank == 1 else 2)
