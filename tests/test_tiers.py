"""No test lives in the exhaustive or the long tier alone, and what is left to them is decided by rule."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.tiers import LONGEST, longest_first, tiered

pytestmark = pytest.mark.short

TESTS = Path(__file__).parent
MARKED = """
import pytest
@pytest.mark.exhaustive
@pytest.mark.parametrize("n", [1, 2])
def test_marked_as_a_whole(n): pass
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_marked_in_part(n): pass
@pytest.mark.exhaustive(guarded_by="test_it.py::test_marked_in_part")
def test_guarded(): pass
@pytest.mark.exhaustive(guarded_by="test_it.py::test_guarded")
def test_guarded_by_none(): pass
@pytest.mark.long(guarded_by="test_it.py::test_guarded")
def test_long(): pass
@pytest.mark.long(guarded_by="test_it.py::test_long")
@pytest.mark.exhaustive(guarded_by="test_it.py::test_marked_in_part")
def test_guarded_by_long(): pass
"""
UNGUARDED = ("marked_as_a_whole", "guarded_by_none", "guarded_by_long")


def test_a_test_that_no_earlier_tier_guards_is_refused(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile(test_it=MARKED)
    items, _ = pytester.inline_genitems("-p", "no:cacheprovider", path)
    config: Any = SimpleNamespace(args=[], pluginmanager=SimpleNamespace(hasplugin=lambda name: False))
    names = ", ".join(f"test_it.py::test_{name}" for name in UNGUARDED)
    with pytest.raises(pytest.UsageError, match=f"every case is exhaustive.*: {names}$"):
        next(pytest_collection_modifyitems(config, items))
    config.args = ["test_it.py::test_marked_as_a_whole"]  # asked for by its name
    next(pytest_collection_modifyitems(config, items))


@pytest.mark.medium
def test_tests_of_one_file_that_start_processes_share_a_worker(request: pytest.FixtureRequest) -> None:
    """Of some versions of pytest, pytest-xdist cannot set the group: each worker would then make all fixtures."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there is one worker")
    assert request.node.nodeid.endswith("@tests/test_tiers.py")


def test_cases_are_marked_by_rule() -> None:
    cases = tiered([(1, 2), (3, 4)], lambda a, b: b == 4)
    assert [(case.values, bool(case.marks)) for case in cases] == [((1, 2), True), ((3, 4), False)]
    cases = tiered("abc", lambda letter: letter == "a", lambda letter: letter == "b")
    assert [[mark.name for mark in case.marks] for case in cases] == [[], ["exhaustive"], ["long"]]


def test_a_worker_begins_a_long_group_early() -> None:
    groups: dict[str, Any] = {"a.py": ["a"], LONGEST[1]: ["second"], "b.py": ["b"], LONGEST[0]: ["first"]}
    assert longest_first(groups) == [["first"], ["second"], ["a"], ["b"]]
    assert all((TESTS.parent / name).exists() for name in LONGEST if name != "netns")
