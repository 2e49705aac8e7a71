"""No test lives in the exhaustive or the long tier alone, and what is left to them is decided by rule."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems

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
