"""Engines with two lanes whose buckets are under way at once, and ranks that are not alike: failures and switches."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionlayer import collectives
from fusionlayer.base.errors import PlanMismatch, TransportError
from fusionlayer.base.plan import FusionPlan
from fusionlayer.codecs import Codec
from fusionlayer.scheduler import Engine, order
from fusionlayer.scheduler.order import MEASURED, WARM_UP
from fusionlayer.transport import Transport
from tests.fake_device import FakeDevice, Moment
from tests.ranks import over_threads

from .engines import MODEL, collective_named, exact_sum, gradients, make_engine, run_step

WORLD, ODD = 3, 1  # ranks, and the one that is different
A_WHILE = 0.2  # seconds that correct code waits in vain for what must not happen


def plan_of(*names: str, codec: str = "raw", algorithm: str, ranks: int = WORLD) -> FusionPlan:
    """Return a plan with a bucket for each of ``names``, which are the digits of tensors of ``MODEL``."""
    runs = [[MODEL[int(digit)] for digit in digits] for digits in names]
    return FusionPlan.build(runs, ranks, codec, {}, algorithm, 128)


def hold(transport: Transport, until: threading.Event, called: Callable[[], None] = lambda: None) -> None:
    """Let the next message of ``transport`` leave when ``until`` is set, or after a while."""
    exchange = transport.exchange

    def late(*args: Any) -> None:
        transport.exchange = exchange  # type: ignore[method-assign]
        until.wait(A_WHILE)
        called()
        exchange(*args)

    transport.exchange = late  # type: ignore[method-assign]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return when something is so that no event tells."""
    deadline = time.monotonic() + 180
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- agreement before payload ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("switched", [False, True])
def test_no_lane_sends_before_the_ranks_agree(switched: bool, differ: bool) -> None:
    """The agreement takes long on the first lane, while the second one has a bucket that is complete."""
    began = [threading.Event() for _ in range(WORLD)]
    agreed = [threading.Event() for _ in range(WORLD)]
    too_early: list[int] = []
    plans = [plan_of("012", "345", algorithm="spy"), plan_of("01", "2345", algorithm="spy")]

    def spy(x: Tensor, codec: Codec, transport: Transport, **_: object) -> None:
        began[transport.rank].set()
        if not agreed[transport.rank].is_set():
            too_early.append(transport.rank)
        transport.all_reduce(x)

    def body(transport: Transport) -> None:
        rank = transport.rank
        odd = differ and rank == ODD
        start = plan_of("012345", algorithm="dense") if switched else plans[odd]
        engine = make_engine(transport, plan=start, lanes=2)
        if switched:
            run_step(engine, gradients(rank, 0))
            engine.switch(plans[odd])
        hold(transport, began[rank], agreed[rank].set)
        values = gradients(rank, 1)
        if differ:
            with pytest.raises(PlanMismatch):
                run_step(engine, values)
            assert not began[rank].is_set()
        else:
            run_step(engine, values)
            assert all(torch.allclose(values[n].double(), exact_sum(WORLD, 1)[n], atol=1e-6) for n in values)
        engine.close()

    with collective_named("spy", spy):
        over_threads(WORLD, body)
    assert not too_early, "payload was sent before the ranks agreed"


