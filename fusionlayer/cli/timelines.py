"""Reads the timelines of a run's ranks, puts them on one clock and merges them."""

from __future__ import annotations

import glob
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from .breakdown import Span, exchanges

_MOST = 1e15
_WHAT = "expected a list of events with ph, name, ts, dur, pid, tid and args, as FUSIONLAYER_TIMELINE writes it"


@dataclass(frozen=True)
class Recording:
    """The timeline of a rank.

    Attributes:
        path: its file.
        events: all events of the file, unchanged.
        spans: those of them with a duration.
        offset: microseconds by which rank 0's clock is ahead of this rank's; None: not measured.
        error: by how many microseconds that may be wrong.
        ranks: number of ranks in the job; None: unknown.
        cut: whether the file ends before its list does.
        device: the device whose times these are; None: the host's.
    """

    path: Path
    events: Sequence[Mapping[str, Any]]
    spans: Sequence[Span]
    offset: float | None
    error: float
    ranks: int | None
    cut: bool
    device: str | None = None

    @property
    def rank(self) -> int:
        """The rank that wrote the file."""
        return int(self.events[0]["pid"])


def files(names: Sequence[str]) -> list[Path]:
    """Return the files of ``names``: timelines themselves, or the value of FUSIONLAYER_TIMELINE, for all ranks."""
    found = []
    for name in names:
        paths = [Path(name)] if Path(name).is_file() else [Path(path) for path in glob.glob(f"{glob.escape(name)}.*")]
        ranks = [path for path in paths if path.is_file() and (path == Path(name) or path.suffix[1:].isdecimal())]
        if not ranks:
            raise ConfigError(f"no timeline {name} and none of a rank, {name}.0; run with FUSIONLAYER_TIMELINE={name}")
        found += sorted(ranks, key=lambda path: (len(path.name), path.name))
    return found


def read(paths: Sequence[Path]) -> list[Recording]:
    """Return the timelines in these files, in the order of their ranks.

    Raises:
        ConfigError: a file is no timeline, or two are of the same rank.
    """
    found = sorted((_read(path) for path in paths), key=lambda recording: recording.rank)
    for a, b in zip(found, found[1:], strict=False):
        if a.rank == b.rank:
            raise ConfigError(f"{a.path} and {b.path} are both of rank {a.rank}; give the files of one run")
    return found


def latest_exchanges(recordings: Sequence[Recording]) -> dict[tuple[int, int, int], float]:
    """Return when the last rank came to each exchange (step, bucket, number), by rank 0's clock in microseconds.

    There are none unless all files have a measured clock. Steps that some file lacks are left out.
    """
    if len(recordings) < 2:
        return {}
    begun: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for recording in recordings:
        if recording.offset is None:
            return {}
        for key, span in exchanges(recording.spans):
            begun[key].append(span["ts"] + recording.offset)
    return {key: max(times) for key, times in begun.items() if len(times) == len(recordings)}


def merge(recordings: Sequence[Recording], path: Path) -> None:
    """Write the events of all ranks into one file, by rank 0's clock."""
    lines = []
    for recording in recordings:
        for event in recording.events:
            moved = {**event, "ts": event["ts"] + (recording.offset or 0.0)} if "ts" in event else event
            lines.append(json.dumps(moved))
    try:
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    except OSError as error:
        raise ConfigError(f"--merge {path} cannot be written: {error.strerror}") from error


def _read(path: Path) -> Recording:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"timeline {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no timeline of fusionlayer: it is no text; {_WHAT}") from error
    if not text.strip():
        raise ConfigError(f"timeline {path} is empty: the run ended before it wrote a span, or has just begun")
    try:
        events, cut = json.loads(text), False
    except (ValueError, RecursionError):
        events, cut = _whole_lines(text, path), True
    try:
        spans = [event for event in events if event["ph"] == "X"]
        devices = [event["args"]["name"] for event in events if event["name"] == "device" and event["ph"] == "M"]
        clocks = [event["args"] for event in events if event["name"] == "clock" and event["ph"] == "M"]
        if not events or not all({"name", "ts", "dur", "pid", "tid", "args"} <= span.keys() for span in spans):
            raise LookupError
        clock: Mapping[str, Any] = clocks[-1] if clocks else {}
        numbers = ([span["ts"] + 0, span["dur"] + 0, int(span["pid"]), *span["args"].values()] for span in spans)
        if not all(map(_are_fit, [clock.values(), *numbers])):
            raise ValueError
        recording = Recording(
            path=path,
            events=events,
            spans=spans,
            offset=clock.get("offset_us"),
            error=clock.get("error_us", 0.0),
            ranks=clock.get("ranks"),
            cut=cut,
            device=devices[-1] if devices else None,
        )
        int(events[0]["pid"])
    except (ArithmeticError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} is no timeline of fusionlayer; {_WHAT}") from error
    return recording


def _are_fit(values: Iterable[object]) -> bool:
    """Return whether a number can be calculated with: it is finite, and has few digits."""
    return all(abs(each) < _MOST for each in values if isinstance(each, (int, float)))


def _whole_lines(text: str, path: Path) -> list[Any]:
    """Return the events of a file that was cut off: all lines but the last, which need not be whole."""
    first, *lines = text.splitlines()
    events = []
    for number, line in enumerate(lines, 2):
        try:
            events.append(json.loads(re.sub(r",\s*$", "", line)))
        except (ValueError, RecursionError) as error:
            if number <= len(lines):
                raise ConfigError(
                    f"{path} is no timeline of fusionlayer: line {number} is no event; {_WHAT}"
                ) from error
    if first.strip() != "[" or not events:
        raise ConfigError(f"{path} is no timeline of fusionlayer, or holds no whole event; {_WHAT}")
    return events
