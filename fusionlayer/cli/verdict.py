"""The verdict on a recorded step: what training waits for, and the predicted gain of other codecs."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from .. import codecs
from ..base.errors import ConfigError
from ..codecs import Codec
from ..planning.recorded import MODELLED, Forecast, RecordedBucket, RecordedStep, forecast
from ..process.clock import HOST, clock_of
from .breakdown import CODEC, KINDS, LATE, NETWORK, OTHER, PACKING, Breakdown, BucketTimes

TRIED = ("raw", "int8", "int4")
"""Codecs that the prediction tries."""

_HIDDEN = 0.05
_MOST = 0.8
_LEAST_SAVED = 0.03
_TRUSTED = 0.3
_WAITS = {
    NETWORK: "for the network",
    LATE: "for ranks that come late",
    CODEC: "for the codec",
    PACKING: "for gradients to be packed",
    OTHER: "for communication threads, outside codec and network",
}


def verdict(ranks: Sequence[Breakdown]) -> str:
    """Return one or two sentences: the main wait of the mean step of all ranks, and its buckets."""
    step = _mean([rank.step for rank in ranks])
    waits = {kind: _mean([rank.exposed[kind] for rank in ranks]) for kind in KINDS}
    total = sum(waits.values())
    if total < _HIDDEN * step:
        return (
            f"Communication is hidden: {total / step:.0%} of a step ({_ms(total)} of {_ms(step)} ms) waits for results."
        )
    first, *others = sorted(KINDS, key=lambda kind: -waits[kind])
    where: dict[int, float] = defaultdict(float)
    for rank in ranks:
        for bucket, found in rank.exposed_by_bucket.items():
            where[bucket] += found[first]
    text = f"{waits[first] / step:.0%} of a step ({_ms(waits[first])} of {_ms(step)} ms) waits {_WAITS[first]}"
    text += f", in {_most(where)}."
    rest = [f"{waits[kind] / step:.0%} {_WAITS[kind]}" for kind in others if waits[kind] >= 0.01 * step]
    return f"{text} It waits {', '.join(rest)}." if rest else text


def predicted(rank: Breakdown, workers: int | None, device: str | None = None) -> list[Forecast] | str:
    """Return what the rank's step would take with other codecs, or why that is unknown."""
    if workers is None or workers < 2:
        return "the timeline does not say how many ranks there were"
    if device is not None and not torch.cuda.is_available():
        return f"it measures codecs where gradients are, on {device}, and this machine has no such device"
    if rank.overlaps_forward:
        return "with overlap_forward, results are waited for in the midst of forward"
    try:
        buckets = [_recorded(bucket) for bucket in rank.buckets]
    except (ConfigError, TypeError, ValueError):
        return "a bucket has a codec that this installation does not know"
    if not buckets or not all(b.elements and b.algorithm in MODELLED for b in buckets):
        return f"it is made for {', '.join(MODELLED)} alone, without ahead"
    phases = rank.phases
    return forecast(
        RecordedStep(
            rank.step,
            phases["forward"],
            phases["backward"] + phases["compression"],
            phases["update"] + phases["other"],
            workers,
            max(1, rank.lanes),
            buckets,
        ),
        TRIED,
        HOST if device is None else clock_of(torch.device("cuda")),
    )


def told(found: list[Forecast] | str, step: float) -> str:
    """Return a prediction in words."""
    if isinstance(found, str):
        return f"No prediction: {found}."
    best = found[0]
    if not 1 - _TRUSTED < best.modelled / step < 1 + _TRUSTED:
        return (
            f"No prediction: a simulation of the recorded step gives {_ms(best.modelled)} ms instead of {_ms(step)} "
            "ms, so something it does not know takes the time."
        )
    from_what = (
        f"The prediction is a simulation at the measured {_rate(best.rate)}, with codecs measured on this machine; for "
        f"the recorded step it gives {_ms(best.modelled)} ms."
    )
    if best.saved < _LEAST_SAVED * step:
        return (
            f"Predicted: no other codec ({', '.join(each.codec for each in found)}) saves more than {_LEAST_SAVED:.0%} "
            f"of a step. {from_what}"
        )
    return (
        f"Predicted: codec {best.codec} saves {_ms(best.saved)} ms of a step, which then takes {_ms(best.seconds)} ms. "
        f"{from_what}"
    )


def _recorded(bucket: BucketTimes) -> RecordedBucket:
    return RecordedBucket(
        bucket.elements,
        _codec(bucket.codec),
        bucket.algorithm.lower(),
        max(0.0, bucket.ready),
        bucket.phases[PACKING] + bucket.phases[OTHER],
        bucket.phases[CODEC],
        bucket.exchanged,
        bucket.sent,
    )


def _codec(text: str) -> Codec:
    """Return the codec whose ``str`` is ``text``, such as "int(bits=8, rounding=nearest)"."""
    found = re.fullmatch(r"(\w+)\((.*)\)", text)
    if found is None:
        raise ConfigError(f"{text!r} is no codec with options")
    options = dict(part.split("=", 1) for part in found[2].split(", ") if part)
    return codecs.get(found[1], **{key: _value(value) for key, value in options.items()})


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _most(where: Mapping[int, float]) -> str:
    """Return the buckets that have most of the time, such as "buckets 0, 3-7"."""
    chosen, sum_, total = [], 0.0, sum(where.values())
    for bucket, seconds in sorted(where.items(), key=lambda each: -each[1]):
        if sum_ >= _MOST * total:
            break
        chosen.append(bucket)
        sum_ += seconds
    runs: list[list[int]] = []
    for bucket in sorted(chosen):
        if runs and runs[-1][-1] == bucket - 1:
            runs[-1].append(bucket)
        else:
            runs.append([bucket])
    names = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"bucket{'s' * (len(chosen) > 1)} {names}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _rate(per_second: float) -> str:
    bits = 8 * per_second
    return f"{bits / 1e6:.0f} Mbit/s" if bits < 1e9 else f"{per_second / 1e9:.2g} GB/s"