# ---- one lane fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_backward", [False, True])
def test_one_lane_fails_while_the_other_is_under_way(in_backward: bool) -> None:
    """Nobody waits for ever, nothing later is sent; what was under way comes to its end if backward has done so."""
    plan = plan_of("0", "1", "2", "3", algorithm="odd")
    may_fail, has_failed, under_way = threading.Event(), threading.Event(), threading.Barrier(WORLD + 1)
    ran: list[list[int]] = [[] for _ in range(WORLD)]
    numels = [bucket.numel for bucket in plan.buckets]

    def odd(x: Tensor, codec: Codec, transport: Transport, **_: object) -> None:
        bucket = numels.index(x.numel())
        ran[transport.rank].append(bucket)
        if bucket == 0:
            under_way.wait(180)
            assert has_failed.wait(180)
        if bucket == 1 and transport.rank == ODD:
            under_way.wait(180)
            assert may_fail.wait(180)
            raise ValueError("boom")
        transport.all_reduce(x)

    def body(transport: Transport) -> None:
        engine = make_engine(transport, MODEL[:4], plan=plan, lanes=2)
        values = gradients(transport.rank, 0, MODEL[:4])
        expected = ValueError if transport.rank == ODD else TransportError
        with pytest.raises(expected) as raised:
            for name in values:
                if transport.rank == ODD and in_backward and name == "w2":
                    may_fail.set()
                    wait_until(lambda: engine.lanes.all[1].worker.error is not None)
                engine.submit(name, values[name])
            if transport.rank == ODD and not in_backward:
                may_fail.set()
                wait_until(lambda: engine.lanes.all[1].worker.error is not None)
                has_failed.set()
            engine.synchronize()
        has_failed.set()
        assert ("boom" in str(raised.value)) == (transport.rank == ODD)
        if isinstance(raised.value, TransportError):
            assert ODD in raised.value.ranks and raised.value.bucket in ((0, 1, 2) if in_backward else (1, 2))
        if not in_backward:
            assert torch.allclose(values["w0"].double(), exact_sum(WORLD, 0)["w0"], atol=1e-6)
        assert torch.equal(values["w1"], gradients(transport.rank, 0)["w1"])
        with pytest.raises(expected) as again:
            engine.submit("w0", values["w0"])
        assert {str(again.value), str(engine.failure)} == {str(raised.value)}
        assert type(again.value) is type(engine.failure) is type(raised.value)

    with collective_named("odd", odd):
        over_threads(WORLD, body)
    assert all(3 not in buckets for buckets in ran), "the lane that failed went on"


def test_what_failed_first_is_what_is_raised() -> None:
    """Bucket 1 fails, then bucket 0 on the other lane, whose result is the first that is waited for."""
    plan = plan_of("012", "345", algorithm="broken", ranks=1)
    engines: list[Engine] = []

    def broken(x: Tensor, codec: Codec, transport: Transport, **_: object) -> None:
        if x.numel() == plan.buckets[1].numel:
            raise ValueError("the cause")
        wait_until(lambda: engines[0].lanes.all[1].worker.error is not None)
        raise ValueError("a consequence")

    def body(transport: Transport) -> None:
        engine = make_engine(transport, plan=plan, lanes=2)
        engines.append(engine)
        values = gradients(0, 0)
        for name in values:
            engine.submit(name, values[name])
        with pytest.raises(ValueError, match="the cause") as raised:
            engine.synchronize()
        assert str(engine.failure) == str(raised.value)

    with collective_named("broken", broken):
        over_threads(1, body)


# ---- another plan while a bucket is under way -----------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_a_plan_is_switched_while_a_bucket_is_under_way(codec: str) -> None:
    """Sums and error feedback are those of an engine that has one bucket under way at a time and waits for each."""
    steps = 4
    algorithm = "two_shot"

    def plans(algorithm: str) -> list[FusionPlan]:
        cuts = [("012", "345"), ("01234", "5")]
        return [
            FusionPlan.build(
                [[MODEL[int(d)] for d in digits] for digits in cut], WORLD, codec, {}, algorithm, 128, False
            )
            for cut in cuts
        ]

    first = plans(algorithm)[0].buckets[0].numel
    may_end = [threading.Event() for _ in range(WORLD)]
    calls = [0] * WORLD

    def held_up(x: Tensor, codec: Codec, transport: Transport, **options: Any) -> None:
        if x.numel() == first:
            calls[transport.rank] += 1
            if calls[transport.rank] == 2:
                may_end[transport.rank].wait(A_WHILE * (1 + transport.rank))
        collectives.get(algorithm)(x, codec, transport, **options)

    def run(engine: Engine, rank: int, change: list[FusionPlan], waits: bool) -> list[dict[str, Tensor]]:
        results: list[dict[str, Tensor]] = [{} for _ in range(steps)]
        for step in range(steps):
            values = gradients(rank, step)
            begins_early = step == 2 and not waits
            if begins_early:
                for index in sorted(engine.untaken):
                    if engine.plan is not None and "w3" in engine.plan.buckets[index].names:
                        results[1].update({n: v.clone() for n, v in engine.take(index).items()})
                assert engine.untaken, "no bucket is under way any more"
                engine.submit("w3", values["w3"])
                may_end[rank].set()
                results[1].update({n: v.clone() for i in sorted(engine.untaken) for n, v in engine.take(i).items()})
            for name in values:
                if not (begins_early and name == "w3"):
                    engine.submit(name, values[name])
            engine.end_step()
            if step == 1:
                engine.switch(change[1])
                if not waits:
                    continue
            for index in sorted(engine.untaken):
                results[step].update({name: value.clone() for name, value in engine.take(index).items()})
        return results

    def body(transport: Transport) -> None:
        found = []
        for waits in (True, False):
            change = plans(algorithm if waits else "held_up")
            engine = make_engine(
                transport.duplicate(),
                plan=change[0],
                lanes=1 if waits else 2,
                overlap_forward=True,
                error_feedback=True,
            )
            results = run(engine, transport.rank, change, waits)
            engine.close()
            found.append((results, engine.memory.state_dict()["residuals"]))
        (expected, kept), (results, residuals) = found
        for step in range(steps):
            assert expected[step].keys() == results[step].keys() == {tensor.name for tensor in MODEL}
            for name in expected[step]:
                assert torch.equal(results[step][name], expected[step][name]), (step, name)
        assert any(value.any() for value in kept.values())
        assert all(torch.equal(residuals[name], kept[name]) for name in kept)

    with collective_named("held_up", held_up):
        over_threads(WORLD, body)
    assert calls == [2] * WORLD


