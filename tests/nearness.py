"""Which tests are likely to catch a defect: those that share rare words with it and with the code around it."""

import ast
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["nearest"]

_SATURATION = 1.2  # of BM25: how little it counts that a word comes again
_NAME = 4  # times that a word of a test's name counts


class _Test(NamedTuple):
    name: str  # as pytest takes it
    words: Counter[str]


def nearest(tree: Path, file: str, place: int, breaks: str) -> list[str]:
    """Return the names of all tests, the nearest one first, by the weights of BM25.

    Args:
        tree: the project.
        file: with the defect.
        place: of the defect in the text of the file.
        breaks: what the defect breaks, in words.
    """
    tests = _tests(tree)
    count = Counter(word for test in tests for word in test.words)
    mean = sum(test.words.total() for test in tests) / len(tests)
    wanted = {
        word: weight * math.log(1 + len(tests) / (0.5 + count[word]))
        for word, weight in _asked(tree, file, place, breaks).items()
        if word in count
    }
    package = Path(file).parts[1]

    def nearness(test: _Test) -> float:
        length = _SATURATION * (0.4 + 0.6 * test.words.total() / mean)
        shared = sum(weight * (n := test.words[word]) / (n + length) for word, weight in wanted.items())
        return shared * (1.4 if test.name.split("/")[1] == package else 1.0)

    return [test.name for test in sorted(tests, key=nearness, reverse=True)]


@cache
def _tests(tree: Path) -> list[_Test]:
    return [
        test
        for path in sorted(tree.glob("tests/**/test_*.py"))
        if "gpu" not in path.relative_to(tree).parts
        for test in _tests_of(path, str(path.relative_to(tree)))
    ]


def _tests_of(path: Path, file: str) -> Iterator[_Test]:
    text = path.read_text()
    module, lines = ast.parse(text), text.splitlines()

    def words_of(each: ast.stmt) -> list[str]:
        return _words("\n".join(lines[each.lineno - 1 : each.end_lineno]))

    helpers = {each.name: each for each in module.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
    common = _words(f"{Path(file).stem} {ast.get_docstring(module) or ''}")
    places: list[ast.Module | ast.ClassDef] = [
        module,
        *(each for each in module.body if isinstance(each, ast.ClassDef)),
    ]
    for outer in places:
        prefix = f"{file}::{outer.name}::" if isinstance(outer, ast.ClassDef) else f"{file}::"
        for each in outer.body:
            if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"):
                words = Counter(common + words_of(each) + _NAME * _words(each.name))
                used = {node.id for node in ast.walk(each) if isinstance(node, ast.Name)}
                for name in used & helpers.keys():
                    words.update(words_of(helpers[name]))
                yield _Test(prefix + each.name, words)


def _asked(tree: Path, file: str, place: int, breaks: str) -> dict[str, float]:
    """Return the words of a defect with their weights."""
    text = (tree / file).read_text()
    lines, line = text.splitlines(), text.count("\n", 0, place)
    asked: defaultdict[str, float] = defaultdict(float)
    parts = [(3.0, breaks), (3.0, Path(file).stem), (0.7, " ".join(lines[max(0, line - 2) : line + 4]))]
    if file.endswith(".py"):
        around = [each for each in ast.walk(ast.parse(text)) if isinstance(each, (ast.FunctionDef, ast.ClassDef))]
        for each in around:
            if each.lineno <= line + 1 <= (each.end_lineno or 0):
                parts += [(2.0, each.name), (0.5, ast.get_docstring(each) or "")]
    for weight, words in parts:
        for word in set(_words(words)):
            asked[word] += weight
    return asked


def _words(text: str) -> list[str]:
    """Return the words of a text, and those that names are made of, without their endings."""
    found = re.findall(r"[a-z]{2,}|[A-Z][a-z]+|[A-Z]{2,}|\d+", text)
    return [re.sub(r"(?<=...)(ations?|ings?|i?es|ed|s|e)$", "", word.lower()) for word in found]
