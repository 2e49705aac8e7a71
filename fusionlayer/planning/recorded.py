"""The time that a recorded step would take with another codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import codecs, collectives
from ..codecs import Codec
from ..collectives._alpha_beta import AlphaBeta
from ..process.clock import HOST, Clock
from .bucket_costs import BucketCosts
from .cluster import Cluster
from .cost_model import CodecCost, Cost, Curve, LinkCost
from .prediction import PlannedBucket, predict
from .profile import Gradient, Model
from .profiler.codecs import measure_codecs
from .profiler.results import as_codecs
from .simulation import Resources

MODELLED = ("dense", "one_shot", "two_shot", "ring", "butterfly")
"""Collectives whose transfers follow from one link between equal ranks, because a timeline shows no more."""

# Measurements of each codec, on the largest bucket and on as few elements as this.
_REPEATS, _SMALL = 3, 1 << 12
# Messages separate latency from rate if the largest is more than this many times the smallest.
_APART = 2


@dataclass(frozen=True)
class RecordedBucket:
    """A bucket: medians over steps. Times are in seconds.

    Attributes:
        elements: number of its elements.
        codec: its codec.
        algorithm: its collective, one of ``MODELLED``.
        ready: when its last gradient was there, counted from the start of backward.
        packing: time for packing, unpacking, and all else that a communication thread does outside codec and network.
        coding: time for encoding and decoding.
        exchanged: time on the network, as if no other bucket had been there.
        sent: bytes that a rank sent.
    """

    elements: int
    codec: Codec
    algorithm: str
    ready: float
    packing: float
    coding: float
    exchanged: float
    sent: float


@dataclass(frozen=True)
class RecordedStep:
    """A rank's mean step. Times are in seconds.

    Attributes:
        seconds: time of the whole step.
        forward, backward, rest: times of the training thread without waiting; ``rest`` comes after the last result.
        workers: number of ranks.
        lanes: number of communication threads.
        buckets: in sending order.
    """

    seconds: float
    forward: float
    backward: float
    rest: float
    workers: int
    lanes: int
    buckets: Sequence[RecordedBucket]


@dataclass(frozen=True)
class Forecast:
    """A predicted step.

    Attributes:
        codec: name of the codec that all buckets have instead.
        seconds: of the predicted step.
        saved: seconds that this is less than the recorded step.
        modelled: seconds that the same model gives for the recorded step.
        rate: bytes per second that the recorded step sent.
    """

    codec: str
    seconds: float
    saved: float
    modelled: float
    rate: float


def forecast(step: RecordedStep, names: Sequence[str], clock: Clock = HOST) -> list[Forecast]:
    """Return the predicted step with each of the codecs ``names``, the fastest first.

    A codec that all buckets have already is left out. The network has the latency and rate of the recorded exchanges.
    Codecs are measured now, on the device of ``clock``; if the recorded codec took twice as long as here, the others
    are expected to take twice as long, too.
    """
    buckets = step.buckets
    others = [name for name in names if any(codecs.get(name).bare != bucket.codec.bare for bucket in buckets)]
    sizes = [_SMALL, max(2 * _SMALL, *(bucket.elements for bucket in buckets))]
    found = {str(bucket.codec.bare): bucket.codec for bucket in buckets} | {name: codecs.get(name) for name in others}
    measured = as_codecs(measure_codecs(found, sizes, _REPEATS, clock))
    cluster = Cluster(step.workers, _link(buckets))
    copy = AlphaBeta.through([(bucket.elements, max(bucket.packing / 2, 1e-9)) for bucket in buckets])

    def seconds(costs: Sequence[BucketCosts]) -> float:
        tensors = tuple(Gradient(str(i), b.elements, b.ready) for i, b in enumerate(buckets))
        ordered = tuple(sorted(tensors, key=lambda tensor: tensor.ready))
        model = Model("recorded", step.forward, step.backward, step.rest, ordered)
        planned = [PlannedBucket([str(i)], cost) for i, cost in enumerate(costs)]
        return predict(model, planned, Resources(lanes=step.lanes)).seconds

    def costs_with(slower: float, name: str | None) -> list[BucketCosts]:
        costs = []
        for bucket in buckets:
            codec = measured[str(bucket.codec.bare) if name is None else name]
            algorithm = bucket.algorithm if name is None else collectives.choose(codec, (1,) * step.workers)
            costs.append(BucketCosts(_slower(codec, slower), algorithm, cluster, copy))
        return costs

    recorded = sum(bucket.coding for bucket in buckets)
    here = sum(_coding(cost, bucket.elements) for cost, bucket in zip(costs_with(1.0, None), buckets, strict=True))
    slower = recorded / here if here and recorded else 1.0
    modelled = seconds(costs_with(slower, None))
    rate = sum(bucket.sent for bucket in buckets) / max(sum(bucket.exchanged for bucket in buckets), 1e-9)
    forecasts = []
    for name in others:
        saved = modelled - seconds(costs_with(slower, name))
        forecasts.append(Forecast(name, step.seconds - saved, saved, modelled, rate))
    return sorted(forecasts, key=lambda each: each.seconds)


def _link(buckets: Sequence[RecordedBucket]) -> LinkCost:
    """Return the link that explains the times of the recorded exchanges."""
    points = [(bucket.sent, bucket.exchanged) for bucket in buckets if bucket.sent and bucket.exchanged]
    sizes = [sent for sent, _ in points]
    if points and max(sizes) > _APART * min(sizes):
        line = AlphaBeta.through(points)
    else:  # most of the time is the rate's
        line = AlphaBeta(0.0, sum(seconds for _, seconds in points) / max(sum(sizes), 1.0))
    # one_shot exchanges once; all others pass over the network there and back.
    latency = line.alpha / (1 if all(bucket.algorithm == "one_shot" for bucket in buckets) else 2)
    return LinkCost(latency, 0.0, 0.0, AlphaBeta(latency, line.beta), AlphaBeta(2 * latency, line.beta))


def _coding(costs: BucketCosts, elements: int) -> float:
    """Return the seconds of the codec for a bucket, without packing and without transfers."""
    bare = replace(costs, copy=AlphaBeta(0.0, 0.0))
    return sum(phase.cpu for phase in bare.phases([elements]) if phase.link is None)


def _slower(codec: CodecCost, factor: float) -> CodecCost:
    def times(cost: Cost) -> Cost:
        assert isinstance(cost, Curve)
        return Curve(tuple((size, factor * seconds) for size, seconds in cost.points))

    return replace(
        codec, encode=times(codec.encode), decode=times(codec.decode), sum=times(codec.sum), recode=times(codec.recode)
    )
