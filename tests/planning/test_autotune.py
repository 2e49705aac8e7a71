"""Autotuning at work on engines whose ranks are threads."""

from __future__ import annotations

import csv
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.clock import HOST
from fusionlayer.errors import ConfigError, PlanMismatch
from fusionlayer.plan import FusionPlan
from fusionlayer.planning.autotune import Autotune, Autotuner
from fusionlayer.planning.autotune.search import LOOK_STEPS
from fusionlayer.scheduler import Engine, PlanController, StepSeconds, planners
from fusionlayer.transport import Transport
from tests.ranks import over_threads
from tests.scheduler.engines import MODEL, collective_named, exact_sum, gradients, make_engine, run_step
from tests.tiers import tiered

pytestmark = pytest.mark.short


class Clock(Autotuner):
    """Autotuning by made-up seconds, and what it did."""

    def __init__(self, *args: Any, slow_rank: int = 0, **options: Any) -> None:
        super().__init__(MODEL, *args, HOST, **options)
        self._slow_rank = slow_rank
        self._rank = args[1]
        self.buckets: list[int] = []
        self.asked = 0

    def note_step(self, engine: Engine, step: int, seconds: StepSeconds | None) -> None:
        assert engine.plan is not None
        buckets = len(engine.plan.buckets)
        self.buckets.append(buckets)
        took = {1: 1.3, 2: 1.0, 3: 1.1, 4: 1.2}.get(buckets, 2.0) if self._rank == self._slow_rank else 0.1 * buckets
        super().note_step(engine, step, StepSeconds(took, 0.0, 0.0, 0.0, {}, {}))

    def next_plan(self, transport: Transport) -> FusionPlan | None:
        self.asked += 1
        return super().next_plan(transport)


def tuned(transport: Transport, steps: int, settings: Autotune | None = None, **options: Any) -> tuple[Clock, Engine]:
    """Return what has tuned an engine for some steps, and the engine; sums are checked."""
    clock = Clock(
        settings or Autotune(), transport.rank, slow_rank=transport.size - 1, first=options.pop("first", None)
    )
    options = {"codec": codecs.get("raw"), "planner": planners.get("wfbp"), **options}
    engine = make_engine(transport, plan_controller=clock, **options)
    exact = [exact_sum(transport.size, step) for step in range(2)]
    for step in range(steps):
        values = run_step(engine, gradients(transport.rank, step % 2), shift=transport.rank)
        if options["codec"].lossless:
            for name, expected in exact[step % 2].items():
                torch.testing.assert_close(values[name], expected.float())
    engine.close()
    return clock, engine


def test_ranks_agree_by_the_slowest() -> None:
    """Only one rank sees which plan is best; to all others fewer buckets look faster."""

    def body(transport: Transport) -> tuple[list[int], FusionPlan | None]:
        clock, engine = tuned(transport, 600)
        return clock.buckets, engine.plan

    every = over_threads(3, body)
    assert all(result == every[0] for result in every)
    buckets, plan = every[0]
    assert plan is not None and len(plan.buckets) == 2
    assert len(set(buckets)) > 3 and set(buckets[-100:]) == {2}


def test_nothing_is_sent_but_a_look_every_hundred_steps() -> None:
    def body(transport: Transport) -> tuple[int, int]:
        clock = Clock(Autotune(), transport.rank)
        engine = make_engine(transport, plan_controller=clock, codec=codecs.get("raw"), planner=planners.get("wfbp"))
        step = 0
        while clock.asked == 0 or clock._windows is None or clock._windows.search.searching:
            run_step(engine, gradients(transport.rank, 0))
            step += 1
            assert step < 1000
        run_step(engine, gradients(transport.rank, 0))  # the last switch
        asked, calls = clock.asked, transport.sequence
        for _ in range(5 * LOOK_STEPS):
            run_step(engine, gradients(transport.rank, 0))
        engine.close()
        assert engine.plan is not None
        return clock.asked - asked, transport.sequence - calls - 5 * LOOK_STEPS * len(engine.plan.buckets)

    assert over_threads(2, body) == [(5, 5)] * 2, "more was sent than one message at each look"


@pytest.mark.parametrize("steps", tiered([5, 36, 60, 150], lambda steps: steps == 36))
def test_after_the_given_steps_there_is_silence(steps: int) -> None:
    def body(transport: Transport) -> tuple[int, list[int], int]:
        clock, _ = tuned(transport, steps + 300, Autotune(steps=steps))
        assert clock._windows is not None
        return clock.asked, clock.buckets, clock._windows.search.best.buckets

    for asked, buckets, best in over_threads(2, body):
        assert asked * 8 <= steps + 8
        assert set(buckets[steps + 2 :]) == {best}


