"""Divides the time of a mean step: pure functions over the spans of a timeline."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..base.errors import ConfigError

PHASES = {
    "FORWARD": "forward",
    "BACKWARD": "backward",
    "ENCODE": "compression",
    "WAIT": "exposed communication",
    "UPDATE": "update",
}
"""Spans of the training thread, and their names in the breakdown (SAFusion, figure 15)."""

NETWORK, LATE, CODEC, PACKING, OTHER = KINDS = ("network", "stragglers", "codec", "packing", "other")
"""Activities of a communication thread. If two of them overlap, as in pipelines, the first one counts."""

_PARTS = {
    "WIRE": NETWORK,
    "ENCODE": CODEC,
    "DECODE": CODEC,
    "RECODE": CODEC,
    "MEMCPY_IN_FUSION_BUFFER": PACKING,
    "MEMCPY_OUT_FUSION_BUFFER": PACKING,
}
_BUCKET = "ALLREDUCE"
_ROUNDING = 1.0  # microseconds; by rounding a span may end after the next one has begun: a device resolves half of one

Span = Mapping[str, Any]
Job = tuple[int, int]
"""Step and bucket."""
Piece = tuple[float, float, str]
"""Start and end in microseconds, and kind."""


@dataclass(frozen=True)
class BucketTimes:
    """Medians over steps, in seconds.

    Attributes:
        index: the index of the bucket.
        ready: when its last gradient was there, counted from the start of backward.
        start: when a communication thread took it.
        end: when it was done.
        waited: how long the training thread waited for it.
        phases: the phases of the communication thread, by ``KINDS``; they add up to ``end - start``.
        sent: bytes that this rank sent.
        elements: the elements of the bucket; 0 where the timeline does not say, as for gradients that were encoded
            ahead.
        codec: its codec with options.
        algorithm: its collective, in capitals.
    """

    index: int
    ready: float
    start: float
    end: float
    waited: float
    phases: Mapping[str, float]
    sent: float
    elements: int
    codec: str
    algorithm: str


@dataclass(frozen=True)
class Breakdown:
    """A rank's mean step, in seconds.

    Attributes:
        rank: the rank.
        steps: number of steps in the means.
        step: from one step's beginning to the next one's.
        phases: the phases of the training thread, each without the phases nested in it; they add up to ``step``.
        exposed: the work of communication threads while the training thread waited, by ``KINDS``; these add up to the
            phase "exposed communication".
        exposed_by_bucket: the same by the bucket that they worked for.
        communication: how long at least one bucket was in flight, hidden or not.
        lanes: number of communication threads.
        buckets: in the order of their numbers.
    """

    rank: int
    steps: int
    step: float
    phases: Mapping[str, float]
    exposed: Mapping[str, float]
    exposed_by_bucket: Mapping[int, Mapping[str, float]]
    communication: float
    lanes: int
    buckets: tuple[BucketTimes, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def break_down(
    spans: Sequence[Span], skip: int, source: str, latest: Mapping[tuple[int, int, int], float] | None = None
) -> Breakdown:
    """Return the mean step of ``spans``, complete events of one rank with times in microseconds."""
    training = [span for span in spans if span["name"] == "BACKWARD"]
    begins = _begins(spans, "FORWARD", "BACKWARD")  # not every timeline has the forward
    kept = sorted(step for step in begins if step >= skip)
    if not training or len(kept) < 2:
        raise ConfigError(
            f"timeline {source} has {len(begins)} steps of a DistributedOptimizer, {len(kept)} of them after the first "
            f"{skip}; expected at least 2 (--skip leaves out fewer)"
        )
    # The last step is left out: no next step begins, which would show when it was over.
    first, last = begins[kept[0]], begins[kept[-1]]
    count = len(kept) - 1
    own = [span for span in spans if first <= span["ts"] < last]
    threads = {span["tid"] for span in training}
    phases = dict.fromkeys(PHASES.values(), 0.0)
    for name, seconds in _exclusive([span for span in own if span["tid"] in threads and span["name"] in PHASES]):
        phases[PHASES[name]] += seconds / count
    step = (last - first) / 1e6 / count
    phases["other"] = step - sum(phases.values())
    jobs = {_job(span): span for span in spans if span["name"] == _BUCKET}
    work = _work(spans, jobs, threads, latest or {})
    waits = [span for span in own if span["name"] == "WAIT"]
    by_bucket = _exposed(waits, jobs, work)
    return Breakdown(
        rank=int(training[0]["pid"]),
        steps=count,
        step=step,
        phases=phases,
        exposed={kind: sum(found[kind] for found in by_bucket.values()) / count for kind in KINDS},
        exposed_by_bucket={
            bucket: {kind: found[kind] / count for kind in KINDS} for bucket, found in sorted(by_bucket.items())
        },
        communication=_union([span for span in own if span["name"] == _BUCKET]) / count,
        lanes=len({span["tid"] for span in jobs.values()}),
        buckets=tuple(_buckets(jobs, work, spans, _begins(training, "BACKWARD"), set(kept[:-1]))),
    )


def exchanges(spans: Sequence[Span]) -> Iterator[tuple[tuple[int, int, int], Span]]:
    """Yield the exchanges of buckets, each with its step, its bucket and its number in that bucket."""
    numbers: Counter[Job] = Counter()
    for span in sorted((span for span in spans if span["name"] == "WIRE"), key=_start):
        step, bucket = _job(span)
        yield (step, bucket, numbers[step, bucket]), span
        numbers[step, bucket] += 1


def _job(span: Span) -> Job:
    return span["args"]["step"], span["args"]["bucket"]


def _start(span: Span) -> float:
    return float(span["ts"])


def _begins(spans: Sequence[Span], *names: str) -> dict[int, float]:
    """Return when the first span of these names began in each step."""
    begins: dict[int, float] = {}
    for span in spans:
        if span["name"] in names:
            step = span["args"]["step"]
            begins[step] = min(begins.get(step, span["ts"]), span["ts"])
    return begins


def _exclusive(spans: Sequence[Span]) -> list[tuple[str, float]]:
    """Return the name of each span, and its seconds without the spans nested in it.

    The spans are of one thread, or of threads that do not overlap.
    """
    found: list[tuple[str, float]] = []
    open_spans: list[list[Any]] = []  # [end, name, seconds]

    def close(until: float) -> None:
        while open_spans and open_spans[-1][0] <= until + _ROUNDING:
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
    for span in sorted(spans, key=_start):
        stop = span["ts"] + span["dur"]
        total += max(0.0, stop - max(end, span["ts"]))
        end = max(end, stop)
    return total / 1e6


# ---- communication threads ------------------------------------------------------------------------------------------


def _work(
    spans: Sequence[Span], jobs: Mapping[Job, Span], training: set[Any], latest: Mapping[tuple[int, int, int], float]
) -> dict[Job, list[Piece]]:
    """Return the work for each bucket: consecutive pieces from its span's start to its end."""
    parts: dict[Job, list[Piece]] = defaultdict(list)
    for key, span in exchanges(spans):
        start, end = span["ts"], span["ts"] + span["dur"]
        come = min(max(start, latest.get(key, start)), end)
        parts[key[:2]] += [(start, come, LATE), (come, end, NETWORK)]
    for span in spans:
        kind = _PARTS.get(span["name"], NETWORK)
        if kind != NETWORK and span["tid"] not in training:
            parts[_job(span)].append((span["ts"], span["ts"] + span["dur"], kind))
    return {job: _in_turn(span["ts"], span["ts"] + span["dur"], parts[job]) for job, span in jobs.items()}


