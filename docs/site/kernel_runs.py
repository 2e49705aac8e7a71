"""Which CUDA kernels have run on a GPU as they are now. After a run on a GPU in which kernels passed their tests:

    python -m docs.site.kernel_runs benchmarks/results/gpu-second_nvidia-h200_2026-11-28.json qsdp.cu

records the hashes of that commit's sources in ``kernel_runs.json``, without those of the files named, which no test of
the run executed. docs/gpu.md lists what has changed since.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from textwrap import wrap

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("kernel_runs.json")
_CSRC = "fusionlayer/csrc"
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_CODE = (".cu", ".cuh", ".h")
_NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|^\s*#include "[^\n]*|\s+', re.DOTALL | re.MULTILINE)

Sources = Mapping[PurePosixPath, str]
"""Texts by their paths below ``fusionlayer/csrc``."""


def sources(commit: str | None = None) -> Sources:
    """Return the sources below ``fusionlayer/csrc``: those of a commit, or of the working tree."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    top = PurePosixPath(_CSRC)
    if commit is not None:
        paths = git("ls-tree", "-r", "--name-only", commit, _CSRC).splitlines()
        every = {PurePosixPath(path): git("show", f"{commit}:{path}") for path in paths if path.endswith(_CODE)}
    else:
        every = {top / path.relative_to(ROOT / top): path.read_text() for path in (ROOT / top).rglob("*.[ch]*")}
    return {path.relative_to(top): text for path, text in every.items() if path.name.endswith(_CODE)}


def _included(path: PurePosixPath, texts: Sources) -> set[PurePosixPath]:
    """Return a source and all sources of the project that it includes."""
    found, left = set(), [path]
    while left:
        here = left.pop()
        if here not in found:
            found.add(here)
            for name in _INCLUDE.findall(texts[here]):
                places = [folder / name for folder in (here.parent, *map(PurePosixPath, ("include", "core", "")))]
                left += [place for place in places if place in texts][:1]
    return found


def hashes(texts: Sources) -> dict[str, tuple[str, str]]:
    """Return two hashes for each file with kernels: of its own code, and of that with all code that it includes.

    Comments, blanks, and the folders of files do not count.
    """

    def digest(paths: set[PurePosixPath]) -> str:
        parts = sorted(_NO_CODE.sub("", texts[path]) for path in paths)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    every = {path: _included(path, texts) for path in sorted(texts) if path.suffix == ".cu"}
    return {
        path.name: (digest({path}), digest(parts))
        for path, parts in sorted(every.items(), key=lambda each: each[0].name)
        if any("__global__" in texts[part] for part in parts)
    }


def not_run() -> list[str]:
    """Return the lines of docs/gpu.md on the kernels that have not run since their last change."""
    record, now = json.loads(RECORD.read_text()), hashes(sources())
    groups: dict[str, list[str]] = {
        "As they are now": [],
        "Before a change in a header": [],
        "Before a change in the file": [],
        "Never": [],
    }
    for name, (own, whole) in now.items():
        ran = record["kernels"].get(name)
        place = 3 if ran is None else 0 if ran[1] == whole else 1 if ran[0] == own else 2
        [*groups.values()][place].append(f"`{name.removesuffix('.cu')}`")
    lines = [f"- {kind}: {', '.join(names) or 'none'}." for kind, names in groups.items()]
    return [
        f"Which files' kernels have passed tests on a GPU, one {record['device']} on {record['date']} (commit",
        f"{record['commit']})? By hashes of the code, without comments:",
        "",
        *(wrapped for line in lines for wrapped in wrap(line, 100, subsequent_indent="  ")),
    ]


def main(result: str, *without: str) -> None:
    """Record the run whose result is in the file ``result``."""
    about = json.loads(Path(result).read_text())["environment"]
    facts = {"device": about["hardware"], "date": about["date"], "commit": about["commit"]}
    both = {name: ran for name, ran in hashes(sources(about["commit"])).items() if name not in without}
    rows = ",\n".join(f'  "{name}": {json.dumps(ran)}' for name, ran in both.items())
    RECORD.write_text(json.dumps({**facts, "kernels": {}}, indent=1).replace("{}", f"{{\n{rows}\n }}") + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
