"""``looped`` calls a test for each case, and leaves none out."""

import pytest

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
