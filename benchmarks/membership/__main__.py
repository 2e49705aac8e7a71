"""Workers of an elastic job are killed and others come, while it trains.

    python -m benchmarks.membership --out benchmarks/results
    python -m benchmarks.membership --soak 30 --out benchmarks/results

Four workers train with ``fl.init(elastic=True)``. Every few seconds one of them is killed by SIGKILL, in turn the one
that has rank 0, and the others after it; a moment later a new process joins. Then the same job makes as many steps
undisturbed, once more with another seed, which tells how far losses differ anyway, and without ``elastic=True``.

Each worker waits some milliseconds in each step as if a device computed, so that steps do not get faster with a worker
less on few cores. New processes fork from a server that has imported torch: what a host does until a worker can join is
no part of this. The stall of a worker is what the step in which the members change takes longer than the median step.

`--torchft` trains the same workload by torchft's DDP in f32, undisturbed and under the same kills.

`--soak` kills so many minutes, and measures after each arrival what the two workers keep that have been there longest:
after the first kill, of rank 0, these lead the job and follow, and the other two are killed in turn. Beside the memory
of the process it tells what malloc has given out, and what malloc keeps free between that.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks import driver
from benchmarks.arguments import count, one_of
from benchmarks.faults.isolation import leave
from benchmarks.faults.soak import growth, kept_by
from benchmarks.report import table
from benchmarks.training.workloads import MODELS
from fusionlayer.elastic import Generation
from fusionlayer.elastic.desk import reach
from fusionlayer.processes import Identity

from .summary import heap_of, row_of, scaled
from .torchft_worker import lighthouse
from .torchft_worker import main as work_with_torchft
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
    parser.add_argument("--torchft", action="store_true", help="the job under torchft, if torchft-nightly is installed")
    parser.add_argument("--soak", type=float, default=0.0, help="minutes: measure what workers that stay keep")
    parser.add_argument("--pause", type=float, default=20.0, help="milliseconds that a step waits (20)")
    driver.add_options(parser, timed=True, smoke=True)
    options = parser.parse_args(arguments)
    kills, every, after = (2, 2.0, 1.0) if options.smoke else (options.kills, options.every, options.after)
    environment = driver.begin(options, FIRST)
    _context.set_forkserver_preload(["benchmarks.membership.worker"])
    if options.soak:
        return _soak(options, environment, every, after)
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
    if options.torchft:
        jobs = (("undisturbed, before", 0, 0, steps), ("kills", kills, 0, None), ("undisturbed, after", 0, 0, steps))
    as_kills: int | None = None
    for name, number, seed, last in jobs:
        elastic = not name.startswith("not elastic")
        lines, events = run(
            *(options.model, seed, number, every, after, options.pause / 1000, last or as_kills, elastic),
            worker=work_with_torchft if options.torchft else work,
        )
        rows.append(row_of(name, lines, events))
        if number:
            as_kills = max(line["end"] for written in lines.values() for line in written if "end" in line)
    how = "torchft" if options.torchft else "int4"
    title = f"{kills} of {FIRST} workers are killed, one every {every:g} s, and others come: {options.model}, {how}"
    shown = [{key: value for key, value in row.items() if key != "events"} for row in rows]
    theme = "membership-torchft" if options.torchft else "membership"
    more = [] if options.torchft else [scaled(rows)]
    driver.finish(options, theme, title, environment, rows, shown, more=more)
    return 0


def _soak(options: Namespace, environment: dict[str, Any], every: float, after: float) -> int:
    """Kill and start workers for so many minutes; write what those who stay keep."""
    samples: list[dict[str, Any]] = []
    kills = max(4, int(60 * (0.2 if options.smoke else options.soak) / every))

    def measure(folder: Path, number: int) -> None:
        leader = Generation.decode((folder / "roster").read_text()).members[0]
        found = {"changes": 2 * (number + 1), "keys of the leader's desk": reach(leader.desk, 10.0).num_keys()}
        for pid, name in zip(_pids(folder), ("the leader", "a follower"), strict=False):
            found |= kept_by(pid, name) | heap_of(folder / f"{pid}.jsonl", name)
        samples.append(found)

    lines, events = run(options.model, 0, kills, every, after, options.pause / 1000, None, True, _sparing_two, measure)
    row = row_of("soak", lines, events)
    title = f"What workers that stay keep of {kills} that are killed and {kills} that come: {options.model}, int4"
    shown = [growth(quantity, samples, "changes") for quantity in samples[0] if quantity != "changes"]
    job = table("The job", [{key: value for key, value in row.items() if key != "events"}])
    driver.finish(options, "membership-soak", title, environment, [*samples, row], shown, more=[job])
    return int(row["changes with other bits"] > 0)


def _each_in_turn(number: int) -> int:
    return number % FIRST


def _sparing_two(number: int) -> int:
    return 0 if number == 0 else 2 + number % 2


def run(
    model: str,
    seed: int,
    kills: int,
    every: float,
    after: float,
    pause: float,
    last: int | None,
    elastic: bool,
    place_of: Callable[[int], int] = _each_in_turn,
    measure: Callable[[Path, int], None] | None = None,
    worker: Callable[..., None] = work,
) -> tuple[dict[int, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Run one job; return what each worker has written, by its process, and when whom the job lost and got.

    Args:
        model, seed: of the workload.
        kills: how many workers are killed.
        every, after: seconds from kill to kill, and from a kill until another worker comes.
        pause: seconds that a step waits.
        last: the step after which the job ends; None: some steps after the last change.
        elastic: whether it may lose workers.
        place_of: the rank that is killed, by the number of the kill.
        measure: called after each arrival, with the folder of the job and the number of the kill.
        worker: what each process runs.
    """
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        if worker is work_with_torchft:
            stack.enter_context(lighthouse(folder))
        workers: list[BaseProcess] = []

        def start() -> BaseProcess:
            started = _context.Process(target=worker, args=(name, len(workers), model, seed, pause, elastic))
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
                place = place_of(number)
                alive = [each.pid for each in workers if each.is_alive()]
                victim = _pids(folder)[place] if worker is work else alive[place]
                assert victim is not None
                events.append({"what": "kill", "at": time.monotonic(), "rank": place})
                os.kill(victim, signal.SIGKILL)
                _sleep_until(begun + number * every + after)
                events.append({"what": "join", "at": time.monotonic()})
                comer = start()
                _await(lambda comer=comer: _steps(folder, comer) > 0, workers)  # type: ignore[misc]
                if measure is not None:
                    measure(folder, number)
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
    members = json.loads((folder / "roster").read_text())["members"]
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
