"""What needs a GPU, in stages of under nine minutes, the most important first; each leaves a result file.

    python -m tests.gpu.stages bytes nccl [--out benchmarks/results] [--rehearse] [-k WORDS]
    python -m tests.gpu.stages first --seconds 270 --out DIR
    python -m tests.gpu.stages second --seconds 420 --out DIR [-k WORDS]

A stage that lacks something runs nothing, says what it lacks, and ends with status 69. One in which something failed
ends with 1. Tests for which no time was left are reported as not run. ``--rehearse`` runs the tests of a stage on the
CPU instead: it shows before there is a GPU that the stage works.

``first`` and ``second`` select from all stages what is worth most on a machine that is there for minutes. They build
nothing. Each part has a share of the seconds. The result is written after every part; ``gpu-first.log`` has the output
of all parts, and the traceback of every test that failed. ``second -k`` names tests to run once more, before the rest.
"""

import argparse
import glob
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks import driver
from benchmarks.report import Environment, write
from fusionlayer import native
from fusionlayer.base import libraries
from fusionlayer.base.errors import FusionLayerError
from tests.gpu.conftest import LOG, UNTIL

__all__ = ["LACKS", "SELECTIONS", "STAGES", "Stage", "main"]

ROOT = Path(__file__).parents[2]
LACKS = 69
"""The status of a stage that could not run; sysexits.h calls it EX_UNAVAILABLE."""
SECONDS, LAST_TEST = 530.0, 420.0
"""After so many seconds a stage is ended, and begins no further test, unless it is told other seconds."""
# Where the CUDA toolkit puts its tools, which need not be on PATH.
TOOLS = ("/usr/local/cuda/bin", *glob.glob("/opt/nvidia/nsight-compute/*"))
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), *TOOLS])


# ---- what a stage may lack ------------------------------------------------------------------------------------------


def _no_device() -> str | None:
    return None if torch.cuda.is_available() else "a CUDA device, which torch does not see"


def _no_library() -> str | None:
    if not libraries.library_path("cuda").exists():
        return "the CUDA library: run the stage gpu-build, or `python setup.py build_ext --inplace`"
    try:
        native.cpu(), native.cuda()
    except (FusionLayerError, OSError) as error:
        return f"native libraries that can be loaded: {error}"
    return None


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
    return None if shutil.which("compute-sanitizer", path=PATH) else "compute-sanitizer, part of the CUDA toolkit"


def _no_profiler() -> str | None:
    return None if shutil.which("ncu", path=PATH) else "ncu, which is Nsight Compute"


def _no_pytest() -> str | None:
    return None if importlib.util.find_spec("pytest") else "pytest"


