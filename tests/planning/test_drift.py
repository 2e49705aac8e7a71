from fusionlayer.planning.drift import Drift, TypicalStep
from fusionlayer.planning.online import OnlinePlanner, ReplanSchedule
from fusionlayer.scheduler import planners
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import over_threads
from tests.scheduler.engines import MODEL

from .measured import costs_measured
from .test_online import RAW, drive, step_of

NEW = TypicalStep(backward=0.1, communication=0.08, waiting=0.02)


def test_the_first_look_is_the_reference() -> None:
    drift = Drift(tolerance=0.3, looks=1)
    assert drift.look(NEW) is None and drift.reference == NEW
    assert drift.look(NEW) is None
    assert drift.look(TypicalStep(0.2, 0.08, 0.02)) == "backward takes 200.00 ms, 100.00 ms when this plan was new"


@looped(
    "pace",
    [TypicalStep(0.2, 0.08, 0.02), TypicalStep(0.1, 0.2, 0.02), TypicalStep(0.1, 0.08, 0.05), TypicalStep(0, 0.08, 0)],
)
def test_several_looks_in_a_row_must_be_off(pace: TypicalStep) -> None:
    drift = Drift(tolerance=0.3, looks=3)
    for seen in (NEW, pace, pace, NEW, pace, pace):
        assert drift.look(seen) is None
    assert drift.look(pace) is not None


def test_what_is_within_the_tolerance_or_small_beside_the_rest_is_none() -> None:
    drift = Drift(tolerance=0.3, looks=1)
    drift.look(TypicalStep(0.1, 0.08, 0.0))
    for pace in (TypicalStep(0.12, 0.1, 0.002), TypicalStep(0.08, 0.06, 0.0), TypicalStep(0.1, 0.08, 0.0029)):
        assert drift.look(pace) is None
    assert drift.look(TypicalStep(0.1, 0.08, 0.0031)) is not None


WORLD, ODD = 3, 2  # ranks, and the one of another pace
SCHEDULE = ReplanSchedule(warm_up=1, measured=2, between_looks=4, looks=2, tolerance=0.3)
MEASURED_AFTER = 3  # steps


@looped(
    "others, odd, drifts",
    [
        ((1.0, 1.0), (1.0, 3.0), True),  # the odd one alone tells: the mean is 1.67
        ((1.0, 1.0), (1.0, 1.6), False),  # off for the odd one alone: the mean is 1.2
        ((1.0, 1.5), (1.0, 1.5), True),
        ((1.0, 1.5), (2.0, 1.0), False),  # all are off: the mean is not
    ],
)
@looped("what", ["backward", "communication", "waiting"])
def test_drift_is_what_all_ranks_take_together(
    what: str, others: tuple[float, float], odd: tuple[float, float], drifts: bool
) -> None:
    usual = {"backward": 0.01, "communication": 0.004, "waiting": 0.002}

    def body(transport: Transport) -> list[bool]:
        before, after = odd if transport.rank == ODD else others
        planner = OnlinePlanner(MODEL, planners.get("cupcake"), RAW, transport.rank, (WORLD,), schedule=SCHEDULE)
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
