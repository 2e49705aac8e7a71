"""Buckets whose tensors are encoded one by one as they arrive."""

import gc
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError, PlanMismatch
from fusionlayer.base.plan import FusionPlan, TensorInfo
from fusionlayer.observe.timeline import Timeline
from fusionlayer.scheduler import Engine, Memory, Scaling, planners
from fusionlayer.transport import Transport
from fusionlayer.transport.c10d import C10dTransport
from tests.codecs.toy_sparse import toy_sparse
from tests.loops import looped
from tests.ranks import on_processes, on_threads, over_threads
from tests.spans import spans_of

from .engines import MODEL, exact_sum, gradients, make_engine, of_layouts, run_step, views

WORLDS = [1, 2, 3, 4, 8]


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    with toy_sparse():
        yield


def plan_of(*runs: str, codec: str = "toysparse", ahead: bool = True, world: int = 3, **options: Any) -> FusionPlan:
    """Return a plan for ``MODEL`` with a bucket for each string of digits."""
    algorithm = collectives.choose(codecs.get(codec), (world,), ahead=ahead)
    model = {tensor.name: tensor for tensor in MODEL}
    tensors = [[model[f"w{digit}"] for digit in run] for run in runs]
    return FusionPlan.build(tensors, world, codec, options, algorithm, 1 if ahead else 128, ahead)


def ragged(rank: int, step: int) -> dict[str, Tensor]:
    """Return gradients of which ranks send very different numbers of elements, and none of some tensors."""
    return {
        name: value * (2.0 ** -(i + rank)) if (rank + step + i) % 3 else torch.zeros_like(value)
        for i, (name, value) in enumerate(gradients(rank, step).items())
    }


def sparse_sum(world: int, step: int, residuals: list[dict[str, Tensor]], scale: float) -> dict[str, Tensor]:
    """Return the sum, in rank order in f32, of what each rank sends; ``residuals`` become what they keep."""
    sums = {tensor.name: torch.zeros(tensor.numel) for tensor in MODEL}
    codec = codecs.get("toysparse", threshold=0.01)
    for rank in range(world):
        for name, value in ragged(rank, step).items():
            wanted = value * scale + residuals[rank].setdefault(name, torch.zeros_like(value))
            sent = codec.decompress(codec.compress(wanted), len(wanted))
            residuals[rank][name] = wanted - sent
            sums[name] += sent
    return sums


# ---- results --------------------------------------------------------------------------------------------------------


@looped("algorithm", ["gather", "gather_v"])
@looped("world", WORLDS)
def test_the_result_is_the_sum_of_what_each_rank_sends(world: int, algorithm: str) -> None:
    steps, scale = 4, 0.5
    residuals: list[dict[str, Tensor]] = [{} for _ in range(world)]
    expected = [sparse_sum(world, step, residuals, scale) for step in range(steps)]

    def body(transport: Transport) -> None:
        codec = codecs.get("toysparse", threshold=0.01)
        engine = make_engine(transport, codec=codec, algorithm=algorithm, scaling=Scaling(scale, 4.0), lanes=2)
        for step in range(steps):
            results = run_step(engine, ragged(transport.rank, step), shift=transport.rank)
            for name, total in expected[step].items():
                assert torch.equal(results[name], total * 4), (step, name)
        engine.close()
        kept = engine.memory.state_dict()["residuals"]
        assert all(torch.equal(kept[name], value) for name, value in residuals[transport.rank].items())

    over_threads(world, body)


@on_threads(3)
def test_fusion_changes_no_bit(transport: Transport) -> None:
    stochastic = codecs.get("int4", rounding="stochastic")
    for codec in (codecs.get("toysparse"), stochastic):
        engines = [
            make_engine(transport.duplicate(), codec=codec, ahead=True, planner=planners.get(planner))
            for planner in ("wfbp", "horovod")
        ]
        for step in range(3):
            one, all_ = (run_step(engine, gradients(transport.rank, step)) for engine in engines)
            assert all(torch.equal(one[name], all_[name]) for name in one)
        for engine in engines:
            engine.close()


