import math
import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.plan import FusionPlan, TensorInfo
from fusionlayer.codecs import Codec, HomomorphicCodec
from fusionlayer.codecs.quantized.onebit import OneBit
from fusionlayer.observe.timeline import Timeline
from fusionlayer.scheduler import Memory, Scaling, planners
from fusionlayer.transport import Transport
from tests.codecs.conformance import coarsest
from tests.codecs.variants import defaults
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.spans import spans_of
from tests.tiers import tiered

from .engines import MODEL, collective_named, exact_sum, gradients, make_engine, of_layouts, run_step, views

PATIENCE = 180


def plan_of(*runs: str, codec: str = "int", algorithm: str = "two_shot", world: int = 3, **options: Any) -> FusionPlan:
    """Return a plan for ``MODEL`` with a bucket for each string of digits."""
    model = {tensor.name: tensor for tensor in MODEL}
    return FusionPlan.build(
        [[model[f"w{digit}"] for digit in run] for run in runs], world, codec, options, algorithm, 128
    )


# ---- results --------------------------------------------------------------------------------------------------------


@looped(
    "codec, planner",
    tiered(
        product(defaults(), [name for name in planners.names() if not planners.get(name).needs_costs]),
        lambda codec, planner: planner == "tapered" or codec.name == "int",
    ),
    ids=str,
)
def test_sums_are_right_whatever_the_order_of_arrival(codec: Codec, planner: str) -> None:
    world, steps = 3, 3

    def body(transport: Transport) -> list[dict[str, Tensor]]:
        engine = make_engine(transport, codec=codec, planner=planners.get(planner), error_feedback=not codec.lossless)
        results = []
        for step in range(steps):
            results.append(run_step(engine, gradients(transport.rank, step), shift=transport.rank + step))
        assert engine.step == steps and not engine.pending
        engine.close()
        kept.append(engine.memory.state_dict()["residuals"])
        return results

    kept: list[dict[str, Tensor]] = []
    every = over_threads(world, body)
    for tensor in MODEL:
        balance = torch.zeros(tensor.numel, dtype=torch.float64)
        for step in range(steps):
            exact = exact_sum(world, step)[tensor.name]
            results = [ranks[step][tensor.name] for ranks in every]
            assert all(torch.equal(result, results[0]) for result in results)
            # Codes that add up have their bucket's scale, signs that of their group, which has other tensors too. What
            # is left out of a block in one step comes with a later one: no more than what ranks have given until then.
            scale = exact_norm(world, step) if isinstance(codec, HomomorphicCodec | OneBit) else exact.norm()
            if codec.name == "omnireduce":
                scale = sum(gradients(r, s)[tensor.name].norm() for r in range(world) for s in range(step + 1))
            assert (results[0] - exact).norm() <= (2 if coarsest(codec) == 1 else 0.5) * scale + 1e-3
            balance += results[0] - exact
        for memory in kept:
            balance += memory.get(tensor.name, torch.zeros(tensor.numel))
        assert balance.abs().max() < 1e-5, "something was lost or counted twice"


def exact_norm(world: int, step: int) -> float:
    """Return the norm of all sums of a step together."""
    return math.sqrt(sum(float(total.square().sum()) for total in exact_sum(world, step).values()))


@looped("world", [1, 2])
def test_all_element_types_and_layouts(world: int) -> None:
    """Gradients of three types, permuted, sliced, scalar and empty; a bucket never mixes types."""
    tensors = of_layouts()

    def body(transport: Transport) -> None:
        engine = make_engine(transport, tensors, codec=codecs.get("raw"))
        for step in range(2):
            values = run_step(engine, views(transport.rank, step, tensors))
            for tensor in tensors:
                parts = [views(rank, step, tensors)[tensor.name].float() for rank in range(world)]
                expected = torch.stack(parts).sum(0).to(getattr(torch, tensor.dtype))
                assert torch.equal(values[tensor.name], expected)
        assert engine.plan is not None
        assert all(len({name.split()[1] for name in bucket.names}) == 1 for bucket in engine.plan.buckets)
        engine.close()

    over_threads(world, body)


