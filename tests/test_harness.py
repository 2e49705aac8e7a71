"""Ranks begin together, and a rank that cannot start ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import outcomes_of, run_ranks

pytestmark = pytest.mark.medium


class Found:
    """Arrives in a rank, while it starts, as what ``look`` returns there."""

    def __init__(self, look: object, folder: Path) -> None:
        self._call = (look, (folder,))

    def __reduce__(self) -> object:
        return self._call


def has_begun(folder: Path) -> bool:
    return (folder / "begun").exists()


def fail_unless_first(folder: Path) -> None:
    (folder / "first").mkdir()


def begin(rank: int, world: int, folder: Path, found: bool) -> bool:
    (folder / "begun").touch()
    return found


def test_no_rank_begins_before_all_are_up(tmp_path: Path) -> None:
    assert run_ranks(begin, 4, tmp_path, Found(has_begun, tmp_path), backend=None) == [False] * 4


def test_a_rank_that_cannot_start_is_not_waited_for(tmp_path: Path) -> None:
    outcomes = outcomes_of(begin, 2, tmp_path, Found(fail_unless_first, tmp_path), backend=None)
    assert sorted(outcome.kind for outcome in outcomes) == ["died", "hung"] and not has_begun(tmp_path)
