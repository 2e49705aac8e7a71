"""Tries deliberate defects against the fast tests: ``python -m tests.mutants`` reports which test catches each.

A copy of the tree gets one defect at a time. Tests run in stages until one fails: those that ``mutants.txt`` names for
the defect; those whose words are nearest; those with the file's name; those of its folder; the rest. ``mutants.txt``
keeps the test that failed. Without options the defects are listed; a defect's name is its file and its number there.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .nearness import nearest
from .tiers import FAST

TREE = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("mutants.txt")
BETWEEN = " | "  # columns
NEAREST = 20  # tests, of which one catches most defects
BUILT = ("fusionlayer/lib", "build")  # not in git, and needed to test without compiling everything
SOURCES = {".py", ".h", ".cpp", ".cuh", ".cu"}


class Mutant(NamedTuple):
    """A row of ``mutants.txt``: ``old``, which occurs once in ``file``, becomes ``new``."""

    file: str
    old: str
    new: str
    breaks: str
    tests: str = ""


class Place(NamedTuple):
    """Where a defect goes: a file, its text, and the part that is replaced."""

    file: str
    text: str
    start: int
    end: int


def named() -> dict[str, Mutant]:
    """Return the defects by name, such as ``scheduler/engine.2``."""
    count: Counter[str] = Counter()
    found = {}
    for line in TABLE.read_text().splitlines():
        if not line.startswith("#"):
            mutant = Mutant(*line.split(BETWEEN, 4))
            stem = mutant.file.rpartition(".")[0]
            count[stem] += 1
            found[f"{stem}.{count[stem]}"] = mutant
    return found


def place_of(mutant: Mutant, tree: Path = TREE) -> Place:
    """Return where a defect goes: its file or, if that has moved, the only file with the text.

    Raises:
        ValueError: the text does not occur exactly once.
    """
    text = mutant.old.replace("\\n", "\n")
    escaped = re.escape(text)  # escapes white space too
    pattern = re.compile(re.sub(r"(?<=\S)(\\\s)+(?=\S)", r"\\s+", escaped))
    sources, name = _sources(tree), f"fusionlayer/{mutant.file}"
    if not pattern.search(sources.get(name, "")):
        name = next((other for other, each in sources.items() if pattern.search(each)), name)
    found = [each.span() for each in pattern.finditer(sources.get(name, ""))]
    if len(found) != 1:
        raise ValueError(f"{mutant.file} has {len(found)} times {mutant.old!r}, expected once; mend {TABLE.name}")
    return Place(name, sources[name], *found[0])


@cache
def _sources(tree: Path) -> dict[str, str]:
    files = (path for path in (tree / "fusionlayer").rglob("*") if path.suffix in SOURCES)
    return {str(path.relative_to(tree)): path.read_text() for path in files}


def mutated(mutant: Mutant, place: Place) -> str:
    """Return the text of the file with the defect."""
    return place.text[: place.start] + mutant.new.replace("\\n", "\n") + place.text[place.end :]


def record(mutant: Mutant, place: Place, test: str) -> None:
    """Keep which test caught a defect, and in which file the defect is now."""
    file = place.file.removeprefix("fusionlayer/")
    known = mutant._replace(file=file, tests=test.removeprefix("tests/"))
    TABLE.write_text(TABLE.read_text().replace(row(mutant), row(known), 1))


def row(mutant: Mutant) -> str:
    """Return the line of a defect in the table."""
    return BETWEEN.join(mutant[: 4 + bool(mutant.tests)])


def stages(mutant: Mutant, place: Place) -> list[list[str]]:
    """Return arguments for pytest, the tests most likely to catch the defect first."""
    tests = [mutant.tests] if "::" in mutant.tests else mutant.tests.split()
    before = [f"tests/{test}" for test in tests if (TREE / "tests" / test.partition("::")[0]).is_file()]
    path = Path(place.file.removeprefix("fusionlayer/"))
    stem, folder = path.stem.strip("_"), {"csrc": "codecs"}.get(path.parts[0], path.parts[0])
    same = sorted(TREE.glob(f"tests/**/test_*{stem}*.py")) if len(stem) > 2 else []
    own = [str(test.relative_to(TREE)) for test in same if "gpu" not in test.parts]
    beside = [f"tests/{folder}"] * (TREE / "tests" / folder).is_dir()
    without = [f"--ignore={test}" for test in own]
    return [
        before,
        nearest(TREE, place.file, place.start, mutant.breaks)[:NEAREST],
        own,
        beside and [*beside, *without],
        [*without, *(f"--ignore={each}" for each in beside)],
    ]


def copy_tree(into: Path) -> None:
    """Copy what git knows, and what was built."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=TREE, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (TREE / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TREE / name, into / name)
    for name in BUILT:
        if (TREE / name).is_dir():
            shutil.copytree(TREE / name, into / name, dirs_exist_ok=True)


