"""Benchmarks begin on a quiet machine, or not at all."""

from __future__ import annotations

import pytest

from benchmarks import quiet
from tests.loops import looped

pytestmark = pytest.mark.short


@looped(
    "state, told",
    [
        ({"load": 3.5, "cpu_waiting": 1.0}, "load of the last minute is 3.5, expected at most 3 for 2 workers"),
        ({"load": 3.5}, "load"),
        ({"load": 0.5, "cpu_waiting": 60.0}, "waited for a core 60 %"),
    ],
)
def test_a_busy_machine_is_refused_unless_the_user_insists(
    state: dict[str, float], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "pressure", lambda: state)
    with pytest.raises(SystemExit, match=told) as refusal:
        quiet.refuse_if_busy(False, ranks=2, patience=0)
    assert "--busy-ok" in str(refusal.value)
    quiet.refuse_if_busy(True, ranks=2, patience=0)
