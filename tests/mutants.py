"""Tries deliberate defects against the fast tests: ``python -m tests.mutants`` says which test catches each.

A copy of the tree gets one defect at a time. The test that caught it before runs first, then those whose words are
nearest, those of the same name, those of the same room, and the rest; the first that fails has caught it.
``mutants_caught.txt`` keeps which. Without options the defects are listed; a defect's name is its file and its number
there.
"""

from __future__ import annotations

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
from pathlib import Path

from .mutant_table import LIKELY, MUTANTS, Mutant
from .nearness import nearest
from .tiers import FAST

TREE = Path(__file__).parents[1]
CAUGHT = Path(__file__).with_name("mutants_caught.txt")
NEAREST = 20  # tests, of which one catches most defects
BUILT = ("fusionlayer/lib", "build")  # not in git, and needed to test without compiling everything


def named() -> dict[str, Mutant]:
    """Return the defects by name, such as ``scheduler/engine.2``."""
    count: Counter[str] = Counter()
    found = {}
    for mutant in MUTANTS:
        stem = mutant.file.removeprefix("fusionlayer/").rpartition(".")[0]
        count[stem] += 1
        found[f"{stem}.{count[stem]}"] = mutant
    return found


def mutated(mutant: Mutant, tree: Path = TREE) -> str:
    """Return the text of the file with the defect.

    Raises:
        ValueError: what is to be replaced does not stand there exactly once.
    """
    text = (tree / mutant.file).read_text()
    if (times := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.file} has {times} times {mutant.old!r}, expected once; mend tests/mutant_table.py")
    return text.replace(mutant.old, mutant.new)


def caught_before() -> dict[str, str]:
    """Return the tests that caught defects when they were tried last, by the defects' ``key``."""
    lines = CAUGHT.read_text().splitlines() if CAUGHT.exists() else []
    return dict(line.split("\t") for line in lines)


def key(mutant: Mutant) -> str:
    """Return what names a defect in the record: its number would change with rows before it."""
    return f"{mutant.file.removeprefix('fusionlayer/')}: {mutant.breaks}"


def record(mutant: Mutant, test: str) -> None:
    """Keep which test caught a defect."""
    lines = sorted({**caught_before(), key(mutant): test}.items())
    CAUGHT.write_text("".join(f"{name}\t{each}\n" for name, each in lines))


def stages(mutant: Mutant) -> list[list[str]]:
    """Return arguments for pytest, the tests most likely to catch the defect first.

    The one that caught it before; those whose words are nearest; those of its file's name, and those that the list
    names; those of its room; the rest.
    """
    before = caught_before().get(key(mutant), "")
    path = Path(mutant.file.removeprefix("fusionlayer/"))
    stem, room = path.stem.strip("_"), {"csrc": "codecs"}.get(path.parts[0], path.parts[0])
    same = sorted(TREE.glob(f"tests/**/test_*{stem}*.py")) if len(stem) > 2 else []
    own = [
        *(f"tests/{test}" for test in LIKELY.get(str(path), "").split()),
        *(str(test.relative_to(TREE)) for test in same if "gpu" not in test.parts),
    ]
    folder = [f"tests/{room}"] * (TREE / "tests" / room).is_dir()
    without = [f"--ignore={test}" for test in own]
    exists = (TREE / before.partition("::")[0]).is_file()
    return [
        [before] if before and exists else [],
        nearest(TREE, mutant.file, (TREE / mutant.file).read_text().index(mutant.old), mutant.breaks)[:NEAREST],
        own,
        folder and [*folder, *without],
        [*without, *(f"--ignore={each}" for each in folder)],
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


def caught_by(tree: Path, mutant: Mutant, chosen: str, deadline: float, last: int) -> str:
    """Return which test catches a defect in the first stages, or "" if it survives."""
    end = time.monotonic() + deadline
    if "/csrc/" in mutant.file:
        status, output = run(tree, [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], deadline)
        if status:
            return f"the compiler: {output.strip().splitlines()[-1]}"
    for arguments in filter(None, stages(mutant)[: last + 2]):
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
        "--stages", type=int, default=3, help="0: the nearest tests; 1: of the same name; 2: of the room too; 3: all"
    )
    parser.add_argument("-m", dest="chosen", default=FAST, help=f"tests to run, by markers (default: {FAST!r})")
    parser.add_argument("--deadline", type=float, default=600, metavar="S", help="seconds for each (default: 600)")
    options = parser.parse_args()
    every = named()
    for mutant in every.values():
        mutated(mutant)
    if not options.all and not options.only:
        for name, mutant in every.items():
            print(f"{name:40} {mutant.breaks}")
        return 0
    chosen = {n: m for n, m in every.items() if options.all or n.startswith(tuple(options.only))}
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants") as place:
        tree = Path(place)
        copy_tree(tree)
        # A tree that does not even collect would seem to catch everything.
        status, output = run(tree, [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", options.chosen], 600)
        if status:
            print(f"without a defect the tests cannot be collected: {output.strip().splitlines()[-1]}")
            return 2
        for name, mutant in chosen.items():
            file, before = tree / mutant.file, (tree / mutant.file).read_text()
            write(file, mutated(mutant, tree))
            start = time.monotonic()
            try:
                test = caught_by(tree, mutant, options.chosen, options.deadline, options.stages)
            finally:
                write(file, before)
            survivors += [] if test else [name]
            if test.startswith("tests/") and options.chosen == FAST:
                record(mutant, test)
            verdict = f"caught by {test}" if test else "SURVIVED"
            print(f"{name:40} {mutant.breaks}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    print(
        f"{len(chosen) - len(survivors)} of {len(chosen)} caught"
        + f"; survivors: {' '.join(survivors)}" * bool(survivors)
    )
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
