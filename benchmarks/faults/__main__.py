"""Attacks on running jobs, and what the surviving ranks make of them; beside plain DDP on gloo.

    python -m benchmarks.faults --out benchmarks/results
    python -m benchmarks.faults --only kills --rounds 2
    python -m benchmarks.faults --smoke

Ranks are killed at every point of their lives, stopped, end by themselves, fork, find disks full and links down, get
connections of strangers and bits that are others, or run another program than the rest. Every surviving rank must
tell in time, and rightly, who it was; or it must train to the parameters of an undisturbed run.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import driver
from benchmarks.arguments import comma_separated, count, one_of
from benchmarks.lab import Network, why_not

from .attacks import ATTACKS, controls
from .controller import lab_field, local_field
from .isolation import leave
from .job import Job, Outcome
from .rounds import Round, Rounds
from .summary import table_of, worst
from .verdict import GOALS

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 if something happened that must not be."""
    parser = driver.make_parser("faults", __doc__)
    parser.add_argument("--only", type=comma_separated(one_of(tuple(ATTACKS))), default=tuple(ATTACKS), help="themes")
    parser.add_argument("--fronts", type=comma_separated(str), help="fronts whose names begin so (all)")
    parser.add_argument("--rounds", type=count(), help="of each attack (as the committed result has)")
    parser.add_argument("--lanes", type=count(), default=2, help="rounds that run at once (2)")
    parser.add_argument("--timeout", type=float, help=f"seconds that ranks wait for each other ({Job.timeout:g})")
    parser.add_argument("--trust", action="store_true", help="leave out the rounds that are bad on purpose")
    parser.add_argument("--list", action="store_true", help="only say which rounds there are")
    driver.add_options(parser, smoke=True)
    options = parser.parse_args(arguments)
    rounds = [round_ for name in options.only for round_ in _rounds(name, options.rounds, options.smoke)]
    if options.fronts:
        rounds = [round_ for round_ in rounds if round_.job.front.startswith(options.fronts)]
    if options.timeout:
        rounds = [replace(round_, job=replace(round_.job, timeout=options.timeout)) for round_ in rounds]
    if options.list:
        print("\n".join(f"{round_.attack}: {round_.job.front}, {round_.what}" for round_ in rounds))
        return 0
    environment = driver.begin(options)
    skipped = []
    if any(round_.hosts for round_ in rounds) and (reason := why_not(Network(3))):
        skipped.append(f"not played: flaps and links that are down, since {reason}")
        rounds = [round_ for round_ in rounds if not round_.hosts]
    if not options.trust:
        _try_judge(options.lanes)
    begun = time.monotonic()
    rows = play(rounds, options.lanes)
    title = f"What ranks make of attacks: {len(rows)} rounds in {time.monotonic() - begun:.0f} s"
    notes = "\n".join([*skipped, *worst(rows)])
    driver.finish(
        options,
        "faults",
        title,
        environment,
        rows,
        table_of(rows),
        more=[notes],
    )
    return 1 if any(row["ours"] and set(row["verdict"]) & {*GOALS, "not attacked"} for row in rows) else 0


def _try_judge(lanes: int) -> None:
    """End the program unless rounds that are bad on purpose are judged so."""
    known = list(controls())
    for (kind, _), row in zip(known, play([round_ for _, round_ in known], lanes), strict=True):
        if kind not in row["verdict"]:
            said = f"it says {row['verdict']}: {row['why']}"
            raise SystemExit(f"the judge itself fails: {row['what']} is {kind!r}, and {said}")


def _rounds(name: str, wanted: int | None, smoke: bool) -> list[Round]:
    theme = ATTACKS[name]
    made = list(theme.make(wanted or (1 if smoke else theme.rounds)))
    if not smoke:
        return made
    step = len(made) / theme.few if theme.few else 0
    return [made[int(step * number)] for number in range(theme.few)]


def play(rounds: Sequence[Round], lanes: int) -> list[dict[str, Any]]:
    """Return the rows of all rounds, in their order; ``lanes`` of them are played at once."""
    rows: dict[int, dict[str, Any]] = {}
    references: dict[str, list[Outcome]] = {}
    failures: list[BaseException] = []
    for hosts in sorted({round_.hosts for round_ in rounds}):
        places: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place, round_ in enumerate(rounds):
            if round_.hosts == hosts:
                places.put(place)
        arguments = (rounds, places, hosts, references, rows, failures)
        threads = [threading.Thread(target=_lane, args=arguments) for _ in range(min(lanes, places.qsize()))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
    return [rows[place] for place in range(len(rounds))]


def _lane(
    rounds: Sequence[Round],
    places: queue.SimpleQueue[int],
    hosts: int,
    references: dict[str, list[Outcome]],
    rows: dict[int, dict[str, Any]],
    failures: list[BaseException],
) -> None:
    """Play rounds on a field of this thread's own, until there are none or another lane has failed."""
    try:
        with lab_field(hosts) if hosts else local_field() as field:
            player = Rounds(field, references)
            while not failures:
                place = places.get_nowait()
                rows[place] = player.play(rounds[place])[1]
                _tell(rows[place])
    except queue.Empty:
        pass
    except BaseException as error:
        failures.append(error)


def _tell(row: dict[str, Any]) -> None:
    if row["attack"] != "control" and row["verdict"] != ["ok"]:
        print(
            f"{row['attack']}: {row['front']}, {row['world']} ranks, store of {row['keeper']}, {row['what']}: "
            f"{', '.join(row['verdict'])}: {row['why'][:300]}",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    leave("benchmarks.faults", main)
