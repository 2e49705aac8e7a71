"""torch's own tests of torch.distributed on gloo, and on the backend that compresses every call it can, losslessly.

The tests are those of the installed torch, ``torch.testing._internal.distributed.distributed_test``, unchanged. Each
runs in processes of its own, so one that fails does no harm to others. The backend ``fusionlayer`` gets the codec zip,
which keeps every bit, for calls of all sizes. What the tests do for the name gloo alone, they do for both backends.
"""

import json
import logging
import multiprocessing as mp
import os
import re
import sys
import tempfile
import types
import unittest
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from fusionlayer.backend import OPS

__all__ = ["OURS", "PEER", "verdicts"]

PEER, OURS = "gloo", "fusionlayer"
POLICY = {"min_bytes": 0, "rules": [{"codec": "zip", "op": list(OPS)}]}
UNLOCKED = "Only MPI supports"
"""What torch says of tests that it keeps to MPI, though gloo can do now what they test."""

Verdict = tuple[str, str, dict[str, int]]
"""``passed``, ``failed`` or ``skipped``; what the test says; and the number of compressed calls of each kind."""

_context = mp.get_context("spawn")


def verdicts(
    backend: str, ranks: int, parts: Sequence[str] = ("",), without: Sequence[str] = (), seconds: int = 60
) -> Iterator[tuple[str, Verdict]]:
    """Run torch's tests in the order of their names; yield the name and the verdict of each."""
    told, tells = _context.Pipe(duplex=False)
    process = _context.Process(target=_main, args=(backend, ranks, parts, without, seconds, tells))
    process.start()
    tells.close()
    try:
        while True:
            yield told.recv()
    except EOFError:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the process of torch's tests has ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


def _main(
    backend: str, ranks: int, parts: Sequence[str], without: Sequence[str], seconds: int, tells: Connection
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fusionlayer-torch-suite-"))
    case = _suite(backend, ranks, seconds, folder)
    for name in unittest.TestLoader().getTestCaseNames(case):
        if name in without or not any(part in name for part in parts):
            continue
        result = unittest.TestResult()
        case(name).run(result)
        calls: Counter[str] = Counter()
        for file in folder.glob("calls.*"):
            calls.update(json.loads(file.read_text()))
            file.unlink()
        wrong = [text for _, text in result.errors + result.failures]
        if wrong:
            tells.send((name, ("failed", _essence(wrong[0]), calls)))
        else:
            tells.send((name, ("skipped", result.skipped[0][1], {}) if result.skipped else ("passed", "", calls)))


def _suite(backend: str, ranks: int, seconds: int, folder: Path) -> type[unittest.TestCase]:
    """Return torch's tests for ``backend``; each leaves its counts of compressed calls in ``folder``."""
    # torch's module reads the environment at import, when decorators decide which tests the backend can do.
    settings = {"backend": POLICY} if backend == OURS else {}
    (folder / "settings.yaml").write_text(json.dumps(settings))
    os.environ.update(
        BACKEND=PEER,
        WORLD_SIZE=str(ranks),
        TEMP_DIR=str(folder),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(seconds),
        FUSIONLAYER_CONFIG=str(folder / "settings.yaml"),
    )
    # Only tests of what is printed need this package.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    import torch.distributed as dist
    from torch.testing._internal import common_distributed as common
    from torch.testing._internal.distributed import distributed_test as tests

    from fusionlayer.backend.group import CompressingGroup

    logging.getLogger(common.__name__).setLevel(logging.CRITICAL)
    common.TIMEOUT_OVERRIDE.clear()
    tests.BACKEND = backend
    if ranks > 2:
        os.environ["BACKEND"] = "mpi"  # with another name, tests of groups of two ask for eight ranks
    for names in (tests.PROFILING_SUPPORTED_BACKENDS, tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        names.append(backend)
    of_name, barrier, make = tests.get_profiling_event, dist.monitored_barrier, CompressingGroup.__init__
    counts: list[Counter[str]] = []

    def event(name: str, *more: Any, **options: Any) -> Any:
        """Return the events of a name, else those of gloo: a call that passes is one."""
        found = of_name(name, *more, **options)
        if not found:
            found = of_name(name.replace(OURS, PEER), *more, **options)
            for each in found:
                each.name = each.name.replace(PEER, backend)
        return found

    def monitored_barrier(*more: Any, **options: Any) -> None:
        """Do it, though the group's name is not gloo."""
        with mock.patch.object(dist.Backend, "GLOO", backend):
            barrier(*more, **options)

    def counted(self: CompressingGroup, *more: Any, **options: Any) -> None:
        make(self, *more, **options)
        counts.append(self._calls)

    tests.get_profiling_event = event
    dist.monitored_barrier = monitored_barrier
    mock.patch.object(CompressingGroup, "__init__", counted).start()

    class Suite(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(mp.get_context("fork").Process)

        def tearDown(self) -> None:
            processes = self.processes
            super().tearDown()
            for process in processes:
                process.kill()
                process.join()

        def _test_accumulate_gradients_no_sync(self, *more: Any, **options: Any) -> None:
            with mock.patch.object(tests, "BACKEND", PEER):  # it looks at the name when it runs
                super()._test_accumulate_gradients_no_sync(*more, **options)

        @classmethod
        def _run(cls, rank: int, *more: Any, **options: Any) -> None:
            output = os.open(os.environ.get("TORCH_SUITE_LOG", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            try:
                super()._run(rank, *more, **options)
            finally:
                (folder / f"calls.{rank}").write_text(json.dumps(sum(counts, Counter())))

    for name in dir(Suite):
        if UNLOCKED in getattr(getattr(Suite, name), "__unittest_skip_why__", ""):
            getattr(Suite, name).__unittest_skip__ = False
    return Suite


def _essence(text: str) -> str:
    """Return the last error that the first failing rank tells, without its trace."""
    errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|Mismatch|Exit)\b.*", text, re.MULTILINE)
    told = [error for error in errors if "exited with error code" not in error]
    return (told or errors or text.splitlines()[-1:])[0]
