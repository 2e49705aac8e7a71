"""The list of deliberate defects fits the tree, and the tool refuses what does not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from . import mutants, nearness
from .mutant_table import LIKELY, Mutant

pytestmark = pytest.mark.short


def test_every_defect_applies_to_the_tree() -> None:
    for name, mutant in mutants.named().items():
        text = mutants.mutated(mutant)
        assert mutant.old != mutant.new and mutant.breaks, name
        if mutant.file.endswith(".py"):
            ast.parse(text)


def test_the_defects_are_spread_over_all_rooms() -> None:
    rooms = {mutant.file.split("/")[1] for mutant in mutants.MUTANTS}
    expected = {path.name for path in (mutants.TREE / "fusionlayer").iterdir() if (path / "__init__.py").exists()}
    assert expected <= rooms and len(mutants.MUTANTS) >= 40


def test_likely_tests_exist() -> None:
    for file, tests in LIKELY.items():
        assert (mutants.TREE / "fusionlayer" / file).exists()
        assert all((mutants.TREE / "tests" / test).exists() for test in tests.split()), tests


def test_the_record_names_defects_and_tests_that_exist() -> None:
    known = {mutants.key(mutant) for mutant in mutants.MUTANTS}
    assert len(known) == len(mutants.MUTANTS), "two defects of a file break the same; say it in other words"
    for name, test in mutants.caught_before().items():
        file, _, function = test.partition("::")
        assert name in known, f"{name}: no such defect; remove the line from {mutants.CAUGHT.name}"
        names = re.sub(r"\[.*", "", function).split("::")
        assert all(re.search(rf"(def|class) {each}\b", (mutants.TREE / file).read_text()) for each in names if each), (
            test
        )


def test_what_does_not_stand_there_once_is_refused() -> None:
    for old in ("no such text", "def "):
        with pytest.raises(ValueError, match="expected once"):
            mutants.mutated(
                Mutant("fusionlayer/base/seeds.py" if old[0] == "n" else "fusionlayer/base/plan.py", old, "", "")
            )


def test_tests_with_rare_words_of_a_defect_are_the_nearest(tmp_path: Path) -> None:
    for file, text in {
        "fusionlayer/codecs/half.py": "def encode_half(x):\n    return x[::2]\n",
        "tests/codecs/test_a.py": "def test_sums():\n    assert sum(x) == 0\n",
        "tests/codecs/test_b.py": "def test_rounding():\n    helper(x)\n\n\ndef helper(x):\n    encode_half(x)\n",
        "tests/codecs/test_c.py": "class TestSums:\n    def test_strides(self):\n        assert sum(x) == 0\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "fusionlayer/codecs/row.py").write_text("def row(x):\n    return x[::2]\n")
    found = [
        nearness.nearest(tmp_path, f"fusionlayer/codecs/{file}.py", 20, breaks)[0]
        for file, breaks in (("half", "encoding"), ("row", "the stride"))
    ]
    assert found == ["tests/codecs/test_b.py::test_rounding", "tests/codecs/test_c.py::TestSums::test_strides"]
