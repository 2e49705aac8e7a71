"""The list of deliberate defects fits the tree, and the tool refuses what does not."""

import ast
import re

import pytest

from . import mutants
from .mutants import Mutant


def test_every_defect_applies_to_the_tree_and_its_tests_exist() -> None:
    packages = set()
    for name, mutant in mutants.named().items():
        place = mutants.place_of(mutant)
        packages.add(place.file.split("/")[1])
        text = mutants.mutated(mutant, place)
        assert text != place.text and mutant.breaks, name
        if place.file.endswith(".py"):
            ast.parse(text)
        file, _, function = mutant.tests.partition("::")
        for each in file.split():
            assert (mutants.TREE / "tests" / each).is_file(), f"{name}: {each}"
        for each in filter(None, re.sub(r"\[.*", "", function).split("::")):
            assert re.search(rf"(def|class) {each}\b", (mutants.TREE / "tests" / file).read_text()), name
    expected = {path.name for path in (mutants.TREE / "fusionlayer").iterdir() if (path / "__init__.py").exists()}
    assert expected <= packages, "a package without a defect"


def test_a_moved_line_is_found_and_a_text_that_does_not_occur_once_is_refused() -> None:
    place = mutants.place_of(Mutant("base/gone.py", "def derive_seed(", "", ""))
    assert place.file == "fusionlayer/base/seeds.py"
    for file, old in (("base/seeds.py", "no such" + " text"), ("base/plan.py", "def ")):
        with pytest.raises(ValueError, match="expected once"):
            mutants.place_of(Mutant(file, old, "", ""))
