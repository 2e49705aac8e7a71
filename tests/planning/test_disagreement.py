"""Ranks of different pace come to one decision, and steps that a new plan has not settled in do not count."""

from __future__ import annotations

from typing import Any

import pytest

from fusionlayer import codecs
from fusionlayer.clock import HOST
from fusionlayer.plan import FusionPlan
from fusionlayer.planning.autotune import Autotune, Autotuner
from fusionlayer.planning.autotune.search import WARM_UP
from fusionlayer.planning.online import OnlinePlanner, ReplanSchedule
from fusionlayer.scheduler import Engine, StepSeconds, planners
from fusionlayer.transport import Transport
from tests.ranks import over_threads
from tests.scheduler.engines import MODEL, gradients, make_engine, run_step

from .measured import costs_measured
from .test_online import RAW, drive, step_of

pytestmark = pytest.mark.short

WORLD, ODD = 3, 2  # ranks, and the one of another pace
SCHEDULE = ReplanSchedule(warm_up=1, measured=2, between_looks=4, looks=2, tolerance=0.3)
MEASURED_AFTER = 3  # steps


@pytest.mark.parametrize(
    "others, odd, drifts",
    [
        ((1.0, 1.0), (1.0, 3.0), True),  # the odd one alone tells: the mean is 1.67
        ((1.0, 1.0), (1.0, 1.6), False),  # off for the odd one alone: the mean is 1.2
        ((1.0, 1.5), (1.0, 1.5), True),
        ((1.0, 1.5), (2.0, 1.0), False),  # all are off: the mean is not
    ],
)
@pytest.mark.parametrize("what", ["backward", "communication", "waiting"])
def test_drift_is_what_all_ranks_take_together(
    what: str, others: tuple[float, float], odd: tuple[float, float], drifts: bool
) -> None:
    usual = {"backward": 0.01, "communication": 0.004, "waiting": 0.002}

    def body(transport: Transport) -> list[bool]:
        before, after = odd if transport.rank == ODD else others
        planner = OnlinePlanner(MODEL, planners.get("cupcake"), RAW, transport.rank, WORLD, schedule=SCHEDULE)
        steps = [step_of(**{**usual, what: usual[what] * before})] * (MEASURED_AFTER + 1 + 4)
        steps += [step_of(**{**usual, what: usual[what] * after})] * 8
        seen = []
        for count in range(len(steps)):
            drive(planner, transport, steps[count : count + 1], begin=count)
            seen.append(planner._measuring)
        return seen

    with costs_measured(latency=0.0, per_byte=1e-6):
        first, *rest = over_threads(WORLD, body)
    assert all(other == first for other in rest)
    assert not first[MEASURED_AFTER] and first[-1] == drifts


class Settling(Autotuner):
    """Autotuning by steps that tell how many of their plan's came before: what a window counts is seen in them."""

    def __init__(self, rank: int, **options: Any) -> None:
        super().__init__(MODEL, Autotune(steps=150), rank, HOST, **options)
        self.plan: FusionPlan | None = None
        self.number = 0
        self.counted: list[list[int]] = []

    def note_step(self, engine: Engine, step: int, seconds: StepSeconds | None) -> None:
        self.number = self.number + 1 if engine.plan is self.plan else 0
        self.plan = engine.plan
        super().note_step(engine, step, StepSeconds(1.0 + self.number / 1024, 0.0, 0.0, 0.0, {}, {}))

    def next_plan(self, transport: Transport) -> FusionPlan | None:
        assert self._windows is not None
        self.counted.append([round((seconds - 1) * 1024) for seconds in self._windows.seconds])
        return super().next_plan(transport)


@pytest.mark.parametrize("overlap_forward", [False, True])
def test_steps_after_a_switch_do_not_count_until_the_plan_has_settled(overlap_forward: bool) -> None:
    def body(transport: Transport) -> list[list[int]]:
        settling = Settling(transport.rank, overlap_forward=overlap_forward)
        engine = make_engine(
            transport,
            plan_controller=settling,
            codec=codecs.get("raw"),
            planner=planners.get("wfbp"),
            overlap_forward=overlap_forward,
        )
        for step in range(150):
            if overlap_forward:
                for name, value in gradients(transport.rank, step).items():
                    engine.submit(name, value)
                engine.end_step()
                for index in sorted(engine.untaken):
                    engine.take(index)
            else:
                run_step(engine, gradients(transport.rank, step))
        engine.close()
        return settling.counted

    counted, other = over_threads(2, body)
    assert counted == other and len(counted) > 4
    first, *windows = counted
    assert first[0] == WARM_UP + 1, "the step that brought the plan to start from, and those that warm up"
    settle = 6 if overlap_forward else 2  # with an order to find it is found by then; else memory is touched by then
    for window in windows:
        follows_a_switch = window[0] <= settle
        assert window == list(range(window[0], window[0] + len(window)))
        if follows_a_switch:
            assert window[0] == settle, "the steps that a new plan needs to settle count"
    assert sum(window[0] == settle for window in windows) > 2
