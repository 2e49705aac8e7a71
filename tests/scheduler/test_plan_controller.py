"""The seam through which an engine is given other plans while it runs."""

import time
from types import SimpleNamespace

import pytest
import torch

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError, PlanMismatch
from fusionlayer.base.plan import FusionPlan
from fusionlayer.process import clock
from fusionlayer.scheduler import Memory, PlanController, StepSeconds, planners
from fusionlayer.scheduler.plan_controller import _UNREAD, StepTimer
from fusionlayer.transport import Transport
from tests.fake_device import FakeDevice, streams_joined
from tests.loops import looped
from tests.ranks import on_threads, over_threads

from .engines import MODEL, collective_named, exact_sum, gradients, make_engine, run_step


def plan_of(name: str, world: int, codec: str = "raw") -> FusionPlan:
    """Return the plan that a planner makes of ``MODEL``."""
    algorithm = "dense" if codec == "raw" else "two_shot"
    return FusionPlan.build(planners.get(name)(MODEL), world, codec, {}, algorithm, 128)


class Script(PlanController):
    """Gives the plans that it is told, by step, and keeps what it is told."""

    def __init__(self, plans: dict[int, FusionPlan | None]) -> None:
        self.plans = plans
        self.noted: list[tuple[int, StepSeconds]] = []
        self.planned: list[int] = []
        self.asked = 0

    def note_step(self, plan: FusionPlan | None, step: int, seconds: StepSeconds | None) -> None:
        assert plan is not None and seconds is not None
        self.noted.append((step, seconds))
        self.planned.append(len(plan.buckets))

    def due(self, step: int) -> bool:
        return step in self.plans

    def next_plan(self, transport: Transport) -> FusionPlan | None:
        total = torch.ones(1)
        transport.all_reduce(total)
        assert total.item() == transport.size
        self.asked += 1
        return list(self.plans.values())[self.asked - 1]


class Late(Script):
    """Keeps what it is told of a device."""

    def note_step(self, plan: FusionPlan | None, step: int, seconds: StepSeconds | None) -> None:
        self.noted.append((step, seconds))  # type: ignore[arg-type]


@looped("overlap_forward", [False, True])
@looped("lanes", [1, 2])
def test_plans_change_between_steps_and_sums_do_not(lanes: int, overlap_forward: bool) -> None:
    world, steps = 3, 6

    def body(transport: Transport) -> Script:
        script = Script({1: plan_of("wfbp", world), 2: None, 3: plan_of("single", world)})
        engine = make_engine(
            transport, codec=codecs.get("raw"), plan_controller=script, lanes=lanes, overlap_forward=overlap_forward
        )
        for step in range(steps):
            values = gradients(transport.rank, step)
            if overlap_forward:
                for name, value in values.items():
                    engine.submit(name, value)
                engine.end_step()
                values = {name: x for index in sorted(engine.untaken) for name, x in engine.take(index).items()}
            else:
                run_step(engine, values, shift=transport.rank)
            for name, exact in exact_sum(world, step).items():
                torch.testing.assert_close(values[name], exact.float())
        engine.close()
        return script

    for script in over_threads(world, body):
        assert script.asked == 3
        assert [step for step, _ in script.noted] == list(range(steps - 1))
        assert script.planned[1:] == [script.planned[0], len(MODEL), len(MODEL), 1]
        assert set(script.noted[2][1].buckets) == set(range(len(MODEL)))