@looped("codec", ["raw", "bf16", "int8", "int4"])
def test_any_codec_goes_ahead(codec: str) -> None:
    world = 3

    def body(transport: Transport) -> dict[str, Tensor]:
        engine = make_engine(transport, codec=codecs.get(codec), ahead=True)
        results = run_step(engine, gradients(transport.rank, 0))
        assert engine.plan is not None and all(b.ahead and b.algorithm == "gather" for b in engine.plan.buckets)
        engine.close()
        return results

    every = over_threads(world, body)
    for name, exact in exact_sum(world, 0).items():
        assert all(torch.equal(results[name], every[0][name]) for results in every)
        assert (every[0][name] - exact).norm() <= 0.3 * exact.norm() + 1e-3


def test_noise_differs_between_ranks_steps_and_tensors_and_selections_do_not() -> None:
    seeds: dict[str, set[int]] = {"raw": set(), "toysparse": set()}

    def body(transport: Transport) -> None:
        for name in seeds:
            codec = codecs.get(name)
            engine = make_engine(transport.duplicate(), MODEL[:2], codec=codec, ahead=True)
            for step in range(2):
                run_step(engine, gradients(transport.rank, step, MODEL[:2]))
            for buffer in engine._plans.buffers:
                places = buffer._places.values()  # type: ignore[attr-defined]
                seeds[name] |= {buffer._seed(place, step) for place in places for step in range(2)}  # type: ignore[attr-defined]
            engine.close()

    over_threads(3, body)
    assert len(seeds["raw"]) == 2 * 2 * 3 and len(seeds["toysparse"]) == 2 * 2


@looped("overlap_forward", [False, True])
def test_all_element_types_and_layouts(overlap_forward: bool) -> None:
    tensors = of_layouts("of another type")

    def body(transport: Transport) -> None:
        engine = make_engine(transport, tensors, codec=codecs.get("raw"), ahead=True, overlap_forward=overlap_forward)
        for step in range(2):
            values = views(transport.rank, step, tensors)
            for name, value in values.items():
                engine.submit(name, value)
            engine.end_step()
            results: dict[str, Tensor] = {}
            for index in sorted(engine.untaken):
                results |= engine.take(index)
            for tensor in tensors:
                parts = [views(rank, step, tensors)[tensor.name].float() for rank in range(2)]
                expected = torch.stack(parts).sum(0).to(getattr(torch, tensor.dtype))
                if not overlap_forward:
                    expected = expected.to(values[tensor.name].dtype)
                assert torch.equal(results[tensor.name], expected)
                if overlap_forward:
                    assert torch.equal(values[tensor.name], views(transport.rank, step, tensors)[tensor.name])
                else:
                    assert torch.equal(values[tensor.name], expected)
        engine.close()

    over_threads(2, body)


@pytest.mark.medium
@pytest.mark.parametrize("algorithm", ["gather", "gather_v"])
@pytest.mark.parametrize("world", [2, 3])
@on_processes()
def test_over_processes(rank: int, world: int, algorithm: str) -> None:
    with toy_sparse():
        residuals: list[dict[str, Tensor]] = [{} for _ in range(world)]
        codec = codecs.get("toysparse", threshold=0.01)
        engine = make_engine(C10dTransport(None).duplicate(), codec=codec, algorithm=algorithm, lanes=2)
        for step in range(3):
            results = run_step(engine, ragged(rank, step))
            expected = sparse_sum(world, step, residuals, 1.0)
            assert all(torch.equal(results[name], expected[name]) for name in expected)
        engine.close()


# ---- cost -----------------------------------------------------------------------------------------------------------


