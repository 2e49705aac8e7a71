"""A picture of the predicted timeline of a plan: backward, encoding, communication, and waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..base.plan import FusionPlan
from ..planning.bucket_costs import BucketCosts
from ..planning.prediction import backward_seconds
from ..planning.profile import Profile
from ..planning.simulation import Step
from . import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw"]

Bar = tuple[float, float, int]
"""Start and length in seconds, number of the bucket."""

_LANES = ("network", "encoding", "backward")
_WAITING = "0.9"


def draw(title: str, profile: Profile, plan: FusionPlan, costs: Sequence[BucketCosts], found: Step) -> Figure:
    """Return a picture with a row for each kind of work. Colours tell buckets apart; waiting is hatched.

    Call it within ``drawing.style()``.
    """
    backward, encoding, communicating = _bars(profile, plan, costs, found)
    figure = drawing.figure(9, 2.8)
    axes = figure.subplots()
    for lane, bars in enumerate((communicating, encoding, backward)):
        for start, seconds, bucket in bars:
            colour = drawing.PALETTE[bucket % len(drawing.PALETTE)]
            axes.broken_barh([(start * 1e3, seconds * 1e3)], (lane - 0.4, 0.8), facecolors=colour)
    for number, span in enumerate(found.spans):
        _label(axes, span.start, span.end, found.seconds, str(number))
        if span.idle:
            _wait(axes, 0, span.start - span.idle, span.idle)
    if found.waiting:
        _wait(axes, 2, found.alone, found.waiting)
    axes.set_yticks(range(3), _LANES)
    axes.set_xlim(0, found.seconds * 1e3)
    axes.set_xlabel("ms after the start of backward; numbers: of buckets; hatched: waiting")
    axes.set_title(
        f"The last result comes {found.waiting * 1e3:.1f} ms after backward; the network stands still for "
        f"{found.idle * 1e3:.1f} ms\n{title}"
    )
    return figure


def _bars(
    profile: Profile, plan: FusionPlan, costs: Sequence[BucketCosts], found: Step
) -> tuple[list[Bar], list[Bar], list[Bar]]:
    """Return the bars of backward, of encoding and of communication."""
    bucket_of = {name: i for i, bucket in enumerate(plan.buckets) for name in bucket.names}
    backward: list[Bar] = []
    encoding: list[Bar] = []
    computing = backward_seconds(profile.model.tensors)
    now = 0.0
    for tensor in profile.model.tensors:
        index = bucket_of[tensor.name]
        cost = costs[index]
        seconds = computing[tensor.name]
        backward.append((now, seconds, index))
        now += seconds
        if cost.ahead:
            seconds = cost.encode(tensor.numel)
            encoding.append((now, seconds, index))
            now += seconds
    communicating = []
    for index, (bucket, cost, span) in enumerate(zip(plan.buckets, costs, found.spans, strict=True)):
        before = 0.0
        if not cost.ahead:
            before = cost.encode(sum(slot.numel for slot in bucket.slots))
            encoding.append((span.start, before, index))
        communicating.append((span.start + before, span.end - span.start - before, index))
    return backward, encoding, communicating


def _label(axes: Any, start: float, end: float, whole: float, text: str) -> None:
    """Write the bucket's number where there is room for it."""
    if end - start > 0.02 * whole:
        axes.text((start + end) * 500, 0, text, ha="center", va="center", fontsize=8, color="white")


def _wait(axes: Any, lane: int, start: float, seconds: float) -> None:
    axes.broken_barh(
        [(start * 1e3, seconds * 1e3)],
        (lane - 0.4, 0.8),
        facecolors=_WAITING,
        edgecolor="0.5",
        hatch="////",
        linewidth=0,
    )