# ---- order ----------------------------------------------------------------------------------------------------------


def test_the_agreed_order_holds_on_all_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets go to the lanes in turn, in the order that was agreed on, however far apart the ranks are."""
    monkeypatch.setattr(order, "send_order", lambda ready, cost: list(reversed(range(len(ready)))))
    left: list[dict[str, list[int]]] = [{} for _ in range(WORLD)]
    numels = [tensor.numel for tensor in MODEL]

    def spy(x: Tensor, codec: Codec, transport: Transport, **_: object) -> None:
        left[transport.rank].setdefault(threading.current_thread().name, []).append(numels.index(x.numel()))
        transport.all_reduce(x)

    def body(transport: Transport) -> None:
        plan = FusionPlan.build([[tensor] for tensor in MODEL], WORLD, "raw", {}, "spy", 1)
        engine = make_engine(transport, plan=plan, lanes=2, overlap_forward=True, name=f"lane of {transport.rank}")
        for step in range(WARM_UP + MEASURED + 2):
            left[transport.rank].clear()
            values = gradients(transport.rank, step)
            names = list(values)
            for name in names[transport.rank :] + names[: transport.rank]:
                engine.submit(name, values[name])
            engine.end_step()
            for index in sorted(engine.untaken):
                for name, value in engine.take(index).items():
                    assert torch.allclose(value.double(), exact_sum(WORLD, step)[name], atol=1e-6)
        engine.close()

    with collective_named("spy", spy):
        over_threads(WORLD, body)
    assert all(sorted(lanes.values()) == [[4, 2, 0], [5, 3, 1]] for lanes in left)


def test_two_lanes_halve_what_a_bucket_costs() -> None:
    """A bucket that takes as long as four others arrive holds up the network for half as long with two lanes."""

    def agreed(transport: Transport, lanes: int) -> list[int]:
        device = FakeDevice()
        sequence = order.SendOrder(5, lanes, device)
        for _ in range(WARM_UP + MEASURED):
            for index in range(5):
                device.work(1.0 + transport.rank)  # ranks of different pace: on average 2 s apart
                sequence.note_complete(index)
                sequence.note_sent(index, Moment(0.0), Moment(8.0))
            sequence.end_step()
        assert device.now == 0, "the host has not waited so far"
        sequence.agree(transport)
        return sequence.sequence

    def body(transport: Transport) -> list[list[int]]:
        return [agreed(transport, lanes) for lanes in (1, 2, 4)]

    assert over_threads(3, body) == [[[0, 4, 3, 2, 1], [0, 2, 4, 3, 1], [0, 1, 2, 3, 4]]] * 3
