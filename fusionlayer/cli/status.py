"""``fusionlayer status``: the activity of a running job's ranks, stragglers, and the cause of a failure."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from ..base.errors import FusionLayerError
from ..health import Report, read
from ..health import reports as known
from ..health.state import RankState
from .tables import Column, Table, print_text, show
from .units import BYTES, in_words

_HOME, _CLEAR = "\x1b[H", "\x1b[J"
_SHOWN = 8
"""Lines of the log that are shown."""


def run(options: argparse.Namespace) -> int:
    """Print the state of a job, again and again on a terminal; return the exit status."""
    path = options.file or _newest()
    report = read(path)
    if options.json:
        print(json.dumps(asdict(report), indent=1))
        return 0
    if options.once or not sys.stdout.isatty():
        page(report)
        return 0
    print(_HOME + _CLEAR, end="")
    while True:
        print(_HOME, end="")
        page(report)
        print(_CLEAR, end="", flush=True)
        if report.life != "runs":
            return 0
        time.sleep(options.every)
        if not path.exists():
            print("the job has ended well")
            return 0
        report = read(path)


def _newest() -> Path:
    found = known()
    if not found:
        raise FusionLayerError(
            "no job of this user is watched on this host; start it with FUSIONLAYER_WATCH=1, call fl.watch() in it, or "
            "name the file of another job"
        )
    return found[0]


def page(report: Report, now: float | None = None) -> None:
    """Print a report."""
    now = time.time() if now is None else now
    age = now - report.written
    said = report.life if report.life != "runs" or age < 10 else f"runs, but was last seen {age:.0f} s ago"
    print_text(f"{report.command}: {said}")
    print_text(f"{report.size} ranks, watched for {_span(report.written - report.started)} by {report.writer}")
    show([_table(report)])
    if report.findings:
        for finding in report.findings:
            print_text(f"! {finding.text}")
    elif report.life == "runs":
        print_text("No rank is behind.")
    if report.past:
        print()
        for at, line in report.past[-_SHOWN:]:
            print_text(f"{time.strftime('%H:%M:%S', time.localtime(at))} {line}")


def _table(report: Report) -> Table:
    states = sorted(report.states, key=lambda state: state.rank)
    blamed = {rank: finding.kind for finding in report.findings for rank in finding.ranks}
    steps = [state.counts.get("steps") for state in states]
    sent = [state.counts.get("bytes_sent") for state in states]
    columns = [
        Column("rank", [str(state.rank) for state in states]),
        Column("state", [_word(state, blamed.get(state.rank)) for state in states], text=True),
        Column("still", [f"{state.idle:.0f}" for state in states], "s"),
        Column("calls", [str(sum(each.entered for each in state.channels.values())) for state in states], gives_way=3),
    ]
    if any(steps):
        columns.append(Column("steps", [f"{value or 0:.0f}" for value in steps], gives_way=1))
    if any(sent):
        columns.append(Column("sent", [in_words(value or 0.0, BYTES) for value in sent], gives_way=2))
    hosts = [state.process.host for state in states]
    if len(set(hosts)) > 1:
        columns.append(Column("host", hosts, text=True, gives_way=5))
    columns += [
        Column("process", [str(state.process.pid) for state in states], gives_way=4),
        Column("does", [_does(state) for state in states], text=True, wraps=True),
    ]
    return Table("", columns)


def _word(state: RankState, kind: str | None) -> str:
    if kind in ("gone", "stopped", "silent", "late", "conflict", "slow"):
        return "differs" if kind == "conflict" else kind
    if state.life != "runs":
        return state.life
    return "waits" if state.waits else "runs"


def _does(state: RankState) -> str:
    call = next((channel.call.text for channel in state.channels.values() if channel.call), "")
    return state.error or state.place.replace(state.where, _last_part(state.where)) + (
        f", {call}" if call and state.waits else ""
    )


def _last_part(where: str) -> str:
    """Return the place without its folders: the lines below the table have them."""
    return where.rpartition("/")[2]


def _span(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.0f} h"
    )
