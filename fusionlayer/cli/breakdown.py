"""Where the time of a mean step went: pure functions over the spans of a timeline."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ConfigError

__all__ = ["PHASES", "Breakdown", "BucketTimes", "break_down"]

PHASES = {
    "FORWARD": "forward",
    "BACKWARD": "backward",
    "ENCODE": "compression",
    "WAIT": "exposed communication",
    "UPDATE": "update",
}
"""Spans of the training thread, and what the breakdown calls them (SAFusion, figure 15)."""

_BUCKET = "ALLREDUCE"
_NANOSECOND = 1e-3  # microseconds; by rounding a span may end after the next one has begun

Span = Mapping[str, Any]


@dataclass(frozen=True)
class BucketTimes:
    """Medians over steps, in seconds.

    Attributes:
        index: of the bucket.
        start: when a communication thread took it, counted from the start of backward.
        end: when it was done.
        waited: how long the training thread waited for it.
        phases: of the communication thread, by the name of their span; "other" is the time between them.
    """

    index: int
    start: float
    end: float
    waited: float
    phases: Mapping[str, float]


@dataclass(frozen=True)
class Breakdown:
    """A rank's mean step, in seconds.

    Attributes:
        rank: the rank.
        steps: number of steps in the means.
        step: from one step's beginning to the next one's.
        phases: of the training thread, each without the phases nested in it; they add up to ``step``.
        communication: how long at least one bucket was under way, hidden or not.
        buckets: in the order of their numbers.
    """

    rank: int
    steps: int
    step: float
    phases: Mapping[str, float]
    communication: float
    buckets: tuple[BucketTimes, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def break_down(spans: Sequence[Span], skip: int, source: str) -> Breakdown:
    """Return the mean step of ``spans``, complete events of one rank with times in microseconds.

    Args:
        spans: of all threads, in any order.
        skip: number of first steps to leave out.
        source: name of the file, for error messages.

    Raises:
        ConfigError: too few steps, or spans of something other than an optimizer's training.
    """
    training = [span for span in spans if span["name"] == "BACKWARD"]
    begins = _step_begins(spans)
    kept = sorted(step for step in begins if step >= skip)
    if not training or len(kept) < 2:
        raise ConfigError(
            f"timeline {source} has {len(begins)} steps of a DistributedOptimizer, {len(kept)} of them after the first "
            f"{skip}; expected at least 2 (--skip leaves out fewer)"
        )
    # The last step is left out: no next step begins, which would tell when it was over.
    first, last = begins[kept[0]], begins[kept[-1]]
    count = len(kept) - 1
    own = [span for span in spans if first <= span["ts"] < last]
    threads = {span["tid"] for span in training}
    phases = dict.fromkeys(PHASES.values(), 0.0)
    for name, seconds in _exclusive([span for span in own if span["tid"] in threads and span["name"] in PHASES]):
        phases[PHASES[name]] += seconds / count
    step = (last - first) / 1e6 / count
    phases["other"] = step - sum(phases.values())
    jobs = [span for span in own if span["name"] == _BUCKET]
    return Breakdown(
        rank=int(training[0]["pid"]),
        steps=count,
        step=step,
        phases=phases,
        communication=_union(jobs) / count,
        buckets=tuple(_buckets(jobs, own, _backward_begins(training), set(kept[:-1]))),
    )


def _start(span: Span) -> float:
    return float(span["ts"])


def _step_begins(spans: Sequence[Span]) -> dict[int, float]:
    """Return when each step's forward began, or its backward where the timeline has no forward."""
    begins: dict[int, float] = {}
    for span in spans:
        if span["name"] in ("FORWARD", "BACKWARD"):
            step = span["args"]["step"]
            begins[step] = min(begins.get(step, span["ts"]), span["ts"])
    return begins


def _backward_begins(training: Sequence[Span]) -> dict[int, float]:
    begins: dict[int, float] = {}
    for span in training:
        step = span["args"]["step"]
        begins[step] = min(begins.get(step, span["ts"]), span["ts"])
    return begins


def _exclusive(spans: Sequence[Span]) -> list[tuple[str, float]]:
    """Return (name, seconds) of the spans of one thread, or of threads that do not overlap, without nested spans."""
    found: list[tuple[str, float]] = []
    open_spans: list[list[Any]] = []  # [end, name, seconds]

    def close(until: float) -> None:
        while open_spans and open_spans[-1][0] <= until + _NANOSECOND:
            _, name, seconds = open_spans.pop()
            found.append((name, seconds))

    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        close(span["ts"])
        if open_spans:
            open_spans[-1][2] -= span["dur"] / 1e6
        open_spans.append([span["ts"] + span["dur"], span["name"], span["dur"] / 1e6])
    close(float("inf"))
    return found


def _union(spans: Sequence[Span]) -> float:
    """Return the seconds that at least one of the spans covers."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span["ts"]):
        stop = span["ts"] + span["dur"]
        total += max(0.0, stop - max(end, span["ts"]))
        end = max(end, stop)
    return total / 1e6


def _buckets(
    jobs: Sequence[Span], spans: Sequence[Span], backward: Mapping[int, float], steps: set[int]
) -> list[BucketTimes]:
    times: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    threads: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span["ts"]):
        threads[span["tid"]].append(span)
    for job in jobs:
        step, index = job["args"]["step"], job["args"]["bucket"]
        if step not in steps or step not in backward:
            continue
        end = job["ts"] + job["dur"]
        row = threads[job["tid"]]
        inside = row[bisect_left(row, job["ts"], key=_start) : bisect_left(row, end, key=_start)]
        parts: dict[str, float] = defaultdict(float)
        for name, seconds in _exclusive(inside):
            parts["other" if name == _BUCKET else name] += seconds
        times[index]["start"].append((job["ts"] - backward[step]) / 1e6)
        times[index]["end"].append((end - backward[step]) / 1e6)
        for name, seconds in parts.items():
            times[index][f"phase {name}"].append(seconds)
    for span in spans:
        if span["name"] == "WAIT" and span["args"]["step"] in steps:
            times[span["args"]["bucket"]]["waited"].append(span["dur"] / 1e6)
    return [
        BucketTimes(
            index,
            statistics.median(found["start"]),
            statistics.median(found["end"]),
            statistics.median(found["waited"] or [0.0]),
            {
                name.removeprefix("phase "): statistics.median(values)
                for name, values in found.items()
                if name.startswith("phase ")
            },
        )
        for index, found in sorted(times.items())
        if found["start"]
    ]
