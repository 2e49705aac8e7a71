"""Plans whose buckets leave once in several steps: sums, late results, changes of the plan, checkpoints, mistakes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionlayer.base.errors import ConfigError, PlanMismatch, UsageError
from fusionlayer.base.plan import FusionPlan
from fusionlayer.scheduler import Engine, Memory
from fusionlayer.transport import Transport
from tests.ranks import on_threads

from .engines import MODEL, exact_sum, gradients, make_engine
from .test_plan_controller import Script

WORLD = 3
EVERY = {"w0": (1, 0), "w1": (1, 0), "w2": (3, 2), "w3": (3, 2), "w4": (4, 1), "w5": (4, 1)}


def plan_of(codec: str = "raw", algorithm: str = "dense", world: int = WORLD, **options: Any) -> FusionPlan:
    """Return a plan for ``MODEL`` with three buckets, which leave in every step."""
    return FusionPlan.build([MODEL[:2], MODEL[2:4], MODEL[4:]], world, codec, options, algorithm, 128)


def submit(engine: Engine, values: dict[str, Tensor], shift: int = 0) -> list[str]:
    """Submit those of the ``values`` that are due, starting at number ``shift`` of them, and end the step."""
    names = [name for name in values if name in engine.due]
    for name in names[shift:] + names[:shift]:
        engine.submit(name, values[name])
    engine.end_step()
    return names


def take_all(engine: Engine) -> dict[str, Tensor]:
    found = [engine.take(index) for index in sorted(engine.untaken)]
    return {name: result.clone() for results in found for name, result in results.items()}


def assert_sums(results: dict[str, Tensor], step: int, world: int = WORLD) -> None:
    exact = exact_sum(world, step)
    assert all(torch.allclose(result.double(), exact[name], atol=1e-5) for name, result in results.items())


@pytest.mark.parametrize("lanes", [1, 2])
@on_threads(WORLD)
def test_every_bucket_has_the_bits_of_an_engine_that_sends_it_alone(transport: Transport, lanes: int) -> None:
    """With noise and error feedback; each result is taken as late as can be."""
    steps = 14
    always = plan_of("int", "two_shot", bits=4, rounding="stochastic")
    cadence = [EVERY[bucket.names[0]] for bucket in always.buckets]
    plan = replace(
        always, buckets=tuple(replace(b, every=e, phase=p) for b, (e, p) in zip(always.buckets, cadence, strict=True))
    )
    rank = transport.rank
    engine = make_engine(transport.duplicate(), plan=plan, hold_results=True, lanes=lanes)
    alone = [make_engine(transport.duplicate(), plan=always) for _ in plan.buckets]
    expected: dict[int, dict[str, Tensor]] = {}
    taken = 0

    def take(index: int) -> None:
        results = engine.take(index)
        assert all(torch.equal(results[name], expected[index][name]) for name in plan.buckets[index].names)

    for step in range(steps):
        due = [index for index, (every, phase) in enumerate(cadence) if step % every == phase]
        assert engine.step == step and plan.due(step) == tuple(due)
        assert engine.due == {name for index in due for name in plan.buckets[index].names}
        for index in engine.untaken & set(due):
            take(index)
            taken += 1
        values = gradients(rank, step)
        submit(engine, values, shift=rank)
        for index in due:
            assert engine.bucket_of(plan.buckets[index].names[0]) == index
            other, names = alone[index], plan.buckets[index].names
            other.step = step
            mine = {name: values[name].clone() if name in names else torch.zeros_like(values[name]) for name in values}
            for name, value in mine.items():
                other.submit(name, value)
            other.synchronize()
            expected[index] = {name: mine[name] for name in names}
    for index in sorted(engine.untaken):
        take(index)
    assert taken == steps - 1 + 3 + 3
    engine.close()
    for other in alone:
        other.close()


@on_threads(WORLD)
def test_a_step_without_buckets_sends_nothing_and_other_tensors_are_refused(transport: Transport) -> None:
    engine = make_engine(transport, plan=plan_of().staggered(4, 2), hold_results=True)
    for step in range(9):
        values, before = gradients(transport.rank, step), transport.bytes_sent
        for name in values.keys() - engine.due:
            with pytest.raises(UsageError, match=f"'{name}' was submitted in step {step}, in which it does not l"):
                engine.submit(name, values[name])
        if engine.due:
            with pytest.raises(UsageError, match=f"{len(engine.due)} of .* gradients have not come in step {step}"):
                engine.end_step()
        assert bool(engine.due) == (step % 2 == 1)
        submit(engine, values)
        assert_sums(take_all(engine), step)
        assert (transport.bytes_sent > before) == (step % 2 == 1)
    engine.close()


@on_threads(WORLD)
def test_results_that_nobody_took_still_travel_when_the_engine_is_closed(transport: Transport) -> None:
    engine = make_engine(transport, plan=plan_of().staggered(3, 3), hold_results=True)
    for step in range(3):
        submit(engine, gradients(transport.rank, step))
    assert engine.untaken == {0, 1, 2}
    if transport.rank != 0:
        for index in range(3):
            assert_sums(engine.take(index), index)
    engine.close()


@on_threads(WORLD)
def test_a_plan_is_switched_in_the_middle_of_a_period(transport: Transport) -> None:
    """Which buckets leave follows from the step's number; what was sent before is to be taken before the next ends."""
    first = plan_of().staggered(4, 3)
    second = FusionPlan.build([MODEL[:1], MODEL[1:]], WORLD, "raw", {}, "dense", 128).staggered(3)
    engine = make_engine(transport, plan=first, hold_results=True, lanes=2)
    for step in range(2):  # phases 0, 1 and 3
        submit(engine, gradients(transport.rank, step))
    engine.switch(second)
    assert engine.due == {tensor.name for tensor in MODEL}, "step 2 is the last of the second plan's periods"
    engine.switch(first)
    assert not engine.due
    submit(engine, {})
    engine.switch(second)
    for _ in range(2):
        submit(engine, {})
    assert engine.step == 5 and engine.plan == first and engine.untaken == {0, 1} and engine.bucket_of("w2") == 1
    values = gradients(transport.rank, 5)
    engine.submit("w5", values.pop("w5"))
    assert engine.plan == second and engine.bucket_of("w2") == 1
    assert_sums(engine.take(1), 1)
    with pytest.raises(UsageError, match="'w0' was submitted before its result of the last step was taken"):
        engine.submit("w0", values["w0"])
    assert_sums(engine.take(0), 0)
    submit(engine, values)
    assert engine.untaken == {0, 1} and engine.bucket_of("w2") == 1
    assert_sums(take_all(engine), 5)
    engine.close()