# ---- stages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A program of a stage.

    Attributes:
        name: in the table.
        words: the program and its arguments; "python" is this one. "OUT" is the folder of results, "SECONDS" most of
            the run's time.
        environment: variables in addition.
        share: of the stage's time, relative to the shares of the runs that follow. Unused time goes to these.
        needs: as of a stage, what it alone needs.
        after: name of an earlier run without which this one shows nothing, and is not run.
        again: whether it runs the tests that ``-k`` names. Without ``-k`` it is left out; others ignore ``-k`` then.
    """

    name: str
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    share: float = 1.0
    needs: Callable[[], str | None] | None = None
    after: str | None = None
    again: bool = False

    @property
    def has_rehearsal(self) -> bool:
        """Whether it runs tests, and these without a tool that looks at a device."""
        return self.words[2:3] == ("pytest",)


@dataclass(frozen=True)
class Stage:
    """What ``make gpu-NAME`` runs.

    Attributes:
        about: what it shows, in a line.
        needs: each says what is missing, or gives None.
        runs: its programs, in order.
        measures: whether the programs write result files of their own, as benchmarks do.
        seconds: after which it is ended, unless other seconds are given.
        minutes: whether the machine is there for minutes only. Then a test that hangs is given up early, the result is
            written after every run, and output goes to a log next to it.
    """

    about: str
    needs: tuple[Callable[[], str | None], ...]
    runs: tuple[Run, ...]
    measures: bool = False
    seconds: float = SECONDS
    minutes: bool = False


def _tests(
    name: str, files: str, *more: str, workers: int = 1, tier: str = "gpu and not exhaustive", **how: Any
) -> Run:
    """Return a run of pytest over files of this folder, in as many processes as given if pytest-xdist is there."""
    spread = ("-n", str(workers)) if workers > 1 and importlib.util.find_spec("xdist") else ()
    paths = tuple(f"tests/gpu/test_{file}.py" for file in files.split())
    words = ("python", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", tier, *spread, *paths, *more)
    return Run(name, words, **how)


_FEW, _WORKERS, _MANY = (min(most, os.cpu_count() or 1) for most in (4, 6, 10))
"""Few for tests that start ranks, as processes take turns on a device; many for those that need little memory."""
_KERNELS = "codec_gpu sparse_gpu fused_gpu beyond_gpu conformance_gpu"
_ONCE = ("-k", "kernel_once or momentum or (dynamiq and float32) or (messages_agree and byte and float32)")
_SANITIZED = {"TORCH_CUDA_SANITIZER": "1"}
_BASIC = (_no_pytest, _no_library, _no_device)


def _sanitized(tool: str, share: float) -> Run:
    """Return a run of the kernels, each once, under a tool of compute-sanitizer; any finding is a failure.

    Every tensor has an allocation of its own, as memcheck sees nothing of what torch's allocator gives out.
    """
    run = _tests(tool, "codec_gpu sparse_gpu fused_gpu", *_ONCE)
    prefix = ("compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "9")
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "GPU_TESTS_SMALL": "1"}
    return Run(tool, (*prefix, *run.words), environment, share, _no_sanitizer)


def _benchmark(name: str, module: str, *words: str, share: float) -> Run:
    return Run(name, ("python", "-m", f"benchmarks.{module}", *words, "--out", "OUT"), share=share)


def _kernels(rounds: int, *words: str, share: float) -> Run:
    how = ("--device", "cuda", "--numel", "67108864", "--rounds", str(rounds), "--seconds", "SECONDS")
    return _benchmark("kernels", "codec", *how, *words, share=share)


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
            _tests("launch order", "nccl", "-k", "others", share=2),
            _tests("streams, over NCCL", "nccl", "-k", "trainers", workers=2, environment=_SANITIZED, share=3),
            _tests("streams, over gloo", "processes_gpu", workers=3, environment=_SANITIZED, share=2),
            _sanitized("memcheck", 2),
            _sanitized("racecheck", 2),
        ),
    ),
    "kernels": Stage(
        "what kernels reach of a copy's speed",
        (_no_library, _no_device),
        (_benchmark("sums in one launch", "one_launch", share=1), _kernels(9, share=4)),
        measures=True,
    ),
    "bytes-all": Stage(
        "the cases that gpu-bytes leaves out",
        _BASIC,
        (_tests("bytes-all", _KERNELS, workers=_WORKERS, tier="gpu and exhaustive"),),
    ),
}
"""By name, in the order in which ``make gpu`` runs them."""

_ALONE = "torch alone"
_SLOW = "large_tensors or messages_agree or horovods"
"""Tests whose time is mostly the CPU's."""
_CHANGED = ("zip", "mxfp4", "dynamiq", "int4", "tlq_hs", "taco", "tahquant", "onebit")
"""Codecs whose kernels changed after they were last timed on a device."""


def _over_nccl(name: str, words: str, share: float) -> Run:
    return _tests(name, "nccl", "-k", words, workers=_FEW, share=share, needs=_no_nccl, after=_ALONE)


