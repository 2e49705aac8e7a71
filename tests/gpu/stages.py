"""What needs a GPU, in stages of under nine minutes, the most important first; each leaves a result file.

    python -m tests.gpu.stages bytes nccl [--out benchmarks/results] [--rehearse] [-k WORDS]

A stage that lacks something runs nothing, says what it lacks, and ends with status 69. One in which something failed
ends with 1. Tests for which no time was left are reported as not run. ``--rehearse`` runs the tests of a stage on the
CPU instead: it shows before there is a GPU that the stage works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import driver
from benchmarks.report import Environment
from fusionlayer import native
from tests.gpu.conftest import LOG, UNTIL

__all__ = ["LACKS", "STAGES", "Stage", "main"]

ROOT = Path(__file__).parents[2]
LACKS = 69
"""The status of a stage that could not run; sysexits.h calls it EX_UNAVAILABLE."""
SECONDS, LAST_TEST = 530.0, 420.0
"""After so many seconds a stage is ended, and begins no further test, unless it is told other seconds."""


# ---- what a stage may lack ------------------------------------------------------------------------------------------


def _no_device() -> str | None:
    return None if torch.cuda.is_available() else "a CUDA device, which torch does not see"


def _no_library() -> str | None:
    built = native.library_path("cuda").exists()
    return None if built else "the CUDA library: run the stage gpu-build, or `python setup.py build_ext --inplace`"


def _no_nccl() -> str | None:
    return None if torch.distributed.is_nccl_available() else f"NCCL in torch {torch.__version__}"


def _no_nvcc() -> str | None:
    import setup  # of this tree: the one place that knows where nvcc may be

    try:
        setup.find_nvcc()
    except setup.SetupError as absent:
        return str(absent)
    return None


def _no_sanitizer() -> str | None:
    return None if shutil.which("compute-sanitizer") else "compute-sanitizer, which comes with the CUDA toolkit"


def _no_pytest() -> str | None:
    return None if importlib.util.find_spec("pytest") else "pytest"


# ---- stages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A program of a stage.

    Attributes:
        name: in the table.
        words: the program and its arguments; "python" is this one. "OUT" is the folder of results.
        environment: variables in addition.
        share: of the time that the stage still has.
        needs: as of a stage, what it alone needs.
    """

    name: str
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    share: float = 1.0
    needs: Callable[[], str | None] | None = None


@dataclass(frozen=True)
class Stage:
    """What ``make gpu-NAME`` runs.

    Attributes:
        about: what it shows, in a line.
        needs: each says what is missing, or gives None.
        runs: its programs, in order.
        measures: whether the programs write result files of their own, as benchmarks do.
    """

    about: str
    needs: tuple[Callable[[], str | None], ...]
    runs: tuple[Run, ...]
    measures: bool = False


