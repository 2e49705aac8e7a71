"""Parsers of what others have written refuse random input by their own errors; ``tests/fuzz.py`` has them."""

from pathlib import Path

import pytest

from tests import fuzz
from tests.tiers import exhaustive, long

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


def test_right_inputs_are_taken(tmp_path: Path) -> None:
    for name, parser in fuzz.parsers(tmp_path).items():
        taken = 0
        for seed in parser.seeds:
            try:
                parser.parse(seed)
                taken += 1
            except parser.refuses:
                pass  # such as a file with a signature, for one without a secret
        some = name in ("newest.json", "signed newest.json", "opening", "plan")
        assert taken == len(parser.seeds) or some, f"{name} refuses what is right"


def test_random_inputs_are_refused_in_order(tmp_path: Path) -> None:
    for name, parser in fuzz.parsers(tmp_path).items():
        for data, trace in fuzz.attempt(parser, 100, seed=1):
            pytest.fail(f"{name} of {data[:200]!r}\n{trace}")


@exhaustive(guarded_by="tests/test_fuzz.py::test_random_inputs_are_refused_in_order")
def test_many_random_inputs_are_refused_in_order(tmp_path: Path) -> None:
    for name, parser in fuzz.parsers(tmp_path).items():
        for data, trace in fuzz.attempt(parser, 2000, seed=2):
            pytest.fail(f"{name} of {data[:200]!r}\n{trace}")


@long(guarded_by="tests/test_fuzz.py::test_many_random_inputs_are_refused_in_order")
@pytest.mark.timeout(7200)
def test_a_million_random_inputs_are_refused_in_order(tmp_path: Path) -> None:
    every = fuzz.parsers(tmp_path)
    for name, parser in every.items():
        for data, trace in fuzz.attempt(parser, 1_000_000 // len(every), seed=3):
            pytest.fail(f"{name} of {data[:200]!r}\n{trace}")
