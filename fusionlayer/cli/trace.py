"""``fusionlayer trace``: how the time of a step was spent, from the timelines of a run."""

from __future__ import annotations

import argparse
import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .arguments import count
from .breakdown import Breakdown, break_down
from .tables import print_table

__all__ = ["add_parser"]

_EPILOG = """\
Write the timelines with FUSIONLAYER_TIMELINE=trace.json; each rank makes a file trace.json.RANK, which Perfetto
(ui.perfetto.dev) and chrome://tracing show as well. "other" is what lies between the spans: data, gradient clipping,
whatever else the training loop does. The loss counts as backward.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "trace",
        help="break steps down into forward, backward, compression and exposed communication, from timelines",
        description="Break the mean step of a run down, from the timelines of its ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "timelines", nargs="+", metavar="FILE", help="timelines, or what FUSIONLAYER_TIMELINE was, for all ranks"
    )
    parser.add_argument(
        "--skip", type=count, default=3, metavar="N", help="first steps to leave out: they plan and warm up (default 3)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the breakdown that ``options`` ask for."""
    ranks = [_break_down(path, options.skip) for path in _files(options.timelines)]
    if options.json:
        print(json.dumps([rank.as_dict() for rank in ranks], indent=1))
        return
    _print_phases(ranks)
    for rank in ranks:
        _print_buckets(rank)


def _files(names: Sequence[str]) -> list[Path]:
    files = []
    for name in names:
        found = [Path(name)] if Path(name).is_file() else [Path(path) for path in glob.glob(f"{glob.escape(name)}.*")]
        ranks = [path for path in found if path.is_file()]
        if not ranks:
            raise ConfigError(f"no timeline {name} and none of a rank, {name}.0; run with FUSIONLAYER_TIMELINE={name}")
        files += sorted(ranks, key=lambda path: (len(path.name), path.name))
    return files


def _break_down(path: Path, skip: int) -> Breakdown:
    try:
        events = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"timeline {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no timeline of fusionlayer: it is no text") from error
    except ValueError as error:
        raise ConfigError(f"timeline {path} is not complete: {error}; a run that ends orderly completes it") from error
    try:
        spans = [event for event in events if event["ph"] == "X"]
        if not all({"name", "ts", "dur", "pid", "tid", "args"} <= event.keys() for event in spans):
            raise LookupError
        return break_down(spans, skip, str(path))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is no timeline of fusionlayer; expected a list of events with ph, name, ts, dur, pid, tid and args"
        ) from error


def _print_phases(ranks: Sequence[Breakdown]) -> None:
    rows = []
    for rank in ranks:
        for name, seconds in [*rank.phases.items(), ("step", rank.step)]:
            rows.append((f"{rank.rank}", name, f"{1e3 * seconds:.2f}", f"{seconds / rank.step:.0%}"))
        hidden = f"{1e3 * rank.communication:.2f}"
        rows.append((f"{rank.rank}", "(communication, hidden or not)", hidden, f"{rank.communication / rank.step:.0%}"))
    steps = " and ".join(sorted({str(rank.steps) for rank in ranks}))
    print_table(f"Mean of {steps} steps", ("rank", "phase", "ms", "of step"), rows, right=(0, 2, 3))


def _print_buckets(rank: Breakdown) -> None:
    names = sorted({name for bucket in rank.buckets for name in bucket.phases})
    rows = [
        (
            str(bucket.index),
            *(f"{1e3 * value:.2f}" for value in (bucket.start, bucket.end, bucket.waited)),
            *(f"{1e3 * bucket.phases[name]:.2f}" if name in bucket.phases else "" for name in names),
        )
        for bucket in rank.buckets
    ]
    columns = ("bucket", "starts", "ends", "waited for", *names)
    title = f"Buckets of rank {rank.rank}: median ms, starts and ends from the start of backward"
    print_table(title, columns, rows, right=range(len(columns)))
