"""Faults in jobs that `fl.watch()` watches: whether rank 0's log names who it was, and where.

    python -m benchmarks.watching --out benchmarks/results
    python -m benchmarks.watching --only killed,slow_loader --backends gloo
    python -m benchmarks.watching --healthy 1800

Each round trains a program that knows only torch, `benchmarks.watching.program`, on three ranks, with gloo or with the
backend "fusionlayer", and does one thing to rank 1. A round is good if within ten seconds the log of rank 0, or of the
first rank alive, has a line that blames rank 1 and names the line of the program. `--healthy` trains so many seconds
with steps of uneven length and counts lines: each is a false alarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from benchmarks import driver
from benchmarks.arguments import comma_separated, count, one_of

from .program import FAULTS
from .rounds import LIMIT, RANKS, play, why_no_lab

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 if over one fault was missed, or if there were false alarms."""
    parser = driver.make_parser("watching", __doc__)
    parser.add_argument("--only", type=comma_separated(one_of(tuple(FAULTS))), default=tuple(FAULTS), help="faults")
    parser.add_argument("--backends", type=comma_separated(str), default=("gloo", "fusionlayer"), help="of the jobs")
    parser.add_argument("--healthy", type=count(), default=0, help="seconds of healthy, uneven training instead")
    driver.add_options(parser)
    options = parser.parse_args(arguments)
    environment = driver.begin(options)
    faults = [fault for fault in options.only if fault != "slow_interface" or not why_no_lab()]
    rows = []
    for backend in options.backends:
        for fault in ("",) if options.healthy else faults:
            row = play(fault, backend, uneven=0.4 if not fault else 0.0, seconds=float(options.healthy or 600))
            rows.append(row)
            mark = "good" if row.is_good else "BAD"
            print(f"{mark:5}{backend:12}{row.fault:22}{row.seconds or -1:6.1f} s  {row.line}", flush=True)
            for other in row.others:
                print(f"{'':48}{other}", flush=True)
    good = sum(row.is_good for row in rows)
    if options.healthy:
        title = f"Healthy, uneven training for {options.healthy} s on {RANKS} ranks: false alarms"
        shown = [
            {"backend": r.backend, "false alarms": len(r.others), "thread's share of a core": r.cost} for r in rows
        ]
    else:
        title = f"Faults on {RANKS} ranks: {good} of {len(rows)} named with rank and place within {LIMIT:g} s"
        shown = [
            {
                "backend": row.backend,
                "fault": row.fault,
                "named after (s)": row.seconds,
                "what rank 0's log says": row.line,
            }
            for row in rows
        ]
    theme = "watching-healthy" if options.healthy else "watching"
    driver.finish(options, theme, title, environment, [asdict(row) for row in rows], shown)
    return int(len(rows) - good > (0 if options.healthy else 1))


if __name__ == "__main__":
    driver.leave(main)