@looped("before, after", [(0.5, 3.0), (4.0, 0.125)])
@looped("tensors", [1, 2])
def test_scaling_comes_before_and_after_the_sum(before: float, after: float, tensors: int) -> None:
    seen = []

    def spy(x: Tensor, codec: Codec, transport: Transport, **_: object) -> None:
        seen.append(x.max().item())
        transport.all_reduce(x)

    def body(transport: Transport) -> set[float]:
        given = {tensor.name: torch.full((tensor.numel,), 8.0) for tensor in MODEL[:tensors]}
        how = {"codec": codecs.get("raw"), "algorithm": "spy", "scaling": Scaling(before=before, after=after)}
        engine = make_engine(transport, MODEL[:tensors], **how)
        results = run_step(engine, given)
        engine.close()
        return {*torch.cat([*results.values()]).tolist()}

    with collective_named("spy", spy):
        assert over_threads(2, body) == [{2 * 8 * before * after}] * 2
    assert seen == [8 * before] * 2


@looped("ahead_of_forward", [False, True])
def test_a_gradient_that_is_alone_in_its_bucket_stays_where_it_is(ahead_of_forward: bool) -> None:
    """Unless its memory is not like a fusion buffer's, or it is not to be replaced; results are the same."""
    tensors = [TensorInfo("w", 1024, "float32", 4)]
    dense = torch.arange(1024.0)
    layouts = [dense.clone(), dense.view(32, 32).t().contiguous().t(), dense.double(), dense.clone().view(2, 512)]
    seen = []

    def spy(x: Tensor, codec: Codec, transport: Transport, **_: object) -> None:
        seen.append(x.data_ptr())
        transport.all_reduce(x)

    def body(transport: Transport) -> None:
        engine = make_engine(
            transport,
            tensors,
            codec=codecs.get("raw"),
            algorithm="spy",
            scaling=Scaling(before=0.5, after=3.0),
            overlap_forward=ahead_of_forward,
        )
        for gradient in layouts:
            before = gradient.clone()
            engine.submit("w", gradient)
            engine.end_step()
            result = engine.take(0)["w"]
            assert torch.equal(result.reshape(-1).float(), 1.5 * dense)
            assert torch.equal(gradient, before if ahead_of_forward else result)
        engine.close()

    with collective_named("spy", spy):
        over_threads(1, body)
    stays = [place == gradient.data_ptr() for place, gradient in zip(seen, layouts, strict=True)]
    assert stays == ([False] * 4 if ahead_of_forward else [True, False, False, True])


def test_what_lies_between_slots_is_always_zero() -> None:
    plan = plan_of("012", "345", codec="raw", algorithm="spy", world=1)
    gaps = [(slice(300, 384), slice(389, 512)), (slice(1000, 1024), slice(1025, 1152), slice(1929, 2048))]
    checked = []

    def spy(x: Tensor, codec: Codec, transport: Transport, **_: object) -> None:
        index = [bucket.numel for bucket in plan.buckets].index(x.numel())
        assert not any(x[gap].any() for gap in gaps[index])
        checked.append(index)
        x.fill_(float("nan"))

    def body(transport: Transport) -> None:
        engine = make_engine(transport, plan=plan)
        for step in range(3):
            run_step(engine, gradients(0, step))
        engine.close()

    with collective_named("spy", spy):
        over_threads(1, body)
    assert checked == [0, 1] * 3


# ---- plans and order ------------------------------------------------------------------------------------------------


def test_the_plan_follows_rank_0s_order_of_arrival() -> None:
    def body(transport: Transport) -> FusionPlan | None:
        engine = make_engine(transport, planner=planners.get("wfbp"))
        run_step(engine, gradients(transport.rank, 0), shift=3 + transport.rank)
        engine.close()
        return engine.plan

    plans = over_threads(3, body)
    assert plans[0] is not None and all(plan == plans[0] for plan in plans)
    assert [bucket.names for bucket in plans[0].buckets] == [("w3",), ("w4",), ("w5",), ("w0",), ("w1",), ("w2",)]
    assert {bucket.algorithm for bucket in plans[0].buckets} == {collectives.choose(codecs.get("int4"), (3,))}


