"""Benchmarks begin on a quiet machine, or not at all."""

from __future__ import annotations

import pytest

from benchmarks import quiet

pytestmark = pytest.mark.short

QUIET = {"load": 0.5, "cpu_waiting": 1.0}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What the machine looks like at each look; the last of it stays."""
    states = [QUIET]
    monkeypatch.setattr(quiet, "pressure", lambda: states.pop(0) if len(states) > 1 else states[0])
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return states


def test_pressure_is_in_its_ranges() -> None:
    found = quiet.pressure()
    assert found["load"] >= 0
    assert 0 <= found.get("cpu_waiting", 0) <= 100


def test_a_quiet_machine_is_used(seen: list[dict[str, float]]) -> None:
    quiet.refuse_if_busy(False, ranks=2, patience=0)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"load": 3.5, "cpu_waiting": 1.0}, "load of the last minute is 3.5, expected at most 3 for 2 workers"),
        ({"load": 3.5}, "load"),
        ({"load": 0.5, "cpu_waiting": 60.0}, "waited for a core 60 %"),
    ],
)
def test_a_busy_machine_is_refused_unless_the_user_insists(
    seen: list[dict[str, float]], state: dict[str, float], told: str
) -> None:
    seen[:] = [state]
    with pytest.raises(SystemExit, match=told) as refusal:
        quiet.refuse_if_busy(False, ranks=2, patience=0)
    assert "--busy-ok" in str(refusal.value)
    quiet.refuse_if_busy(True, ranks=2, patience=0)


def test_load_is_held_against_the_number_of_workers(seen: list[dict[str, float]]) -> None:
    seen[:] = [{"load": 3.5}]
    quiet.refuse_if_busy(False, ranks=4, patience=0)


def test_what_an_earlier_benchmark_has_left_behind_is_waited_for(
    seen: list[dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen[:] = [{"load": 5.0}, {"load": 4.0}, QUIET]
    quiet.refuse_if_busy(False, ranks=2)
    assert seen == [QUIET]
    assert capsys.readouterr().err.count("waiting up to 180 s") == 1