@on_threads(WORLD)
def test_results_of_another_plan_are_not_mixed_with_those_of_the_present_one(transport: Transport) -> None:
    one, other = plan_of().staggered(2, 2), plan_of().staggered(2)
    engine = make_engine(transport, plan=one, hold_results=True)
    submit(engine, gradients(transport.rank, 0))
    assert_sums(engine.take(1), 0)
    assert engine.untaken == {0}
    engine.switch(replace(other, buckets=(other.buckets[2], *(replace(b, phase=0) for b in other.buckets[:2]))))
    values = gradients(transport.rank, 1)
    for name in engine.due:
        engine.submit(name, values[name])
    with pytest.raises(UsageError, match="the plan has changed, but bucket 0 of the one before has not been taken"):
        engine.end_step()
    assert engine.bucket_of("w0") == 0 and engine.awaits("w0")
    assert_sums(engine.take(0), 0)
    engine.end_step()
    assert_sums(take_all(engine), 1)
    engine.close()


@pytest.mark.parametrize("phase", [0, 1])
@on_threads(WORLD)
def test_ranks_must_agree_on_the_steps(transport: Transport, phase: int) -> None:
    """Also where one rank sends in a step in which the others send nothing."""
    plan = plan_of().staggered(3)
    if transport.rank == 1:
        plan = replace(plan, buckets=tuple(replace(bucket, phase=phase) for bucket in plan.buckets))
    engine = make_engine(transport, plan=plan, hold_results=True)
    with pytest.raises(PlanMismatch, match=r"\[1\] differ from rank 0"):
        for step in range(3):
            submit(engine, gradients(transport.rank, step))
            take_all(engine)


@pytest.mark.parametrize("stop", [1, 3, 4])
@on_threads(WORLD)
def test_a_run_goes_on_where_it_was_saved(transport: Transport, stop: int) -> None:
    """With results under way, by the bits of a run that was not stopped."""
    plan, steps = plan_of("int", "two_shot", bits=4, rounding="stochastic").staggered(3, 2), 9

    def run(engine: Engine, steps: range) -> list[dict[str, Tensor]]:
        found = []
        for step in steps:
            assert engine.step == step
            found.append({})
            for index in sorted(engine.untaken & set(plan.due(step))):
                found[-1] |= {name: result.clone() for name, result in engine.take(index).items()}
            submit(engine, gradients(transport.rank, step))
        return found

    def make(memory: Memory) -> Engine:
        return make_engine(transport.duplicate(), plan=plan, hold_results=True, memory=memory)

    whole, begun = make(Memory()), make(Memory())
    expected = run(whole, range(steps))
    before = run(begun, range(stop))
    saved, residuals = begun.state_dict(), begun.memory.state_dict()
    again = begun.state_dict()
    assert saved["results"].keys() == again["results"].keys() and saved["step"] == stop
    run(begun, range(stop, stop + 4))  # it goes on after that; what was saved does not change
    begun.close()
    memory = Memory()
    memory.load_state_dict(residuals)
    resumed = make(memory)
    resumed.load_state_dict(saved)
    assert resumed.untaken == {resumed.bucket_of(name) for name in saved["results"]}
    found = before + run(resumed, range(stop, steps))
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ConfigError, match="results were saved of a part of bucket 2: 'w4' is missing"):
        resumed.load_state_dict({"step": 1, "results": {"w5": torch.zeros(777)}})
    with pytest.raises(ConfigError, match="a part of bucket 2: 'w5' is missing or of another size"):
        resumed.load_state_dict({"step": 1, "results": {"w4": torch.zeros(1), "w5": torch.zeros(776)}})
    with pytest.raises(ConfigError, match="results were saved of 'v', which is not in the plan"):
        resumed.load_state_dict({"step": 1, "results": {"v": torch.zeros(7)}})
    for engine in (whole, resumed):
        engine.close()


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "this trainer sends each bucket in each step; expected a plan without 'every'"),
        ({"overlap_forward": True}, "overlap_forward expects each bucket in each step; leave it out"),
        ({"hold_results": True, "plan_controller": Script({})}, "planners that need costs expect each"),
    ],
    ids=["in place", "overlap", "controller"],
)
@on_threads(1)
def test_a_trainer_of_every_step_refuses_such_a_plan(
    transport: Transport, options: dict[str, Any], message: str
) -> None:
    plan = plan_of(world=1)
    with pytest.raises(ConfigError, match=message):
        make_engine(transport.duplicate(), plan=plan.staggered(2), **options)
    engine = make_engine(transport.duplicate(), plan=plan, **options)
    with pytest.raises(ConfigError, match=message):
        engine.switch(plan.staggered(2))
    engine.close()
