"""No test lives in the exhaustive or the long tier alone, and what is left to them is decided by rule."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems

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


TESTS = """
import pytest
from tests.loops import looped
from tests.tiers import tiered

calls = []

@looped("world", iter((1, 2)))
@pytest.mark.parametrize("kept", "x")
@looped("name, codec", [("ring", 4), ("butterfly", 8)])
def test_all(request, name, codec, world, kept):
    calls.append((world, name, codec, kept))

def test_each_was_called_once():
    assert calls == [(w, n, c, "x") for w in (1, 2) for n, c in (("ring", 4), ("butterfly", 8))]

@looped("world", tiered([1, 2, 5, 9], lambda world: world < 5, lambda world: world < 9))
@looped("name", "ab")
def test_tiers(name, world, request):
    marks = {5: "exhaustive", 9: "long"}
    assert [mark.name for mark in request.node.iter_markers() if mark.name != "parametrize"] == [
        marks[each] for each in [world] if each in marks
    ]
    calls.append((name, world))

def test_each_was_called_in_its_tier():
    assert calls[4:] == [(name, world) for world in (1, 2, 5, 9) for name in "ab"]

@looped("world", (1, 2, 3))
def test_failing(world):
    assert world != 2

@looped("world", (1, 2))
def test_skipping(world):
    pytest.skip("no device")

def test_parameters_with_marks_are_refused():
    for values in ([pytest.param(1, marks=pytest.mark.skip)], []):
        with pytest.raises(AssertionError, match="world"):
            looped("world", values)
"""


def test_no_case_is_left_out(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=7, failed=2)
    result.stdout.fnmatch_lines(
        ["*_ test_failing _*", "world=1", "world=2", "*_ test_skipping _*", "*a case of a loop skips*"]
    )