SELECTIONS = {
    "first": Stage(
        "what a device must show first: NCCL between two ranks, bytes of kernels",
        _BASIC,
        (
            _tests("probe", "probe", "-s", share=30),
            _tests(_ALONE, "nccl", "-k", "torch_alone", share=60, needs=_no_nccl),
            _over_nccl(
                "transport and failures",
                "(every_transport or subsets or lost or closing or error_of_the_device) and not peers",
                share=65,
            ),
            _over_nccl("trainers", "lean_on or (trainers and (raw or int8 or zip or sharded or horovod))", share=75),
            _tests("bytes", "codec_gpu sparse_gpu fused_gpu", "-k", f"not ({_SLOW})", workers=_MANY, share=55),
            _tests("trainers over gloo", "processes_gpu", workers=_WORKERS, share=20),
            _tests("more bytes", "conformance_gpu", "-k", f"not ({_SLOW})", workers=_MANY, share=15),
        ),
        seconds=270,
        minutes=True,
    ),
    "second": Stage(
        "what a device must show next: races, memory, the speed of what changed",
        _BASIC,
        (
            _tests("again", f"{_KERNELS} nccl processes_gpu planning_gpu", workers=_FEW, share=60, again=True),
            _tests(_ALONE, "nccl", "-k", "torch_alone", share=45, needs=_no_nccl),
            _over_nccl("one launch and peers", "one_launch or peers", share=50),
            _sanitized("memcheck", 70),
            _sanitized("racecheck", 60),
            _over_nccl("launch order", "others", share=45),
            _kernels(5, "--no-sparse", "--codecs", *_CHANGED, share=80),
            _benchmark(
                "sums in one launch", "one_launch", "--rounds", "5", "--ranks", "4", "8", "--codecs", "int4", share=30
            ),
            Run(
                "ncu",
                ("ncu", "--clock-control", "none", "--profile-from-start", "off", "--set", "full")
                + ("python", "-m", "tests.gpu.profiled"),
                share=45,
                needs=_no_profiler,
            ),
        ),
        seconds=420,
        minutes=True,
    ),
}
"""By name: parts of all stages, by value, for a machine that is there for minutes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are named, each to its end; return the worst status."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.gpu.stages", description=__doc__, formatter_class=form)
    names = [*STAGES, *SELECTIONS]
    parser.add_argument("stages", nargs="+", choices=names, metavar="STAGE", help=", ".join(names))
    driver.add_options(parser)
    parser.add_argument("--rehearse", action="store_true", help="run the tests on the CPU")
    parser.add_argument("-k", metavar="WORDS", help="only the tests that fit, as of pytest")
    parser.add_argument("--seconds", type=float, help="after which a stage is ended")
    options = parser.parse_args(arguments)
    if options.out is None and not set(options.stages).isdisjoint(SELECTIONS):
        parser.error(f"{' and '.join(SELECTIONS)} need --out, a folder for results and logs")
    status = 0
    for name in options.stages:
        status = max(status, _stage(name, options), key=(0, LACKS, 1).index)
    return status


def _stage(name: str, options: argparse.Namespace) -> int:
    stage, started = {**STAGES, **SELECTIONS}[name], time.time()
    print(f"gpu-{name}: {stage.about}", flush=True)
    if options.rehearse and not any(run.has_rehearsal for run in stage.runs):
        print(f"gpu-{name}: not run: it has no rehearsal, as it needs a device or its tools", flush=True)
        return LACKS
    if not options.rehearse and (missing := [lack for need in stage.needs if (lack := need()) is not None]):
        print(*(f"gpu-{name}: not run: it lacks {lack}" for lack in missing), sep="\n", flush=True)
        return LACKS
    device = torch.device("cpu" if options.rehearse else "cuda")
    # It asks the device for its name, which a test may leave unable to answer; but a stage may build the library.
    where = Environment.here(device, options.hardware) if stage.minutes else None
    title = f"{stage.about[0].upper()}{stage.about[1:]}{'; rehearsed on the CPU' if options.rehearse else ''}"
    until = started + (options.seconds or stage.seconds)
    again = any(run.again for run in stage.runs)
    runs = [run for run in stage.runs if options.k or not run.again]
    rows: list[dict[str, Any]] = []

    def shown() -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key != "tests"} for row in rows]

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context((options.out / f"gpu-{name}.log").open("ab")) if stage.minutes else None
        for number, run in enumerate(runs):
            lacks = _lack(run, rows, options) or (None if time.time() < until else "no time was left")
            row = {"what": run.name, "status": f"not run: {lacks}", "s": 0.0}
            if lacks is None:
                later = [each.share for each in runs[number:] if _lack(each, rows, options) is None]
                seconds = (until - time.time()) * run.share / sum(later)
                tests = None if again and not run.again else options.k
                row = _run(run, seconds, tests, folder / str(number), options, log)
            rows.append({**dict.fromkeys(_OUTCOMES, ""), **row})
            if where is not None:
                _report(name, row)
                write(options.out, f"gpu-{name}", title, where, rows, shown())
    failed = [row for row in rows if row["status"].startswith("failed")]
    unrun = [row for row in rows if row["status"].startswith("not run")]
    if not stage.measures:
        where = where or Environment.here(device, options.hardware)
        driver.finish(options, f"gpu-{name}", title, where, rows, shown())
    end = "failed" if failed else "not all of it was run" if unrun else "passed"
    print(f"gpu-{name}: {end}, after {time.time() - started:.0f} s", flush=True)
    return 1 if failed else LACKS if unrun else 0


_OF_MINUTES = {"PYTEST_ADDOPTS": "-W default", "NCCL_DEBUG": "WARN"}
"""Another torch may warn of what this one does not."""
_IMPATIENT = {
    "PYTEST_ADDOPTS": f"{_OF_MINUTES['PYTEST_ADDOPTS']} -o timeout=180 -o faulthandler_timeout=240",
    "GPU_TESTS_PATIENCE": "40",
}
_OUTCOMES = ("what", "status", "s", "passed", "failed", "skipped", "not run")


def _lack(run: Run, rows: list[dict[str, Any]], options: argparse.Namespace) -> str | None:
    """Return why a run would show nothing, or None."""
    if options.rehearse:
        return None if run.has_rehearsal else "it needs a device or its tools"
    if run.needs is not None and (lack := run.needs()) is not None:
        return f"it lacks {lack}"
    earlier = next((row["status"] for row in rows if row["what"] == run.after), "passed")
    return None if earlier == "passed" else f"without {run.after!r} it shows nothing ({earlier})"


def _run(
    run: Run, seconds: float, tests: str | None, log: Path, options: argparse.Namespace, output: IO[bytes] | None
) -> dict[str, Any]:
    """Run a program to its end, or until its time is over; return its row.

    Args:
        run: the program.
        seconds: its time.
        tests: words for ``-k``, in addition to those of the run.
        log: file that gets a line for each test.
        options: as parsed.
        output: file for the program's output and the tracebacks of failed tests; None: the terminal.
    """
    now = time.time()
    given = {
        "python": sys.executable,
        "OUT": str((options.out or ROOT / "build/gpu").resolve()),
        "SECONDS": f"{0.8 * seconds:.0f}",
    }
    words = [given.get(word, word) for word in run.words]
    if tests and "pytest" in run.words:
        words += ["-k", f"({run.words[run.words.index('-k') + 1]}) and ({tests})" if "-k" in run.words else tests]
    environment = {**os.environ, "PATH": PATH, **run.environment}
    environment |= {LOG: str(log), UNTIL: str(now + seconds * LAST_TEST / SECONDS)}
    if options.rehearse:
        environment["GPU_TESTS_ON"] = "cpu"
    if output is not None:
        _log(output, f"==== {run.name}: {shlex.join(words)}")
        environment |= _OF_MINUTES | ({} if options.rehearse else _IMPATIENT)
    # A process group of its own, so that nothing of it outlives its time: ranks that hang are its grandchildren.
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, start_new_session=True, stdout=output, stderr=output and subprocess.STDOUT
    )
    try:
        code = process.wait(seconds)
        status = "passed" if code == 0 else f"failed, status {code}"
        if tests and code == 5:  # pytest's, where it has collected none
            status = f"not run: no test fits -k {shlex.quote(tests)}"
    except subprocess.TimeoutExpired:
        status = f"failed: ended after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    told = []
    for line in log.read_text().splitlines() if log.exists() else ():
        with suppress(ValueError):  # the last line may be cut off
            told.append(json.loads(line))
    for test in told:
        # What pytest prints at its end is lost where it is ended.
        if (trace := test.pop("trace", None)) and output is not None and process.returncode != 1:
            _log(output, f"---- {test['test']}\n{trace}")
    count = Counter(test["outcome"] for test in told)
    row: dict[str, Any] = {"what": run.name, "status": status, "s": round(time.time() - now, 1)}
    if "pytest" in run.words:
        if not told and status == "passed":
            row["status"] = "failed: no test has run"
        elif count["not run"] and status == "passed":
            row["status"] = "not run: some tests, for which no time was left"
        row |= {outcome: count[outcome] for outcome in ("passed", "failed", "skipped", "not run")} | {"tests": told}
    return row


def _log(output: IO[bytes], text: str) -> None:
    output.write(f"\n{text}\n".encode(errors="replace"))
    output.flush()


def _report(name: str, row: dict[str, Any]) -> None:
    """Print how a run ended, and which of its tests failed: the end of the output may be all that is seen of it."""
    counts = ", ".join(f"{row[outcome]} {outcome}" for outcome in _OUTCOMES[3:] if row.get(outcome))
    print(f"gpu-{name}: {row['what']}: {row['status']}, {row['s']:.0f} s{', ' * bool(counts)}{counts}", flush=True)
    for test in [test for test in row.get("tests", ()) if test["outcome"] == "failed"][:20]:
        print(f"    failed: {test['test'].removeprefix('tests/gpu/')[:150]}", flush=True)


if __name__ == "__main__":
    driver.leave(main)