@looped("given", [True, False], ids=["given plan", "learned plan"])
def test_buckets_leave_during_backward_in_plan_order(given: bool) -> None:
    """Each is awaited before the next gradient is submitted: nothing is held back until synchronize."""
    world = 2
    plan = plan_of("54", "32", "10", codec="raw", algorithm="spy", world=world)
    sent = [threading.Semaphore(0) for _ in range(world)]
    order: list[list[int]] = [[] for _ in range(world)]

    def spy(x: Tensor, codec: Codec, transport: Transport, **_: object) -> None:
        transport.all_reduce(x)
        order[transport.rank].append(x.numel())
        sent[transport.rank].release()

    def body(transport: Transport) -> None:
        how: dict[str, Any] = {"plan": plan} if given else {"codec": codecs.get("raw"), "algorithm": "spy"}
        rank, engine = transport.rank, make_engine(transport, **how)
        if not given:
            run_step(engine, gradients(rank, 0))
            while sent[rank].acquire(blocking=False):
                pass
            order[rank].clear()
        assert engine.plan is not None
        values = gradients(rank, 1)
        for bucket in engine.plan.buckets:
            for name in bucket.names:
                engine.submit(name, values[name])
            assert sent[rank].acquire(timeout=PATIENCE), "the bucket did not leave"
        assert engine.pending == frozenset(values)
        engine.synchronize()
        numels = [bucket.numel for bucket in engine.plan.buckets]
        for name in reversed([name for bucket in engine.plan.buckets for name in bucket.names]):
            engine.submit(name, values[name])
        engine.synchronize()
        assert order[rank] == numels * 2, "buckets left in the order of arrival"
        engine.close()

    with collective_named("spy", spy):
        over_threads(world, body)


def test_a_given_plan_names_codec_and_collective() -> None:
    plan = plan_of("012345", codec="bf16", algorithm="one_shot", world=2)

    def body(transport: Transport) -> int:
        engine = make_engine(transport, plan=plan, codec=codecs.get("int4"))
        values = run_step(engine, gradients(transport.rank, 0))
        exact = exact_sum(2, 0)
        assert all(torch.allclose(values[name].double(), exact[name], atol=0.02) for name in values)
        engine.close()
        return transport.bytes_sent

    payload = codecs.get("bf16").bare.wire(plan.buckets[0].numel).capacity
    agreed = 2 * 64 + 1  # the number of lanes, the plan, and whether there is a timeline
    assert all(sent == payload + agreed for sent in over_threads(2, body))


@on_threads(1)
def test_a_plan_that_does_not_fit_is_refused_at_once(transport: Transport) -> None:
    with pytest.raises(ConfigError, match="plan is for 3 ranks, this job has 1"):
        make_engine(transport, plan=plan_of("012345"))
    with pytest.raises(ConfigError, match="the first is 'w5'"):
        make_engine(transport, plan=plan_of("01234", world=1))


def test_agreement_costs_little_and_only_once() -> None:
    def body(transport: Transport) -> list[int]:
        engine = make_engine(transport, codec=codecs.get("raw"), planner=planners.get("wfbp"))
        sent = []
        for step in range(3):
            before = transport.bytes_sent
            run_step(engine, gradients(transport.rank, step))
            sent.append(transport.bytes_sent - before)
        engine.close()
        return sent

    for first, second, third in over_threads(2, body):
        assert second == third == sum(4 * tensor.numel for tensor in MODEL)
        assert first - second <= 200


# ---- options --------------------------------------------------------------------------------------------------------


@looped(
    "name, options, wanted, used",
    [
        ("int8", {}, None, True),
        ("int8", {}, False, False),
        ("int8", {"rounding": "stochastic"}, None, False),
        ("int8", {"rounding": "stochastic"}, True, True),
        ("bf16", {}, None, False),
        ("bf16", {}, True, True),
        ("raw", {}, True, False),
    ],
)
def test_error_feedback_where_it_pays(name: str, options: dict[str, Any], wanted: bool | None, used: bool) -> None:
    def body(transport: Transport) -> set[str]:
        engine = make_engine(transport, codec=codecs.get(name, **options), error_feedback=wanted)
        run_step(engine, gradients(transport.rank, 0))
        engine.close()
        return set(engine.memory.state_dict()["residuals"])

    assert over_threads(2, body) == [{tensor.name for tensor in MODEL} if used else set()] * 2