@looped("bits", [32, 8])
def test_error_feedback_goes_along(bits: int) -> None:
    """What was sent plus what is kept is what was given, over two changes of plan and of codec."""
    world, steps = 2, 6
    int4 = FusionPlan.build(planners.get("single")(MODEL), world, "int4", {}, "one_shot", 128)
    ahead = FusionPlan.build(planners.get("wfbp")(MODEL), world, "topk", {"density": 0.2}, "gather", 1, True)

    def body(transport: Transport) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        engine = make_engine(
            transport,
            codec=codecs.get("int8"),
            plan_controller=Script({1: ahead, 3: int4}),
            error_feedback=True,
            memory=Memory(bits),
        )
        results = []
        for step in range(steps):
            results.append(run_step(engine, gradients(transport.rank, step)))
            assert bits == 32 or held(engine.memory) <= sum(t.numel * 33 // 32 + 131 for t in MODEL) + len(MODEL) * 256
        engine.close()
        return results, kept_by(engine.memory)

    every = over_threads(world, body)
    for tensor in MODEL:
        balance = sum(kept[tensor.name].double() for _, kept in every)
        for step in range(steps):
            assert torch.equal(every[0][0][step][tensor.name], every[1][0][step][tensor.name])
            balance = balance + every[0][0][step][tensor.name] - exact_sum(world, step)[tensor.name]
        given = sum(exact_sum(world, step)[tensor.name].abs().max() for step in range(steps))
        assert balance.abs().max() < (1e-5 if bits == 32 else given / 100)


def kept_by(memory: Memory) -> dict[str, torch.Tensor]:
    """Return the residuals in f32, in whatever form they are kept."""
    plain = Memory()
    plain.load_state_dict(memory.state_dict())
    return plain.state_dict()["residuals"]


def held(memory: Memory) -> int:
    """Return the bytes of all memory that holds residuals between steps."""
    kept = [state.residual for state in memory._states.values()] + [part.codes for part in memory._packed.values()]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept if x is not None}
    return sum(storages.values())


@on_threads(2)
def test_other_plans_on_other_ranks_are_refused(transport: Transport) -> None:
    plan = plan_of("wfbp" if transport.rank else "single", 2)
    engine = make_engine(transport, codec=codecs.get("raw"), plan_controller=Script({0: plan}))
    run_step(engine, gradients(transport.rank, 0))
    with pytest.raises(PlanMismatch, match="fusion plan"):
        run_step(engine, gradients(transport.rank, 1))


@on_threads(2)
def test_a_plan_for_another_model_ends_the_engine(transport: Transport) -> None:
    plan = FusionPlan.build([MODEL[:2]], 2, "raw", {}, "dense", 128)
    engine = make_engine(transport, codec=codecs.get("raw"), plan_controller=Script({0: plan}))
    with pytest.raises(ConfigError, match="does not fit"):
        run_step(engine, gradients(transport.rank, 0))
    assert isinstance(engine.failure, ConfigError)


