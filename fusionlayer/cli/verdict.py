"""The verdict on a recorded step: what training waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from .breakdown import CODEC, KINDS, LATE, NETWORK, OTHER, PACKING, Breakdown

_HIDDEN = 0.05
_MOST = 0.8
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