def test_steps_send_the_same_bytes_and_allocate_nothing() -> None:
    world, steps = 2, 200
    together = threading.Barrier(world)

    def body(transport: Transport) -> tuple[int, int]:
        engine = make_engine(transport, codec=codecs.get("toysparse", threshold=0.01))
        own = engine.lanes.all[0].transport
        given = [ragged(transport.rank, step) for step in range(8)]
        sent, addresses, traced = [], set(), [0, 0]
        for step in range(steps):
            before = own.bytes_sent
            run_step(engine, {name: value.clone() for name, value in given[step % 8].items()})
            sent.append(own.bytes_sent - before)
            buffers: list[Any] = list(engine._plans.buffers)
            memory = [own.scratch("incoming", 1, torch.device("cpu"))]
            memory += [buffer._payload for buffer in buffers]
            memory += [place.state.residual for buffer in buffers for place in buffer._places.values()]
            addresses.add(tuple(x.data_ptr() for x in memory))
            if step in (steps // 2, steps - 1):
                together.wait(60)  # what another rank has in the middle of a step is no growth
                if transport.rank == 0:
                    gc.collect()
                    traced = [traced[1], tracemalloc.get_traced_memory()[0]]
                together.wait(60)
        assert set(sent[1:]) == {(world - 1) * sum(buffer._payload.numel() for buffer in buffers)}
        engine.close()
        return len(addresses), traced[1] - traced[0]

    tracemalloc.start()
    try:
        for addresses, growth in over_threads(world, body):
            assert addresses == 1
            assert growth < 50_000
    finally:
        tracemalloc.stop()


def test_only_what_is_used_travels_if_sizes_are_exchanged() -> None:
    def body(transport: Transport) -> list[int]:
        sent = []
        for algorithm in ("gather", "gather_v"):
            codec = codecs.get("toysparse", threshold=0.01)
            engine = make_engine(transport.duplicate(), codec=codec, algorithm=algorithm)
            own = engine.lanes.all[0].transport
            run_step(engine, ragged(transport.rank, 0))
            before = own.bytes_sent
            run_step(engine, {tensor.name: torch.zeros(tensor.numel) for tensor in MODEL})
            run_step(engine, {tensor.name: torch.zeros(tensor.numel) for tensor in MODEL})
            sent.append(own.bytes_sent - before)
            engine.close()
        return sent

    for fixed, used in over_threads(2, body):
        assert used < fixed / 2


# ---- encoding at once -----------------------------------------------------------------------------------------------


def test_gradients_are_encoded_when_they_are_submitted(tmp_path: Path) -> None:
    plan = plan_of("012", "345", world=2)

    def body(transport: Transport) -> None:
        timeline = Timeline(str(tmp_path / "trace"), transport.rank)
        engine = make_engine(transport, plan=plan, timeline=timeline, name="sender")
        for step in range(2):
            values = gradients(transport.rank, step)
            engine.submit("w5", values.pop("w5"))
            place = engine._plans.buffers[1]._places["w5"]  # type: ignore[attr-defined]
            assert place.state.numbers == {"steps": step + 1}
            run_step(engine, values)
        engine.close()

    over_threads(2, body)
    for rank in range(2):
        spans = spans_of(tmp_path / f"trace.{rank}")
        encodes = [s for s in spans if s["name"] == "ENCODE"]
        order = ["w5", "w0", "w1", "w2", "w3", "w4"]
        assert [s["args"] for s in encodes] == [
            {"tensor": name, "step": step, "bucket": int(name > "w2")} for step in range(2) for name in order
        ]
        assert all(s["row"] != "sender" for s in encodes)
        lane = [s for s in spans if s["row"] == "sender"]
        bucket = ["WIRE", "GATHER", "DECODE", "DECODE", "DECODE", "ALLREDUCE"]
        assert [s["name"] for s in lane] == ["NEGOTIATE_ALLREDUCE", *bucket * 4]
        assert [s["args"]["tensor"] for s in lane if s["name"] == "DECODE"][:6] == ["w0", "w1", "w2", "w5", "w3", "w4"]
        waits = [s for s in spans if s["name"] == "QUEUE"]
        assert [s["row"] for s in waits] == ["bucket 0", "bucket 1"] * 2


# ---- plans, defaults, refusals --------------------------------------------------------------------------------------


@looped(
    "codec, ahead, algorithm, expected",
    [
        ("toysparse", None, None, (True, "gather")),
        ("toysparse", False, None, (False, "two_shot")),
        ("toysparse", None, "one_shot", (False, "one_shot")),
        ("toysparse", None, "gather_v", (True, "gather_v")),
        ("int8", None, None, (False, "two_shot")),
        ("int8", True, None, (True, "gather")),
        ("int8", None, "gather", (True, "gather")),
        ("raw", None, None, (False, "dense")),
    ],
)
@on_threads(3)
def test_who_goes_ahead(
    transport: Transport, codec: str, ahead: bool | None, algorithm: str | None, expected: tuple[bool, str]
) -> None:
    engine = make_engine(transport, codec=codecs.get(codec), ahead=ahead, algorithm=algorithm)
    run_step(engine, gradients(transport.rank, 0))
    assert engine.plan is not None
    assert {(bucket.ahead, bucket.algorithm) for bucket in engine.plan.buckets} == {expected}
    engine.close()


@on_threads(1)
def test_combinations_that_cannot_be_are_refused(transport: Transport) -> None:
    for options, message in [
        ({"ahead": True, "algorithm": "two_shot"}, "'two_shot' sums a flat tensor.*use ahead=False.*gather"),
        ({"ahead": False, "algorithm": "gather"}, "'gather' carries tensors.*use ahead=True.*two_shot"),
        ({"algorithm": "gather_vv"}, "unknown collective 'gather_vv'"),
        ({"ahead": True, "algorithm": "gather_vv"}, "did you mean 'gather_v'"),
        ({"plan": with_algorithm(plan_of("012345", world=1), "two_shot")}, "use ahead=False"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_engine(transport, **options)  # type: ignore[arg-type]
    engine = make_engine(transport, [TensorInfo("d", 3, "float64", 8)], codec=codecs.get("toysparse"))
    engine.submit("d", torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ConfigError, match="cannot encode torch.float64"):
        engine.synchronize()


def with_algorithm(plan: FusionPlan, algorithm: str) -> FusionPlan:
    return replace(plan, buckets=tuple(replace(bucket, algorithm=algorithm) for bucket in plan.buckets))


@on_threads(2)
def test_ranks_must_agree_on_ahead_and_step(transport: Transport) -> None:
    engine = make_engine(transport.duplicate(), ahead=transport.rank == 1, algorithm=None)
    with pytest.raises(PlanMismatch, match=r"\[1\] differ from rank 0"):
        run_step(engine, gradients(transport.rank, 0))
    engine = make_engine(transport.duplicate(), codec=codecs.get("toysparse"))
    engine.step = 5 * transport.rank
    with pytest.raises(PlanMismatch, match=r"\[1\] differ from rank 0"):
        run_step(engine, gradients(transport.rank, 0))


# ---- plans and codecs that change -----------------------------------------------------------------------------------

SCHEDULE = {0: ("012", "345"), 3: ("5", "4", "0123"), 5: ("012345",), 8: ("54", "3210")}


@looped("overlap_forward", [False, True])
@on_threads(2)
def test_switching_plans_changes_no_bit(transport: Transport, overlap_forward: bool) -> None:
    """Results ahead of fusion do not depend on the buckets, so neither on when they change."""
    fixed = make_engine(transport.duplicate(), plan=plan_of("012345", world=2))
    plan = plan_of(*SCHEDULE[0], world=2)
    moving = make_engine(transport.duplicate(), plan=plan, overlap_forward=overlap_forward, lanes=2)
    for step in range(10):
        if step in SCHEDULE and step:
            moving.switch(plan_of(*SCHEDULE[step], world=2))
        expected = run_step(fixed, gradients(transport.rank, step))
        results = steps_of(moving, gradients(transport.rank, step))
        assert all(torch.equal(results[name], expected[name]) for name in expected), step
    assert moving.plan == plan_of(*SCHEDULE[8], world=2)
    states = [engine.memory.state_dict() for engine in (fixed, moving)]
    for name, residual in states[0]["residuals"].items():
        assert torch.equal(residual, states[1]["residuals"][name])
    assert states[0]["numbers"] == states[1]["numbers"]
    fixed.close()
    moving.close()


def steps_of(engine: Engine, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take a step of an engine of either kind."""
    for name, value in values.items():
        engine.submit(name, value)
    engine.end_step()
    results: dict[str, Tensor] = {}
    for index in sorted(engine.untaken):
        results |= engine.take(index)
    return results


@on_threads(3)
def test_nothing_is_lost_between_ahead_and_behind(transport: Transport) -> None:
    """What was given is what came out and what is still kept, whatever the plans."""
    engine = make_engine(transport.duplicate(), plan=plan_of("012", "345"))
    balance = {tensor.name: torch.zeros(tensor.numel, dtype=torch.float64) for tensor in MODEL}
    for step in range(6):
        if step:
            engine.switch(plan_of("01", "2345", ahead=step % 2 == 0))
        for name, value in run_step(engine, gradients(transport.rank, step)).items():
            balance[name] += value - exact_sum(3, step)[name]
    engine.close()
    for name, residual in sorted(engine.memory.state_dict()["residuals"].items()):
        transport.all_reduce(residual)
        assert (balance[name] + residual).abs().max() < 1e-5


@on_threads(2)
def test_a_switch_is_checked_here_and_over_ranks(transport: Transport) -> None:
    engine = make_engine(transport, plan=plan_of("012345", world=2))
    with pytest.raises(ConfigError, match="the first is 'w5'"):
        engine.switch(plan_of("01234", world=2))
    run_step(engine, gradients(transport.rank, 0))
    engine.switch(plan_of("012", "345", world=2) if transport.rank else plan_of("345", "012", world=2))
    with pytest.raises(PlanMismatch, match=r"\[1\] differ from rank 0"):
        run_step(engine, gradients(transport.rank, 1))


@on_threads(2)
def test_a_plan_can_be_switched_while_results_of_the_last_step_are_untaken(transport: Transport) -> None:
    engine = make_engine(transport, plan=plan_of("012", "345", world=2), overlap_forward=True)
    for name, value in gradients(transport.rank, 0).items():
        engine.submit(name, value)
    engine.end_step()
    assert engine.bucket_of("w5") == 1
    first = engine.take(0)
    kept = {name: value.clone() for name, value in first.items()}
    engine.switch(plan_of("05", "1234", world=2))
    values = gradients(transport.rank, 1)
    engine.submit("w0", values["w0"])
    assert engine.awaits("w5") and engine.bucket_of("w5") == 1 and engine.untaken == {1}
    late = engine.take(1)
    assert set(late) == {"w3", "w4", "w5"} and all(torch.equal(first[name], kept[name]) for name in first)
    for name in ("w1", "w2", "w3", "w4", "w5"):
        engine.submit(name, values[name])
    engine.end_step()
    assert engine.bucket_of("w5") == 0 and engine.bucket_of("w1") == 1 and engine.untaken == {0, 1}
    engine.close()


@looped("ahead", [False, True])
@on_threads(2)
def test_codecs_follow_their_schedule_and_checkpoints_resume_it(transport: Transport, ahead: bool) -> None:
    """Stopping after any step and going on in a new engine changes no bit."""
    steps, codec = 5, codecs.get("toysparse", warmup=3)

    def make(memory: Memory | None = None, step: int = 0) -> Engine:
        engine = make_engine(transport.duplicate(), codec=codec, ahead=ahead, memory=memory)
        engine.step = step
        return engine

    whole = make()
    expected = []
    for step in range(steps):
        expected.append(run_step(whole, gradients(transport.rank, step)))
        assert all(buffer.codec == codec.bare.at_step(step) for buffer in whole._plans.buffers)
    own = whole.lanes.all[0].transport
    assert codec.at_step(2).density * 2 == codec.at_step(3).density  # type: ignore[attr-defined]
    assert own.bytes_sent > 0
    whole.close()
    for stop in range(1, steps):
        first = make()
        for step in range(stop):
            run_step(first, gradients(transport.rank, step))
        saved = first.memory.state_dict()
        first.close()
        memory = Memory()
        memory.load_state_dict(saved)
        second = make(memory, stop)
        for step in range(stop, steps):
            results = run_step(second, gradients(transport.rank, step))
            assert all(torch.equal(results[name], expected[step][name]) for name in results), (stop, step)
        state = second.memory.state_dict()
        if ahead:
            assert state["numbers"] == {tensor.name: {"steps": steps} for tensor in MODEL}
            assert set(state["tensors"]["w0"]) == {"total"}
        second.close()


@on_threads(2)
def test_without_feedback_nothing_is_kept_but_what_codecs_remember(transport: Transport) -> None:
    engine = make_engine(transport, codec=codecs.get("toysparse"), error_feedback=False)
    for step in range(2):
        results = run_step(engine, gradients(transport.rank, step))
        codec = codecs.get("toysparse")
        for name, value in results.items():
            parts = [gradients(rank, step)[name] for rank in range(2)]
            sent = [codec.decompress(codec.compress(part), part.shape) for part in parts]
            assert torch.equal(value, sent[0] + sent[1])
    state = engine.memory.state_dict()
    assert not state["residuals"] and state["numbers"]["w0"] == {"steps": 2}
    engine.close()


@on_threads(2)
def test_an_overflow_reaches_every_rank_and_does_not_live_on(transport: Transport) -> None:
    engine = make_engine(transport, codec=codecs.get("toysparse"))
    for step in range(3):
        values = gradients(transport.rank, step)
        if step == 1 and transport.rank == 0:
            values["w3"][17] = float("nan")
        results = run_step(engine, values)
        assert results["w3"].isfinite().all() == (step != 1)
    engine.close()
    assert all(kept.isfinite().all() for kept in engine.memory.state_dict()["residuals"].values())
