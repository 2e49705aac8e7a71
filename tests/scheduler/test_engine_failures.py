"""What goes wrong is told on every rank, and nothing hangs."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError, FusionLayerError, PlanMismatch, TransportError, UsageError, WireError
from fusionlayer.base.plan import FusionPlan
from fusionlayer.codecs import Codec
from fusionlayer.scheduler import Scaling, planners
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads, over_threads

from .engines import MODEL, collective_named, exact_sum, gradients, make_engine, run_step

WORLD, ODD = 3, 1  # ranks, and the one that is different
PLAN = FusionPlan.build([MODEL[:3], MODEL[3:]], WORLD, "int", {}, "two_shot", 128)


# ---- calls in an order that has no meaning --------------------------------------------------------------------------


@on_threads(WORLD)
def test_a_gradient_twice_is_refused_and_the_step_goes_on(transport: Transport) -> None:
    engine = make_engine(transport, codec=codecs.get("raw"))
    for step in range(2):
        values = gradients(transport.rank, step)
        engine.submit("w2", values["w2"])
        with pytest.raises(UsageError, match=f"'w2' was submitted twice in step {step}"):
            engine.submit("w2", values["w2"])
        assert engine.pending == {"w2"}
        for name in values.keys() - {"w2"}:
            engine.submit(name, values[name])
        engine.synchronize()
        assert all(torch.allclose(values[n].double(), exact_sum(WORLD, step)[n], atol=1e-6) for n in values)
    engine.close()


@on_threads(WORLD)
def test_a_missing_gradient_is_named_and_can_still_come(transport: Transport) -> None:
    engine = make_engine(transport, codec=codecs.get("raw"))
    for step in range(2):
        values = gradients(transport.rank, step)
        for name in values.keys() - {"w1", "w4"}:
            engine.submit(name, values[name])
        with pytest.raises(UsageError, match=f"2 of .* have not come in step {step}, the first is that of 'w1'"):
            engine.synchronize()
        for name in ("w1", "w4"):
            engine.submit(name, values[name])
        engine.synchronize()
        assert all(torch.allclose(values[n].double(), exact_sum(WORLD, step)[n], atol=1e-6) for n in values)
    engine.close()


@pytest.mark.parametrize("plan", [None, PLAN], ids=["learned plan", "given plan"])
@on_threads(WORLD)
def test_a_gradient_that_is_unknown_or_of_another_size_is_refused(
    transport: Transport, plan: FusionPlan | None
) -> None:
    engine = make_engine(transport, plan=plan)
    with pytest.raises(UsageError, match="gradient 'head' is not one of this engine's 6 tensors"):
        engine.submit("head", torch.ones(3))
    with pytest.raises(UsageError, match="gradient 'w2' has 3 elements, expected "):
        engine.submit("w2", torch.ones(3))
    assert not engine.pending
    run_step(engine, gradients(transport.rank, 0))
    engine.close()


@on_threads(1)
def test_unknown_names_are_refused_when_the_engine_is_made(transport: Transport) -> None:
    with pytest.raises(ConfigError, match="unknown collective 'rign'"):
        make_engine(transport, algorithm="rign")


@on_threads(1)
def test_a_closed_engine_takes_no_more(transport: Transport) -> None:
    engine = make_engine(transport)
    run_step(engine, gradients(0, 0))
    engine.close()
    engine.close()
    with pytest.raises(FusionLayerError, match="closed"):
        run_step(engine, gradients(0, 1))


# ---- ranks that disagree --------------------------------------------------------------------------------------------

DIFFERENCES: dict[str, dict[str, Any]] = {
    "a shape": {"tensors": [replace(MODEL[0], numel=301), *MODEL[1:]]},
    "a type": {"tensors": [replace(MODEL[0], dtype="bfloat16", itemsize=2), *MODEL[1:]]},
    "a name": {"tensors": [replace(MODEL[0], name="v0"), *MODEL[1:]]},
    "a group": {"tensors": [replace(MODEL[0], group=0), *MODEL[1:]]},
    "one tensor fewer": {"tensors": MODEL[1:]},
    "codec": {"codec": codecs.get("bf16")},
    "codec options": {"codec": codecs.get("int8", group_size=64)},
    "planner": {"planner": planners.get("wfbp")},
    "planner options": {"planner": planners.get("horovod", threshold=4097)},
    "algorithm": {"algorithm": "one_shot"},
    "scaling": {"scaling": Scaling(after=0.5)},
    "error feedback": {"error_feedback": False},
    "a plan of its own": {"plan": PLAN},
    "shares": {"shares": (1, 1, 0)},
}
TOLD = {
    "a shape": "tensors that differ: 'w0' of several sizes",
    "a type": "tensors that differ: 'w0' of several sizes",
    "a name": r"tensors that differ: 'v0' only on ranks \[1\], 'w0' only on ranks \[0, 2\]",
    "one tensor fewer": r"tensors that differ: 'w0' only on ranks \[0, 2\]",
}
PLAN_DIFFERENCES = {
    "no plan": {"plan": None},
    "order of buckets": {"plan": replace(PLAN, buckets=PLAN.buckets[::-1])},
    "codec in the plan": {"plan": replace(PLAN, buckets=(replace(PLAN.buckets[0], codec="bf16"), PLAN.buckets[1]))},
    "shares in the plan": {
        "plan": replace(PLAN, buckets=(replace(PLAN.buckets[0], shares=(1, 1, 0)), PLAN.buckets[1]))
    },
    "options in the plan": {
        "plan": replace(PLAN, buckets=(replace(PLAN.buckets[0], options={"bits": 4}), PLAN.buckets[1]))
    },
}


def disagree(common: dict[str, Any], difference: dict[str, Any], told: str = "") -> None:
    def body(transport: Transport) -> None:
        options = {**common, **difference} if transport.rank == ODD else common
        engine = make_engine(transport, **options)
        values = gradients(transport.rank, 0, options.get("tensors", MODEL))
        kept = {name: value.clone() for name, value in values.items()}
        text = rf"this is rank {transport.rank}\): \[1\] differ from rank 0.*{told}"
        with pytest.raises(PlanMismatch, match=text) as error:
            run_step(engine, values)
        assert error.value.ranks == (ODD,)
        digests_and_names = 320 * (WORLD - 1)
        assert transport.bytes_sent <= digests_and_names, "payload was sent before the ranks agreed"
        assert all(torch.equal(values[name], kept[name]) for name in values)
        with pytest.raises(PlanMismatch):
            engine.submit("w1", values["w1"])

    over_threads(WORLD, body)


@looped("name", DIFFERENCES)
def test_different_engines_never_start(name: str) -> None:
    disagree({}, DIFFERENCES[name], TOLD.get(name, ""))


@looped("difference", PLAN_DIFFERENCES.values(), ids=PLAN_DIFFERENCES)
def test_different_plans_never_start(difference: dict[str, Any]) -> None:
    disagree({"plan": PLAN}, difference)


# ---- failures of one rank -------------------------------------------------------------------------------------------


@looped("error", [ValueError, WireError, TransportError])
@looped("failing_step", [0, 1])
def test_an_error_in_one_collective_ends_the_step_everywhere(error: type[Exception], failing_step: int) -> None:
    calls = [0] * WORLD
    buckets = 3
    everybody_knows = threading.Barrier(WORLD)

    def failing(x: Tensor, codec: Codec, transport: Transport, **options: Any) -> None:
        calls[transport.rank] += 1
        if transport.rank == ODD and calls[ODD] == failing_step * buckets + 2:
            raise error("boom")
        collectives.get("two_shot")(x, codec, transport, **options)

    def body(transport: Transport) -> None:
        engine = make_engine(transport, algorithm="failing")
        for step in range(failing_step):
            run_step(engine, gradients(transport.rank, step))
            assert engine.plan is not None and len(engine.plan.buckets) == buckets
        expected = error if transport.rank == ODD else TransportError
        with pytest.raises(expected) as raised:
            run_step(engine, gradients(transport.rank, failing_step))
        everybody_knows.wait(180)
        assert ("boom" in str(raised.value)) == (transport.rank == ODD)
        if isinstance(raised.value, FusionLayerError):
            assert engine.plan is not None
            names = engine.plan.buckets[1].names
            assert str(raised.value).startswith(f"step {failing_step}, bucket 1 ({', '.join(names[:3])}")
        if isinstance(raised.value, TransportError) and transport.rank != ODD:
            assert (raised.value.bucket, raised.value.tensors) == (1, names)
            assert ODD in raised.value.ranks and "left" in str(raised.value), "peers were not told"
        with pytest.raises(expected) as again:
            engine.submit("w0", torch.ones(300))
        assert type(again.value) is type(raised.value) and vars(again.value) == vars(raised.value)
        assert str(again.value) == str(raised.value)

    with collective_named("failing", failing):
        over_threads(WORLD, body)
    assert calls[ODD] == failing_step * buckets + 2, "a bucket was sent after the failure"


@on_threads(WORLD)
def test_a_rank_that_leaves_is_named(transport: Transport) -> None:
    engine = make_engine(transport)
    run_step(engine, gradients(transport.rank, 0))
    if transport.rank == ODD:
        engine.close()
        return
    with pytest.raises(TransportError, match="rank 1 left") as raised:
        run_step(engine, gradients(transport.rank, 1))
    assert raised.value.ranks == (ODD,)
    assert raised.value.bucket == 0


def test_a_rank_that_does_not_come_is_named() -> None:
    released = threading.Event()

    def body(transport: Transport) -> None:
        engine = make_engine(transport)
        if transport.rank == ODD:
            assert released.wait(180)
            engine.close()
            return
        try:
            with pytest.raises(TransportError, match="rank 1 did not come within 0.3 s"):
                run_step(engine, gradients(transport.rank, 0))
        finally:
            released.set()

    over_threads(WORLD - 1, body, timeout=0.3)


def test_a_damaged_message_is_an_error_not_a_gradient() -> None:
    def damaging(x: Tensor, codec: Codec, transport: Transport, **_: Any) -> None:
        payload = codec.checked.compress(x)
        payload[-1] ^= 1
        codec.checked.decode(payload, x)

    def body(transport: Transport) -> None:
        engine = make_engine(transport, algorithm="damaging")
        values = gradients(transport.rank, 0)
        kept = {name: value.clone() for name, value in values.items()}
        with pytest.raises(WireError, match="step 0, bucket 0 .*damaged on its way"):
            run_step(engine, values)
        assert all(torch.equal(values[name], kept[name]) for name in values)

    with collective_named("damaging", damaging):
        over_threads(1, body)