def _in_turn(begin: float, end: float, parts: Sequence[Piece]) -> list[Piece]:
    """Return pieces that cover ``begin`` to ``end``; where ``parts`` overlap the first of ``KINDS`` counts."""
    changes = [(begin, OTHER, 1), (end, OTHER, -1)]
    for start, stop, kind in parts:
        changes += [(start, kind, 1), (stop, kind, -1)]
    found: list[Piece] = []
    under_way: Counter[str] = Counter()
    at = begin
    for time, kind, change in sorted(changes, key=lambda each: each[0]):
        now = min(max(time, begin), end)
        if now > at:
            found.append((at, now, next((kind for kind in KINDS if under_way[kind] > 0), OTHER)))
            at = now
        under_way[kind] += change
    return found


def _exposed(
    waits: Sequence[Span], jobs: Mapping[Job, Span], work: Mapping[Job, list[Piece]]
) -> dict[int, dict[str, float]]:
    """Return the seconds of ``waits`` by the bucket that delayed them and by its work.

    A bucket may wait in line behind others of its communication thread; these delay it then.
    """
    rows: dict[Any, list[tuple[float, float, str, int]]] = defaultdict(list)
    for job, span in sorted(jobs.items(), key=lambda item: item[1]["ts"]):
        rows[span["tid"]] += [(*piece, job[1]) for piece in work[job]]
    found: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
    for wait in waits:
        begin, end, index = wait["ts"], wait["ts"] + wait["dur"], wait["args"]["bucket"]
        left = wait["dur"] / 1e6
        sender = jobs.get(_job(wait))
        row = [] if sender is None else rows[sender["tid"]]
        for start, stop, kind, bucket in row[bisect_left(row, begin, key=lambda piece: piece[1]) :]:
            if start >= end:
                break
            seconds = (min(stop, end) - max(start, begin)) / 1e6
            found[bucket][kind] += seconds
            left -= seconds
        found[index][OTHER] += left
    return found


