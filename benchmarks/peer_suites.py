"""A peer's own tests on the peer and on what stands in for it here, each test in processes of its own.

    python -m benchmarks.peer_suites test/parallel/test_torch.py --out benchmarks/results

The suite is Horovod's, from its repository, with the folder ``test/utils``. The same file runs on both sides: in the
processes of ours ``horovod.torch`` is a name of ``fusionlayer.torch``. A test that fails on one rank alone leaves the
others waiting; so its processes are ended, and the next test gets new ones. Without Horovod its columns are left out.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import multiprocessing as mp
import os
import sys
import time
import types
import unittest
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from benchmarks.horovod import OURS, PEER, meet, place

__all__ = ["main"]

KINDS = ("skipped", "passed", "waited", "failed")
"""How a test ends, the worst last; it has waited if a rank was not done at the deadline."""

_context = mp.get_context("forkserver")


def _tests_of(suite: Path) -> list[str]:
    """Return ``Class.test`` of all tests in a file, in its order."""
    classes = [node for node in ast.parse(suite.read_text()).body if isinstance(node, ast.ClassDef)]
    found = [(c.name, f.name) for c in classes for f in c.body if isinstance(f, ast.FunctionDef)]
    return [f"{name}.{test}" for name, test in found if test.startswith("test")]


def _run(side: str, suite: Path, test: str, ranks: int, seconds: float) -> tuple[str, str]:
    """Run a test in new processes, which are killed when one has failed or ``seconds`` are over.

    Returns:
        the worst of what the ranks report, one of KINDS, and what that rank says.
    """
    _server, common = meet(side, ranks)
    ends: dict[Connection, int] = {}
    processes = []
    for rank in range(ranks):
        ours, theirs = _context.Pipe()
        arguments = (side, str(suite), test, {**common, **place(PEER, rank, ranks)}, theirs)
        processes.append(_context.Process(target=_rank_main, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        ends[ours] = rank
    reports = {rank: ("waited", f"rank {rank} was not done in {seconds:g} s") for rank in range(ranks)}
    deadline = time.monotonic() + seconds
    while ends and (left := deadline - time.monotonic()) > 0 and "failed" not in dict(reports.values()):
        for end in wait(list(ends), left):
            assert isinstance(end, Connection)
            rank = ends.pop(end)
            try:
                reports[rank] = end.recv()
            except EOFError:
                reports[rank] = "failed", f"rank {rank}: the process ended"
    for process in processes:
        process.kill()
        process.join()
    return max(reports.values(), key=lambda report: KINDS.index(report[0]))


class _Result(unittest.TestResult):
    """Reports how a test ends at once: what comes after one that has failed may wait for other ranks."""

    def __init__(self, report: Connection) -> None:
        super().__init__()
        self._report = report

    def addSuccess(self, test: Any) -> None:  # noqa: N802 - unittest's names
        self._report.send(("passed", ""))

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._report.send(("skipped", reason))

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self._report.send(("failed", f"rank {os.environ['HOROVOD_RANK']}: {err[0].__name__}: {err[1]}"))

    addError = addFailure  # noqa: N815


def _rank_main(side: str, suite: str, test: str, environment: dict[str, str], report: Connection) -> None:
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    result = _Result(report)
    try:
        case, name = test.split(".")
        each = getattr(_load(suite, side), case)(name)
        if hasattr(getattr(each, name), "pytestmark"):
            result.addSkip(each, "marked for pytest")
        else:
            each.run(result)
    except Exception as error:
        result.addError(None, (type(error), error, None))
    report.poll(None)  # until the killing: a rank that leaves early looks like a crash to the others


def _load(suite: str, side: str) -> types.ModuleType:
    """Import a suite; on our side what it imports from Horovod is ours, or nothing."""
    import torch

    torch.optim.Muon.__module__ = ""  # younger than the suite, which gives any model to each of torch's optimizers
    stand_ins: dict[str, Any] = {"mock": mock}
    if side != PEER:
        import fusionlayer.torch

        horovod, threads = types.SimpleNamespace(torch=fusionlayer.torch), types.SimpleNamespace(in_thread=None)
        stand_ins |= {"horovod": horovod, "horovod.torch": fusionlayer.torch, "horovod.runner": horovod}
        stand_ins |= {"horovod.runner.util": horovod, "horovod.runner.util.threads": threads}
    sys.modules.update(stand_ins)
    spec = importlib.util.spec_from_file_location("suite", suite)
    assert spec is not None and spec.loader is not None
    module = sys.modules["suite"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str] | None = None) -> int:
    """Run the suite, print the tables, and write the result files if asked to."""
    parser = driver.make_parser("peer_suites", __doc__)
    parser.add_argument("suite", type=Path, help="file of the peer's tests")
    parser.add_argument("--ranks", type=comma_separated(count(2)), default=(2, 3, 4), help="numbers of processes")
    parser.add_argument("--tests", type=comma_separated(str), default=("",), help="parts of the names of tests to run")
    parser.add_argument("--seconds", type=count(), default=60, help="until the processes of a test are ended")
    parser.add_argument("--lanes", type=count(), default=1, help="tests that run at once")
    parser.add_argument("--kept", type=Path, help="file of ends of tests: those that it has are not sought again")
    driver.add_options(parser)
    options = parser.parse_args(arguments)
    environment = driver.begin(options)
    tests = [test for test in _tests_of(options.suite) if any(part in test for part in options.tests)]
    if not tests:
        parser.error(f"no test of {options.suite} has one of these in its name: {', '.join(options.tests)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    _context.set_forkserver_preload(["benchmarks.driver", "benchmarks.horovod", "fusionlayer.torch"])
    found = json.loads(options.kept.read_text()) if options.kept and options.kept.exists() else {}
    sides = [PEER, OURS] if importlib.util.find_spec(PEER) else [OURS]
    columns = {f"{side}, {ranks}": (side, ranks) for ranks in options.ranks for side in sides}

    def run(column: str, test: str) -> None:
        side, ranks = columns[column]
        found.setdefault(column, {})[test] = _run(side, options.suite, test, ranks, options.seconds)
        if options.kept:
            options.kept.write_text(json.dumps(found, indent=1))

    lanes = ThreadPoolExecutor(options.lanes)
    try:
        todo = [(column, test) for column in columns for test in tests if test not in found.get(column, {})]
        for done in driver.follow("peer_suites", [lanes.submit(run, *each) for each in todo], lambda _: "tests"):
            done.result()
    finally:
        lanes.shutdown(cancel_futures=True)
    shown = [{"test": test, **{column: found[column][test][0] for column in columns}} for test in tests]
    rows = [{**row, "said": {column: found[column][row["test"]][1] for column in columns}} for row in shown]
    counts = [{"on": column, **{k: sum(row[column] == k for row in shown) for k in KINDS}} for column in columns]
    title = f"Tests of {options.suite.name} by number of ranks"
    driver.finish(options, "peer-suites", title, environment, rows, counts, more=[driver.table("By test", shown)])
    return 0


if __name__ == "__main__":
    driver.leave(main)
