"""``fusionlayer trace``: how the time of a step was spent, from the timelines of a run."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence

from ..base.errors import ConfigError, printable
from . import timelines
from .arguments import check_file
from .breakdown import CODEC, KINDS, LATE, NETWORK, OTHER, PACKING, Breakdown, break_down
from .tables import print_table
from .timelines import Recording
from .verdict import verdict

_WIDTH = 80


def run(options: argparse.Namespace) -> None:
    """Print the reports that ``options`` select."""
    if options.merge:
        check_file(options.merge, "--merge")
    recordings = timelines.read(timelines.files(options.timelines))
    latest = timelines.latest_exchanges(recordings)
    ranks = [_break_down(recording, options.skip, latest) for recording in recordings]
    if options.json:
        whole = {"verdict": verdict(ranks), "ranks": [rank.as_dict() for rank in ranks]}
        print(json.dumps(whole, indent=1))
    else:
        _say(verdict(ranks))
        for note in _notes(recordings):
            _say(note)
        print()
        _print_phases(ranks)
        for rank in ranks:
            _print_buckets(rank)
    if options.merge:
        timelines.merge(recordings, options.merge)


def _say(text: str) -> None:
    print(textwrap.fill(printable(text), _WIDTH))


def _notes(recordings: Sequence[Recording]) -> list[str]:
    """Return notes on the files for the reader."""
    notes = []
    cut = [recording.path.name for recording in recordings if recording.cut]
    if cut:
        notes.append(
            f"Incomplete: {', '.join(cut)} end{'s' * (len(cut) == 1)} in the middle: the run was killed or still goes "
            "on. Whole steps count."
        )
    known = [recording.ranks for recording in recordings if recording.ranks is not None]
    if known and len(recordings) < known[0]:
        notes.append(
            f"These are {len(recordings)} of {known[0]} ranks, so waiting for stragglers counts as waiting for the "
            "network."
        )
    elif len(recordings) > 1 and any(recording.offset is None for recording in recordings):
        notes.append(
            "The clocks of the ranks were not measured, so waiting for stragglers counts as waiting for the network."
        )
    devices = sorted({recording.device for recording in recordings if recording.device is not None})
    if devices:
        notes.append(f"Times are those of {', '.join(devices)}, and not of the host, which runs ahead.")
    error = max(recording.error for recording in recordings)
    if error:
        notes.append(f"Clocks of hosts were compared to {error / 1e3:.2g} ms when training began.")
    return notes


def _break_down(recording: Recording, skip: int, latest: dict[tuple[int, int, int], float]) -> Breakdown:
    offset = recording.offset or 0.0
    try:
        return break_down(
            recording.spans, skip, str(recording.path), {key: time - offset for key, time in latest.items()}
        )
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{recording.path} is a trace, but no timeline of this version of fusionlayer; record it anew with "
            "FUSIONLAYER_TIMELINE"
        ) from error


def _print_phases(ranks: Sequence[Breakdown]) -> None:
    rows = []

    def add(rank: Breakdown, name: str, seconds: float) -> None:
        rows.append((f"{rank.rank}", name, f"{1e3 * seconds:.2f}", f"{100 * seconds / rank.step:.0f}"))

    for rank in ranks:
        for name, seconds in [*rank.phases.items(), ("step", rank.step)]:
            add(rank, name, seconds)
            if name == "exposed communication":
                for kind in KINDS:
                    if rank.exposed[kind]:
                        add(rank, f"- {kind}", rank.exposed[kind])
        add(rank, "(communication, hidden or not)", rank.communication)
    steps = " and ".join(sorted({str(rank.steps) for rank in ranks}))
    print_table(f"Mean of {steps} steps", ("rank", "phase", "ms", "% of step"), rows, right=(0, 2, 3))


def _print_buckets(rank: Breakdown) -> None:
    rows = []
    for bucket in rank.buckets:
        network, late, codec = (bucket.phases[kind] for kind in (NETWORK, LATE, CODEC))
        other = bucket.phases[PACKING] + bucket.phases[OTHER]
        times = (bucket.start, bucket.end, codec, network, late, other, bucket.waited)
        sent = f"{bucket.sent / 1e3:.0f}"
        rows.append((str(bucket.index), sent, *(f"{1e3 * seconds:.2f}" for seconds in times)))
    names = ("starts", "ends", "codec", "wire", "late", "other", "waits")
    columns = ("bucket", "kB", *(f"{name} ms" for name in names))
    title = f"Buckets of rank {rank.rank}: medians; starts and ends count from the start of backward"
    print_table(title, columns, rows, right=range(len(columns)))
