"""A picture of one recorded step: a row for each thread of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import drawing
from .breakdown import Breakdown, Span
from .timelines import Recording

__all__ = ["draw"]

_COLOURS = {
    "forward": drawing.PALETTE[5],
    "backward": drawing.PALETTE[0],
    "codec": drawing.PALETTE[1],
    "network": drawing.PALETTE[2],
    "packing": drawing.PALETTE[4],
    "update": drawing.PALETTE[3],
}
_WAITS = "waits"
_SHOWN = {
    "FORWARD": "forward",
    "BACKWARD": "backward",
    "WAIT": _WAITS,
    "UPDATE": "update",
    "ENCODE": "codec",
    "DECODE": "codec",
    "RECODE": "codec",
    "WIRE": "network",
    "MEMCPY_IN_FUSION_BUFFER": "packing",
    "MEMCPY_OUT_FUSION_BUFFER": "packing",
}
_NARROW = 0.03


def draw(path: Path, recordings: Sequence[Recording], ranks: Sequence[Breakdown], title: str) -> None:
    """Write a picture of the step whose length is the median of rank 0's; ranks are put on one clock.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write the file.
    """
    step = _typical(recordings[0].spans, ranks[0])
    begin = min(_window(recording, step)[0] for recording in recordings)
    end = max(_window(recording, step)[1] for recording in recordings)
    bars = []
    for recording in recordings:
        bars += _bars(recording, begin, end)
    rows = list(dict.fromkeys(row for row, *_ in bars))
    with drawing.style():
        figure = drawing.figure(9, 1.4 + 0.32 * len(rows))
        axes = figure.subplots()
        seen = set()
        for row, start, length, kind, bucket in bars:
            colour = drawing.GREY if kind == _WAITS else _COLOURS[kind]
            place = len(rows) - 1 - rows.index(row)
            axes.broken_barh(
                [(start, length)],
                (place - 0.4, 0.8),
                facecolors="white" if kind == _WAITS else colour,
                edgecolor=colour,
                hatch="////" if kind == _WAITS else None,
                linewidth=0.3,
                label=f"_{kind}" if kind in seen else kind,
            )
            seen.add(kind)
            if bucket is not None and kind == "network" and length > _NARROW * (end - begin) / 1e3:
                axes.text(start + length / 2, place, str(bucket), ha="center", va="center", color="white")
        axes.set_yticks(range(len(rows)), rows[::-1])
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, (end - begin) / 1e3)
        axes.set_xlabel(f"ms of step {step}; numbers are buckets")
        axes.set_title(title.split(". ")[0].removesuffix("."))
        handles, labels = axes.get_legend_handles_labels()
        known = dict(zip(labels, handles, strict=True))
        shown = [name for name in (*_COLOURS, _WAITS) if name in known]
        figure.legend([known[name] for name in shown], shown, loc="outside lower center", ncols=len(shown))
        drawing.save(figure, path)


def _typical(spans: Sequence[Span], rank: Breakdown) -> int:
    """Return the recorded step whose length is nearest to the mean."""
    begins = sorted((span["ts"], span["args"]["step"]) for span in spans if span["name"] == "BACKWARD")
    lengths = [(after - ts, step) for (ts, step), (after, _) in zip(begins, begins[1:], strict=False)]
    return int(min(lengths[-rank.steps :], key=lambda each: abs(each[0] / 1e6 - rank.step))[1])


def _window(recording: Recording, step: int) -> tuple[float, float]:
    """Return start and end of a step by rank 0's clock, in microseconds."""
    offset = recording.offset or 0.0
    own = [s for s in recording.spans if s["name"] in ("FORWARD", "BACKWARD", "UPDATE") and s["args"]["step"] == step]
    if not own:
        return float("inf"), float("-inf")
    return min(s["ts"] for s in own) + offset, max(s["ts"] + s["dur"] for s in own) + offset


def _bars(recording: Recording, begin: float, end: float) -> list[tuple[str, float, float, str, int | None]]:
    """Return (row, start, length, kind, bucket), times in ms from ``begin``; the training thread comes first."""
    offset = recording.offset or 0.0
    training = {span["tid"] for span in recording.spans if span["name"] == "BACKWARD"}
    names: dict[object, str] = {}
    bars = []
    for span in sorted(recording.spans, key=lambda span: (span["tid"] not in training, str(span["tid"]), span["ts"])):
        kind = _SHOWN.get(span["name"])
        start, stop = span["ts"] + offset, span["ts"] + span["dur"] + offset
        if kind is None or stop <= begin or start >= end:
            continue
        tid = span["tid"]
        if tid not in names:
            lanes = len(names.keys() - training)
            names[tid] = "trains" if tid in training else "sends" if not lanes else f"sends {lanes + 1}"
        start, stop = max(start, begin), min(stop, end)
        row = f"rank {recording.rank} {names[tid]}"
        bars.append((row, (start - begin) / 1e3, (stop - start) / 1e3, kind, span["args"].get("bucket")))
    return bars