@pytest.mark.parametrize("lanes", [1, 2])
def test_error_feedback_survives_every_switch(lanes: int) -> None:
    """What was sent plus what is kept is what was given, whatever is tried."""
    world, steps = 2, 200

    def body(transport: Transport) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        clock = Clock(Autotune(), transport.rank, slow_rank=1)
        engine = make_engine(
            transport, plan_controller=clock, codec=codecs.get("int4"), error_feedback=True, lanes=lanes
        )
        sent = {tensor.name: torch.zeros(tensor.numel, dtype=torch.float64) for tensor in MODEL}
        for step in range(steps):
            for name, result in run_step(engine, gradients(transport.rank, step % 7)).items():
                sent[name] += result
        engine.close()
        return sent, engine.memory.state_dict()["residuals"], len(set(clock.buckets))

    every = over_threads(world, body)
    assert every[0][2] > 2
    for tensor in MODEL:
        given = sum(exact_sum(world, step % 7)[tensor.name] for step in range(steps))
        assert torch.equal(every[0][0][tensor.name], every[1][0][tensor.name])
        balance = every[0][0][tensor.name] + sum(kept[tensor.name].double() for _, kept, _ in every) - given
        assert balance.abs().max() < 1e-3


def test_begins_with_the_plan_that_another_steering_brings() -> None:
    class First(PlanController):
        asked = 0

        def note_step(self, engine: Engine, step: int, seconds: StepSeconds | None) -> None:
            pass

        def due(self, step: int) -> bool:
            return step == 3

        def next_plan(self, transport: Transport) -> FusionPlan:
            self.asked += 1
            return FusionPlan.build(planners.get("single")(MODEL), transport.size, "raw", {}, "dense", 1)

    def body(transport: Transport) -> tuple[list[int], int]:
        first = First()
        clock, _ = tuned(transport, 30, first=first)
        return clock.buckets, first.asked

    for buckets, asked in over_threads(2, body):
        assert asked == 1
        assert buckets[:4] == [6] * 4 and buckets[4:18] == [1] * 14 and len(set(buckets)) > 2


def test_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tried.csv"

    def body(transport: Transport) -> None:
        tuned(transport, 800, Autotune(log=str(path)))

    with caplog.at_level(logging.INFO, "fusionlayer"):
        over_threads(2, body)
    rows = list(csv.DictReader(path.open()))
    assert list(rows[0]) == ["step", "stage", "shape", "buckets", "seconds", "ratio", "best_shape", "best_buckets"]
    assert {row["stage"] for row in rows} == {"start", "walk", "near", "duel", "look"}
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(steps) and steps[-1] < 800
    assert all(float(row["seconds"]) >= 1 for row in rows)
    assert rows[-1]["best_buckets"] == rows[-1]["buckets"] == "2" and float(rows[-1]["ratio"]) == 1
    over = [record.message for record in caplog.records if "search is over" in record.message]
    assert len(over) == 1 and "2 buckets" in over[0] and "0.50 of the step time" in over[0]
    assert any("faster than 6 buckets, planned: 2 buckets" in record.message for record in caplog.records)


def test_a_log_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="no/such.csv' cannot be written"):
        Clock(Autotune(log=str(tmp_path / "no" / "such.csv")), 0)
    Clock(Autotune(log=str(tmp_path / "no" / "such.csv")), 1)
    folder = tmp_path / "folder"
    folder.mkdir()

    def body(transport: Transport) -> None:
        clock = Clock(Autotune(log=str(folder / "tried.csv")), transport.rank)
        engine = make_engine(transport, plan_controller=clock, codec=codecs.get("raw"))
        if transport.rank == 0:
            (folder / "tried.csv").unlink()
            folder.rmdir()
        for _ in range(60):
            run_step(engine, gradients(transport.rank, 0))
        engine.close()

    over_threads(2, body)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@pytest.mark.parametrize("settings", [None, Autotune(drift=0.2)])
def test_ranks_that_tune_otherwise_are_told_so(settings: Autotune | None) -> None:
    def body(transport: Transport) -> None:
        mine = Autotune(log=None) if transport.rank == 0 else settings
        clock = None if mine is None else Clock(mine, transport.rank)
        engine = make_engine(transport, plan_controller=clock)
        with pytest.raises(PlanMismatch):
            run_step(engine, gradients(transport.rank, 0))

    over_threads(2, body)


def test_real_steps_with_a_slow_collective() -> None:
    """By the clock: where each bucket costs 3 ms, few of them are found."""

    def slow(x: Tensor, codec: object, transport: Transport, **_: object) -> None:
        time.sleep(0.003)
        transport.all_reduce(x)

    def body(transport: Transport) -> tuple[int, FusionPlan | None]:
        tuner = Autotuner(MODEL, Autotune(steps=400), transport.rank, HOST)
        engine = make_engine(
            transport, plan_controller=tuner, codec=codecs.get("raw"), algorithm="slow", planner=planners.get("wfbp")
        )
        for _ in range(400):
            run_step(engine, gradients(transport.rank, 0))
        engine.close()
        return len(engine.plan.buckets) if engine.plan else 0, engine.plan

    with collective_named("slow", slow):
        every = over_threads(2, body)
    assert every[0] == every[1]
    assert every[0][0] <= 3