def _buckets(
    jobs: Mapping[Job, Span],
    work: Mapping[Job, list[Piece]],
    spans: Sequence[Span],
    backward: Mapping[int, float],
    steps: set[int],
) -> list[BucketTimes]:
    times: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    sent: Counter[Job] = Counter()
    facts: dict[int, tuple[int, str, str]] = {}
    ready = {job: span["ts"] for job, span in jobs.items()}
    for span in spans:
        details = span["args"]
        if span["name"] == "WIRE":
            sent[_job(span)] += details["bytes"]
        elif span["name"] == "QUEUE":
            ready[_job(span)] = span["ts"]
        elif span["name"] == "WAIT" and details["step"] in steps:
            times[details["bucket"]]["waited"].append(span["dur"] / 1e6)
        elif "codec" in details and "bucket" in details:
            facts[details["bucket"]] = (details.get("elements", 0), details["codec"], span["name"])
    for (step, index), span in jobs.items():
        if step not in steps or step not in backward:
            continue
        found = times[index]
        for name, at in (("ready", ready[step, index]), ("start", span["ts"]), ("end", span["ts"] + span["dur"])):
            found[name].append((at - backward[step]) / 1e6)
        for kind in KINDS:
            found[kind].append(sum(end - start for start, end, each in work[step, index] if each == kind) / 1e6)
        found["sent"].append(sent[step, index])
    return [
        _bucket(index, found, *facts.get(index, (0, "", "")))
        for index, found in sorted(times.items())
        if found["start"]
    ]


def _bucket(index: int, found: Mapping[str, list[float]], elements: int, codec: str, algorithm: str) -> BucketTimes:
    return BucketTimes(
        index=index,
        ready=statistics.median(found["ready"]),
        start=statistics.median(found["start"]),
        end=statistics.median(found["end"]),
        waited=statistics.median(found["waited"] or [0.0]),
        phases={kind: statistics.median(found[kind]) for kind in KINDS},
        sent=statistics.median(found["sent"]),
        elements=elements,
        codec=codec,
        algorithm=algorithm,
    )
