"""Workers of an elastic job are killed and others come, while it trains.

    python -m benchmarks.membership --out benchmarks/results

Four workers train with ``fl.init(elastic=True)``. Every few seconds one of them is killed by SIGKILL, in turn the one
that has rank 0, and the others after it; a moment later a new process joins. Then the same job makes as many steps
undisturbed, once more with another seed, which tells how far losses differ anyway, and without ``elastic=True``.

Each worker waits some milliseconds in each step as if a device computed, so that steps do not get faster with a worker
less on few cores. New processes fork from a server that has imported torch: what a host does until a worker can join is
no part of this. The stall of a worker is what the step in which the members change takes longer than the median step.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks import driver
from benchmarks.arguments import count, one_of
from benchmarks.faults.isolation import leave
from benchmarks.training.workloads import MODELS
from fusionlayer.process.processes import Identity

from .summary import row_of, scaled
from .worker import FIRST
from .worker import main as work

__all__ = ["main", "run"]

_context = mp.get_context("forkserver")
_PATIENCE = 300.0
# Steps of a job that is only timed.
_TIMED, _TIMED_SMOKE = 320, 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("membership", __doc__)
    parser.add_argument("--model", type=one_of(tuple(MODELS)), default="gpt-small", help="(gpt-small)")
    parser.add_argument("--kills", type=count(), default=20, help="workers that are killed, one after the other (20)")
    parser.add_argument("--every", type=float, default=2.5, help="seconds from one kill to the next (2.5)")
    parser.add_argument("--after", type=float, default=1.0, help="seconds until another comes (1)")
    parser.add_argument("--pause", type=float, default=20.0, help="milliseconds that a step waits (20)")
    driver.add_options(parser, timed=True, smoke=True)
    options = parser.parse_args(arguments)
    kills, every, after = (2, 2.0, 1.0) if options.smoke else (options.kills, options.every, options.after)
    environment = driver.begin(options, FIRST)
    _context.set_forkserver_preload(["benchmarks.membership.worker"])
    rows: list[dict[str, Any]] = []
    steps = _TIMED_SMOKE if options.smoke else _TIMED
    # The name of each job, its kills, its seed, and its steps; None: as many as that with kills.
    jobs = (
        ("not elastic, before", 0, 0, steps),
        ("undisturbed, before", 0, 0, steps),
        ("kills", kills, 0, None),
        ("undisturbed, after", 0, 0, steps),
        ("not elastic, after", 0, 0, steps),
        ("undisturbed", 0, 0, None),
        ("undisturbed, another seed", 0, 1, None),
    )
    as_kills: int | None = None
    for name, number, seed, last in jobs:
        elastic = not name.startswith("not elastic")
        lines, events = run(
            *(options.model, seed, number, every, after, options.pause / 1000, last or as_kills, elastic)
        )
        rows.append(row_of(name, lines, events))
        if number:
            as_kills = max(line["end"] for written in lines.values() for line in written if "end" in line)
    title = f"{kills} of {FIRST} workers are killed, one every {every:g} s, and others come: {options.model}, int4"
    shown = [{key: value for key, value in row.items() if key != "events"} for row in rows]
    driver.finish(options, "membership", title, environment, rows, shown, more=[scaled(rows)])
    return 0


def run(
    model: str,
    seed: int,
    kills: int,
    every: float,
    after: float,
    pause: float,
    last: int | None,
    elastic: bool,
) -> tuple[dict[int, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Run one job; return what each worker has written, by its process, and when whom the job lost and got.

    Args:
        model, seed: of the workload.
        kills: how many workers are killed.
        every, after: seconds from kill to kill, and from a kill until another worker comes.
        pause: seconds that a step waits.
        last: the step after which the job ends; None: some steps after the last change.
        elastic: whether it may lose workers.
    """
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workers: list[BaseProcess] = []

        def start() -> BaseProcess:
            started = _context.Process(target=work, args=(name, len(workers), model, seed, pause, elastic))
            started.start()
            workers.append(started)
            return started

        try:
            for _ in range(FIRST):
                start()
            _await(lambda: all(_steps(folder, each) > 10 for each in workers), workers)
            begun = time.monotonic()
            for number in range(kills):
                _sleep_until(begun + number * every)
                place = number % FIRST
                events.append({"what": "kill", "at": time.monotonic(), "rank": place})
                os.kill(_pids(folder)[place], signal.SIGKILL)
                _sleep_until(begun + number * every + after)
                events.append({"what": "join", "at": time.monotonic()})
                comer = start()
                _await(lambda comer=comer: _steps(folder, comer) > 0, workers)  # type: ignore[misc]
            if last is None:
                _sleep_until(begun + kills * every)
                last = max(_steps(folder, each) for each in workers) + 20
            Path(folder, "stop.new").write_text(str(last))
            Path(folder, "stop.new").rename(folder / "stop")
            for each in workers:
                each.join(300.0)
        finally:
            for each in workers:
                if each.is_alive():
                    each.kill()
        return {
            int(path.stem): [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            for path in folder.glob("*.jsonl")
        }, [{**event, "at": event["at"] - begun} | {"begun": begun} for event in events]


def _pids(folder: Path) -> list[int]:
    """Return the processes of the members, in the order of ranks."""
    members = json.loads((folder / "members").read_text())["members"]
    return [Identity.decode(member["identity"].encode()).pid for member in members]


def _steps(folder: Path, worker: BaseProcess) -> int:
    """Return the step that a worker has written last; 0 if none."""
    path = folder / f"{worker.pid}.jsonl"
    if not path.exists():
        return 0
    lines = path.read_bytes()[-2000:].splitlines()[-2:]
    found = [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]
    return max((int(line.get("step", 0)) for line in found), default=0)


def _await(condition: Any, workers: Sequence[BaseProcess]) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > end or any(each.exitcode not in (None, -signal.SIGKILL) for each in workers):
            raise SystemExit(f"workers do not come as far as expected: {[each.exitcode for each in workers]}")
        time.sleep(0.01)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


if __name__ == "__main__":
    leave("benchmarks.membership", main)