def test_seconds_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward, submitting and waiting are told apart; what a plan controller takes is no part of a step."""
    now = 0.0
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now))
    watch = StepTimer()
    now = 5.0
    assert not watch.begin(0) and watch.read() is None
    now = 5.5
    watch.note_gradient("a", 5.0)  # half a second of encoding
    now = 6.75
    watch.note_gradient("b", 6.5)  # after one second of backward
    watch.note_bucket(0, 0, 6.0, 6.125)
    watch.note_bucket(9, 1, 6.0, 7.0)  # of another step
    watch.note_waiting(6.5)
    watch.note_waiting(6.25)
    watch.leave_out(4.75)
    now = 10.0
    assert watch.begin(1)
    assert watch.read() == StepSeconds(
        wall=3.0, backward=1.0, submitting=0.75, waiting=0.75, ready={"a": 0.0, "b": 1.0}, buckets={0: 0.125}
    )
    assert watch.read() is None, "once"
    now = 11.0
    assert watch.begin(2)
    assert watch.read() == StepSeconds(1.0, 0.0, 0.0, 0.0, {}, {})


def test_a_device_is_read_late_and_never_waited_for() -> None:
    device = FakeDevice()
    watch = StepTimer(device)
    for step in range(4):  # the device takes 4 s for each
        device.now = 10.0 if step == 3 else 0.5 * step
        device.work(1.0)
        arrived = device.stamp()
        assert watch.begin(step) == (step > 0)
        seconds = watch.read()
        if step < 3:
            assert seconds is None, "the device is still in the first step"
        for name in ("a", "b"):
            device.work(0.5)
            watch.note_gradient(name, arrived)
            device.work(1.0)
            arrived = device.stamp()
    assert seconds == StepSeconds(4.0, 1.0, 1.0, 0.0, {"a": 0.0, "b": 1.0}, {}, late=1), "of step 1; step 0 is skipped"
    assert watch.read() is None
    for step in range(4, 40):
        device.work(4.0)
        assert watch.begin(step) and watch.read() is None
    assert len(watch._unread) == _UNREAD, "a device that never catches up costs no more memory"
    device.now = 1000.0
    assert watch.begin(40)
    seconds = watch.read()
    assert seconds is not None and seconds.late == 0
    assert not device.waits


def test_an_engine_tells_what_its_steps_took_the_device() -> None:
    """The host takes no time at all. Lanes wait for gradients, and the update for lanes, as streams do."""
    tensors = MODEL[:3]

    def summed(x: torch.Tensor, codec: object, transport: Transport, **_: object) -> None:
        devices[transport.rank].work(3.0)
        transport.all_reduce(x)

    def body(transport: Transport) -> tuple[list[tuple[int, StepSeconds | None]], int]:
        device, script = devices[transport.rank], Late({})
        engine = make_engine(
            transport,
            tensors,
            codec=codecs.get("raw"),
            algorithm="summed",
            planner=planners.get("wfbp"),
            plan_controller=script,
            clock=device,
        )
        for step in range(5):
            for name, value in gradients(transport.rank, step, tensors).items():
                device.work(1.0)
                engine.submit(name, value)
            engine.synchronize()
            device.work(2.0)
            device.now += 11.0 if step else 0.5  # the host is ahead by most of the first step
        engine.close()
        return script.noted, device.waits

    devices = [FakeDevice(), FakeDevice()]
    with collective_named("summed", summed), streams_joined():
        (noted, waits), other = over_threads(2, body)
    assert (noted, waits) == other and waits == 0
    assert [step for step, _ in noted] == [0, 1, 2, 3]
    assert noted[0][1] is None, "the device has not ended the first step when the second begins"
    last = noted[-1][1]
    # Gradients come 1 s apart and buckets take 3 s each, one after the other: 1 + 3 * 3 s, then the update.
    assert last is not None
    assert dict(last.ready) == {"w0": 0.0, "w1": 1.0, "w2": 2.0}
    assert dict(last.buckets) == {0: 3.0, 1: 3.0, 2: 3.0}
    assert (last.backward, last.submitting, last.waiting) == (2.0, 0.0, 7.0)
    assert last.wall == 12.0


def test_an_engine_tells_what_its_steps_took(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Script):
        def next_plan(self, transport: Transport) -> FusionPlan | None:
            time.sleep(0.02)
            return super().next_plan(transport)

    left_out: list[float] = []
    monkeypatch.setattr(StepTimer, "leave_out", lambda _, start: left_out.append(time.perf_counter() - start))

    def body(transport: Transport) -> list[tuple[int, StepSeconds]]:
        script = Slow({2: None})
        engine = make_engine(transport, codec=codecs.get("raw"), plan_controller=script)
        for step in range(4):
            for name, value in gradients(transport.rank, step).items():
                if name == "w3":
                    time.sleep(0.02)
                engine.submit(name, value)
            engine.synchronize()
        engine.close()
        return script.noted

    for noted in over_threads(2, body):
        for _, seconds in noted:
            assert list(seconds.ready) == [tensor.name for tensor in MODEL]
            assert seconds.ready["w3"] - seconds.ready["w2"] >= 0.02
            assert seconds.backward == seconds.ready["w5"]
            assert seconds.wall >= seconds.backward + seconds.submitting + seconds.waiting
            assert seconds.waiting > 0
        assert all(seconds.buckets.keys() == {0, 1, 2} for _, seconds in noted)
    assert len(left_out) == 2 and min(left_out) >= 0.02, "once on each rank"
