from fusionlayer.planning.drift import Drift, TypicalStep
from tests.loops import looped

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