def write(file: Path, text: str) -> None:
    """Write a source, and have Python compile it anew though size and second may be those of the text before."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def run(tree: Path, command: list[str], seconds: float) -> tuple[int | None, str]:
    """Return the exit status of a command in the copy, None if it took too long, and what it wrote."""
    environ = {**os.environ, "PYTHONPATH": str(tree), "FUSIONLAYER_CUDA": "0"}
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that a failed test has left


def caught_by(tree: Path, file: str, tests: list[list[str]], chosen: str, deadline: float) -> str:
    """Return which test catches the defect of a file, or "" if it survives these stages."""
    end = time.monotonic() + deadline
    if "/csrc/" in file:
        status, output = run(tree, [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], deadline)
        if status:
            return f"the compiler: {output.strip().splitlines()[-1]}"
    for arguments in filter(None, tests):
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", chosen]
        status, output = run(tree, [*pytest, *arguments], max(1.0, end - time.monotonic()))
        if status is None:
            return f"a deadline of {deadline:.0f} s: tests that hang"
        if status not in (0, 4, 5):  # 4, 5: no such test, or none was chosen
            found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", output, re.MULTILINE)
            return found[1] if found else output.strip().splitlines()[-1]
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, or all whose name begins so")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument(
        "--stages", type=int, default=3, help="0: the nearest tests; 1: of the same name; 2: of the folder too; 3: all"
    )
    parser.add_argument("-m", dest="chosen", default=FAST, help=f"tests to run, by markers (default: {FAST!r})")
    parser.add_argument("--deadline", type=float, default=600, metavar="S", help="seconds for each (default: 600)")
    options = parser.parse_args()
    every = named()
    places = {name: place_of(mutant) for name, mutant in every.items()}
    if not options.all and not options.only:
        for name, mutant in every.items():
            print(f"{name:40} {mutant.breaks}")
        return 0
    chosen = {n: m for n, m in every.items() if options.all or n.startswith(tuple(options.only))}
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = Path(folder)
        copy_tree(tree)
        # A tree that does not even collect would seem to catch everything.
        status, output = run(tree, [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", options.chosen], 600)
        if status:
            print(f"without a defect the tests cannot be collected: {output.strip().splitlines()[-1]}")
            return 2
        for name, mutant in chosen.items():
            place, start = places[name], time.monotonic()
            write(tree / place.file, mutated(mutant, place))
            try:
                tests = stages(mutant, place)[: options.stages + 2]
                test = caught_by(tree, place.file, tests, options.chosen, options.deadline)
            finally:
                write(tree / place.file, place.text)
            survivors += [] if test else [name]
            if test.startswith("tests/") and options.chosen == FAST:
                record(mutant, place, test)
            verdict = f"caught by {test}" if test else "SURVIVED"
            print(f"{name:40} {mutant.breaks}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    print(
        f"{len(chosen) - len(survivors)} of {len(chosen)} caught"
        + f"; survivors: {' '.join(survivors)}" * bool(survivors)
    )
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