@on_threads(2)
def test_memory_outlives_its_engine(transport: Transport) -> None:
    """A second engine with other buckets goes on where the first ended."""
    memory = Memory()
    balance = {tensor.name: torch.zeros(tensor.numel, dtype=torch.float64) for tensor in MODEL}
    for step, planner in enumerate(("wfbp", "horovod")):
        engine = make_engine(
            transport.duplicate(), codec=codecs.get("int4"), planner=planners.get(planner), memory=memory
        )
        for name, value in run_step(engine, gradients(transport.rank, step)).items():
            balance[name] += value - exact_sum(2, step)[name]
        engine.close()
    for name, residual in sorted(memory.state_dict()["residuals"].items()):
        assert residual.any() or residual.numel() == 1
        transport.all_reduce(residual)
        assert (balance[name] + residual).abs().max() < 1e-5


# ---- timeline -------------------------------------------------------------------------------------------------------


def test_the_timeline_shows_every_bucket_of_every_step(tmp_path: Path) -> None:
    plan = plan_of("012", "345", world=2)

    def body(transport: Transport) -> None:
        timeline = Timeline(str(tmp_path / "trace"), transport.rank)
        engine = make_engine(transport, plan=plan, timeline=timeline, name="sender")
        for step in range(2):
            run_step(engine, gradients(transport.rank, step))
        engine.close()

    over_threads(2, body)
    for rank in range(2):
        events = spans_of(tmp_path / f"trace.{rank}")
        spans = [event for event in events if event["row"] == "sender"]
        every = [{"step": s, "bucket": b} for s in range(2) for b in range(2)]
        waits = [event for event in events if event["name"] == "WAIT"]
        assert [wait["args"] for wait in waits] == every
        queued = [event for event in events if event["name"] == "QUEUE"]
        assert [event["args"] for event in queued] == every
        assert [event["row"] for event in queued] == ["bucket 0", "bucket 1"] * 2
        parts = ["ENCODE", "WIRE", "RECODE", "WIRE", "DECODE", "TWO_SHOT"]
        inner = ["MEMCPY_IN_FUSION_BUFFER", *parts, "MEMCPY_OUT_FUSION_BUFFER", "ALLREDUCE"]
        assert [span["name"] for span in spans] == ["NEGOTIATE_ALLREDUCE", *inner * 4]
        outer = [span for span in spans if span["name"] == "ALLREDUCE"]
        assert [span["args"] for span in outer] == [{"step": s, "bucket": b} for s in range(2) for b in range(2)]
        assert {span["pid"] for span in spans} == {rank}
        assert len({wait["row"] for wait in waits} - {"sender"}) == 1, "whoever waits is not who sends"
        first = {"step": 0, "bucket": 0}
        codec = [span["args"] for span in spans if span["name"] == "TWO_SHOT"][0]
        assert codec == {**first, "codec": str(codecs.get("int8")), "elements": plan.buckets[0].numel}
        assert [span["args"] for span in spans if span["name"] == "ENCODE"][0] == first
        sent = sum(span["args"]["bytes"] for span in spans if span["name"] == "WIRE" and span["args"]["bucket"] == 0)
        chunk = codecs.get("int8", header=False).wire(-(-plan.buckets[0].numel // 2 // 128) * 128).capacity
        assert sent == 2 * 2 * chunk, "two steps, two exchanges, half of the chunks each"
        for previous, span in zip(outer, outer[1:], strict=False):
            assert previous["ts"] + previous["dur"] <= span["ts"]


@on_threads(2)
def test_a_model_without_tensors(transport: Transport) -> None:
    engine = make_engine(transport, [])
    for _ in range(2):
        engine.synchronize()
    assert engine.plan == FusionPlan((), 2)
    engine.close()


@on_threads(2)
def test_a_planner_that_needs_costs_says_so(transport: Transport) -> None:
    engine = make_engine(transport, planner=planners.get("safusion"))
    with pytest.raises(ConfigError, match="`fusionlayer profile`"):
        run_step(engine, gradients(transport.rank, 0))
    engine.close()
