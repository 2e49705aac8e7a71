"""Jobs that know only torch, and one rank to which something happens: the first rank alive names it, and its line."""

import inspect
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import fusionlayer as fl
from fusionlayer import health
from tests.harness import checkpoint, outcomes_of, run_ranks
from tests.tiers import tiered

pytestmark = pytest.mark.medium

CULPRIT = 1
HERE = Path(__file__).name


class Told(Exception):
    """Carries what a rank has logged out of it: the others are stuck, so it must not meet them any more."""


class _Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(1000)  # line: late
        return torch.zeros(1)


def _late() -> None:
    next(iter(DataLoader(_Slow())))


def _stopped() -> None:
    checkpoint("stops")


def _killed() -> None:
    checkpoint("dies")


def _other_type() -> None:
    dist.all_reduce(torch.ones(8, dtype=torch.int32))  # line: other_type
    time.sleep(100)


def _other_call() -> None:
    dist.barrier()  # line: other_call
    time.sleep(100)


def _leaves() -> None:
    fl.watch().close()
    time.sleep(100)


def _recv() -> None:
    dist.recv(torch.ones(8), 0)  # line: recv


CASES = {
    "late": (_late, r"rank 1 is late: it waits for data"),
    "stopped": (_stopped, r"rank 1 is stopped"),
    "killed": (_killed, r"rank 1 is gone"),
    "other_type": (_other_type, r"ranks differ in call \d+: rank 1 in all_reduce of \(8\) int32"),
    "other_call": (_other_call, r"ranks differ in call \d+: rank 1 in barrier"),
    "leaves": (_leaves, r"rank 1 has ended"),
    "recv": (_recv, r"rank 1 is late: it is in recv|wait for each other"),
}


def _line(mark: str) -> str | None:
    source = inspect.getsource(inspect.getmodule(_line)).splitlines()  # type: ignore[arg-type]
    found = [n for n, line in enumerate(source, 1) if line.endswith(f"# line: {mark}")]
    return f"{HERE}:{found[0]}" if found else None


def _names(told: Sequence[str], case: str) -> bool:
    """Return whether the culprit is named, with its line."""
    line = _line(case)
    return any(re.search(CASES[case][1], text) and (line is None or line in text) for text in told)


def _await_write(watcher: Any, line: str, there: Path | None) -> None:
    """Return when the watcher has written that this rank is at a line, or anywhere; then say so by a file."""
    while line not in (watcher._state.where or ""):
        time.sleep(0.05)
    written = watcher._state.serial
    while watcher._state.serial == written:
        time.sleep(0.05)
    if there is not None:
        there.touch()


def _job(rank: int, world: int, case: str, folder: str) -> None:
    os.environ["FUSIONLAYER_STATUS"] = f"{folder}/status.json"
    watcher = fl.watch(patience=1.5)
    assert watcher is not None
    for _ in range(5):
        dist.all_reduce(torch.ones(8))
    checkpoint("trained")
    there, line = Path(folder) / "there", _line(case)
    if rank == CULPRIT and line:
        threading.Thread(target=_await_write, args=(watcher, line, there), daemon=True).start()
    else:
        _await_write(watcher, "", there if rank == CULPRIT else None)
    if rank == CULPRIT:
        CASES[case][0]()
        time.sleep(1000)
    while not there.exists():
        time.sleep(0.05)
    _pending = dist.all_reduce(torch.ones(8), async_op=True)
    # Until the harness ends this job. On a busy machine another rank may be late first.
    end = time.monotonic() + 120  # what was told instead is worth seeing
    while rank or not (_names(watcher.lines, case) or time.monotonic() > end):
        time.sleep(0.1)
    report = health.read(Path(folder) / "status.json")
    while not report.findings or len(report.states) < world:  # until it has read what every rank wrote
        time.sleep(0.1)
        report = health.read(Path(folder) / "status.json")
    raise Told("\n".join(watcher.lines))


@pytest.mark.parametrize("case", tiered(CASES, lambda case: case in ("late", "stopped", "other_type")))
def test_the_culprit_is_named_with_its_line_while_others_wait(case: str, tmp_path: Path) -> None:
    signals = {(CULPRIT, "stops"): signal.SIGSTOP, (CULPRIT, "dies"): signal.SIGKILL}
    # A rank that is stopped or killed while it writes a store's file keeps it locked, or leaves half a line.
    outcome = outcomes_of(_one_waits, 3, case, str(tmp_path), signals=signals, store="tcp")[0]
    assert outcome.error[0] == "Told", (outcome.error, outcome.trace)
    assert _names([outcome.error[1]], case), outcome.error[1]
    report = health.read(tmp_path / "status.json")
    assert report.findings and len(report.states) == 3


def _one_waits(rank: int, world: int, case: str, folder: str) -> None:
    done = Path(folder) / "done"
    if rank:
        threading.Thread(target=_end_with, args=(done,), daemon=True).start()
    try:
        _job(rank, world, case, folder)
    finally:
        done.touch()
    time.sleep(100)


def _end_with(file: Path) -> None:
    """End the process when the file appears, wherever its other threads are stuck."""
    while not file.exists():
        time.sleep(0.1)
    os._exit(0)


def _first_lost(rank: int, world: int, folder: str) -> None:
    os.environ["FUSIONLAYER_STATUS"] = f"{folder}/status.json"
    watcher = fl.watch(patience=1.5)
    assert watcher is not None
    known = Path(folder) / "known"
    while rank and watcher._reporter.unknown:
        time.sleep(0.05)
    if rank:
        known.touch()
    while not known.exists():
        time.sleep(0.05)
    checkpoint("lost")
    while not any("rank 0 is stopped" in line for line in watcher.lines):
        time.sleep(0.1)
    raise Told("\n".join(watcher.lines))


@pytest.mark.exhaustive(
    guarded_by="tests/health/test_watch.py::test_the_culprit_is_named_with_its_line_while_others_wait"
)
def test_where_rank_0_is_stopped_the_next_one_tells(tmp_path: Path) -> None:
    outcomes = outcomes_of(_first_lost, 2, str(tmp_path), signals={(0, "lost"): signal.SIGSTOP})
    assert outcomes[1].error[0] == "Told" and "rank 0 is stopped" in outcomes[1].error[1]


def _healthy(rank: int, world: int, folder: str) -> tuple[list[str], int, float]:
    os.environ["FUSIONLAYER_STATUS"] = f"{folder}/status.json"
    before, begun = [f.__name__ for f in _torchs()], time.monotonic()
    watcher = fl.watch(patience=30)  # seconds; a busy machine may stop a rank for some of them
    assert watcher is not None
    noise = torch.Generator().manual_seed(rank)
    for step in range(40):
        time.sleep(0.1 * float(torch.rand((), generator=noise)) + (0.9 if step == 20 and rank == 2 else 0.0))
        dist.all_reduce(torch.ones(8))
        if step % 7 == 0:
            dist.broadcast(torch.ones(step + 1), step % world)
    assert before == [f.__name__ for f in _torchs()]
    watcher.close()
    return watcher.lines, watcher._state.serial, time.monotonic() - begun


def _torchs() -> Iterator[object]:
    yield from (dist.all_reduce, dist.broadcast, dist.ProcessGroup.allreduce)


def test_uneven_training_gives_no_alarm_and_writes_seldom(tmp_path: Path) -> None:
    for lines, written, seconds in run_ranks(_healthy, 3, str(tmp_path)):
        assert lines == []
        assert written <= 8 + seconds  # one state in 1.5 s, and one for each change
    assert not (tmp_path / "status.json").exists()