def _tests(
    name: str, files: str, *more: str, workers: int = 1, tier: str = "gpu and not exhaustive", **how: Any
) -> Run:
    """Return a run of pytest over files of this folder, in as many processes as given if pytest-xdist is there."""
    spread = ("-n", str(workers)) if workers > 1 and importlib.util.find_spec("xdist") else ()
    paths = tuple(f"tests/gpu/test_{file}.py" for file in files.split())
    words = ("python", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", tier, *spread, *paths, *more)
    return Run(name, words, **how)


_WORKERS = min(6, os.cpu_count() or 1)
_KERNELS = "codec_gpu sparse_gpu fused_gpu beyond_gpu conformance_gpu"
_ONCE = ("-k", "kernel_once or momentum or (dynamiq and float32) or (messages_agree and byte and float32)")
_SANITIZED = {"TORCH_CUDA_SANITIZER": "1"}
_BASIC = (_no_pytest, _no_library, _no_device)


def _sanitized(tool: str, share: float) -> Run:
    """Return a run of the kernels, each once, under a tool of compute-sanitizer; any finding is a failure."""
    run = _tests(tool, "codec_gpu sparse_gpu fused_gpu", *_ONCE, share=share)
    prefix = ("compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "9")
    return Run(tool, (*prefix, *run.words), share=share, needs=_no_sanitizer)


STAGES = {
    "build": Stage(
        "the CUDA library for the GPUs that are here",
        (_no_nvcc, _no_device),
        (Run("build", ("python", "setup.py", "-q", "build_ext", "--inplace"), {"FUSIONLAYER_CUDA": "1"}),),
    ),
    "bytes": Stage(
        "every kernel, type and tail writes the bytes of the CPU",
        _BASIC,
        (_tests("bytes", _KERNELS, workers=_WORKERS),),
    ),
    "nccl": Stage(
        "two ranks over NCCL: gloo's bits in every trainer, and failures",
        (*_BASIC, _no_nccl),
        (_tests("nccl", "nccl", "-k", "not others", workers=3),),
    ),
    "trainers": Stage(
        "two ranks over gloo learn what they do without compression",
        _BASIC,
        (_tests("trainers", "processes_gpu planning_gpu", workers=3),),
    ),
    "race": Stage(
        "races: launch order over NCCL, streams of trainers, kernels",
        (*_BASIC, _no_nccl),
        (
            _tests("launch order", "nccl", "-k", "others", share=0.2),
            _tests("streams, over NCCL", "nccl", "-k", "trainers", workers=2, environment=_SANITIZED, share=0.35),
            _tests("streams, over gloo", "processes_gpu", workers=3, environment=_SANITIZED, share=0.35),
            _sanitized("memcheck", 0.5),
            _sanitized("racecheck", 1.0),
        ),
    ),
    "kernels": Stage(
        "what kernels reach of a copy's speed",
        (_no_library, _no_device),
        (
            Run("sums in one launch", ("python", "-m", "benchmarks.one_launch", "--out", "OUT"), share=0.2),
            Run(
                "kernels",
                ("python", "-m", "benchmarks.codec", "--device", "cuda", "--numel", "67108864", "--rounds", "9")
                + ("--seconds", "300", "--out", "OUT"),
            ),
        ),
        measures=True,
    ),
    "steps": Stage(
        "steps of training on one device",
        (_no_library, _no_device),
        (Run("steps", ("python", "-m", "benchmarks.gpu_training", "--steps", "30", "--out", "OUT")),),
        measures=True,
    ),
    "bytes-all": Stage(
        "the cases that gpu-bytes leaves out",
        _BASIC,
        (_tests("bytes-all", _KERNELS, workers=_WORKERS, tier="gpu and exhaustive"),),
    ),
}
"""By name, in the order in which ``make gpu`` runs them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are named, each to its end; return the worst status."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.gpu.stages", description=__doc__, formatter_class=form)
    parser.add_argument("stages", nargs="+", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    driver.add_options(parser)
    parser.add_argument("--rehearse", action="store_true", help="run the tests on the CPU")
    parser.add_argument("-k", metavar="WORDS", help="only the tests that fit, as of pytest")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which a stage is ended")
    options = parser.parse_args(arguments)
    status = 0
    for name in options.stages:
        status = max(status, _stage(name, options), key=(0, LACKS, 1).index)
    return status


def _stage(name: str, options: argparse.Namespace) -> int:
    stage = STAGES[name]
    print(f"gpu-{name}: {stage.about}", flush=True)
    if options.rehearse and any(run.words[2:3] != ("pytest",) for run in stage.runs):
        print(f"gpu-{name}: not run: it has no rehearsal, as it needs a device or its tools", flush=True)
        return LACKS
    if not options.rehearse and (missing := [lack for need in stage.needs if (lack := need()) is not None]):
        print(*(f"gpu-{name}: not run: it lacks {lack}" for lack in missing), sep="\n", flush=True)
        return LACKS
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        rows = [_run(run, started, Path(folder), options) for run in stage.runs]
    failed = [row for row in rows if row["status"].startswith("failed")]
    unrun = [row for row in rows if row["status"].startswith("not run")]
    if not stage.measures:
        where = Environment.here(torch.device("cpu" if options.rehearse else "cuda"), options.hardware)
        shown = [{key: value for key, value in row.items() if key != "tests"} for row in rows]
        title = f"{stage.about}{'; rehearsed on the CPU' if options.rehearse else ''}"
        driver.finish(options, f"gpu-{name}", title[0].upper() + title[1:], where, rows, shown)
    end = "failed" if failed else "not all of it was run" if unrun else "passed"
    print(f"gpu-{name}: {end}, after {time.time() - started:.0f} s", flush=True)
    return 1 if failed else LACKS if unrun else 0


def _run(run: Run, started: float, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a program to its end, or until its time is over; return its row."""
    if run.needs is not None and (lack := run.needs()) is not None:
        return {"what": run.name, "status": f"not run: it lacks {lack}", "s": 0.0}
    now, log = time.time(), folder / run.name.replace(" ", "-")
    left = (started + options.seconds - now) * run.share
    out = str(options.out or ROOT / "build/gpu")
    words = [sys.executable if word == "python" else out if word == "OUT" else word for word in run.words]
    if options.k:
        words += ["-k", options.k]
    environment = {**os.environ, **run.environment, LOG: str(log), UNTIL: str(now + left * LAST_TEST / SECONDS)}
    if options.rehearse:
        environment["GPU_TESTS_ON"] = "cpu"
    # A process group of its own, so that nothing of it outlives its time: ranks that hang are its grandchildren.
    process = subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(left)
        status = "passed" if code == 0 else f"failed, status {code}"
    except subprocess.TimeoutExpired:
        status = f"failed: ended after {left:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    tests = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    count = Counter(test["outcome"] for test in tests)
    row: dict[str, Any] = {"what": run.name, "status": status, "s": round(time.time() - now, 1)}
    if "pytest" in run.words:
        if not tests and status == "passed":
            row["status"] = "failed: no test has run"
        elif count["not run"] and status == "passed":
            row["status"] = "not run: some tests, for which no time was left"
        row |= {outcome: count[outcome] for outcome in ("passed", "failed", "skipped", "not run")} | {"tests": tests}
    return row


if __name__ == "__main__":
    driver.leave(main)
