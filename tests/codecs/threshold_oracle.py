"""How threshold sparsifiers choose, written down a second time in Python: the formulas as they were published."""

import math
import struct
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from fusionlayer.base import libraries
from fusionlayer.native import selection

INFINITE = 0x7F800000
SMALLEST: float = struct.unpack("<f", struct.pack("<I", 1))[0]  # the smallest magnitude above 0

LOWERED = (1.0, 0.8, 0.8 * 0.8, 0.8 * 0.8 * 0.8, 0.8 * 0.8 * 0.8 * 0.8, 0.8 * 0.8 * 0.8 * 0.8 * 0.8)
FACTORS = {  # all that refinements by 0.5 or 1.5 can reach: three as published, two with the ladder
    1: (1.0, 1.5, 2.25, 3.375, 0.5, 0.75, 1.125, 0.25, 0.375, 0.125),
    0: (1.0, 1.5, 2.25, 0.5, 0.75, 0.25),
}
SHARES = (0.5, *(i / 8 for i in (1, 2, 3, 5, 6, 7)))  # all that three bisections of [0, 1] can reach
TRIMS = (0.8, 0.6, 0.4, 0.2, 0.0)
STEPS = (1, 2, 3, 5, 8, 13, 21)
WINDOW = 5


def magnitudes(x: Tensor) -> Tensor:
    """Return the bits of |x| as int64."""
    return (x.view(torch.int32) & 0x7FFFFFFF).long()


def magnitude_stats(acc: Tensor, above: int) -> selection.MagnitudeStats:
    bits = magnitudes(acc)
    chosen = bits >= above
    finite = acc[chosen & (bits < INFINITE)].abs().double()
    largest = int(bits[chosen].max()) if chosen.any() else 0
    return selection.MagnitudeStats(int(chosen.sum()), float(finite.sum()), float(finite.square().sum()), largest)


def count_above(acc: Tensor, thresholds: Sequence[int]) -> list[int]:
    bits = magnitudes(acc)
    return [int((bits >= threshold).sum()) for threshold in thresholds]


def kth_magnitude(acc: Tensor, k: int) -> tuple[int, int]:
    """Return the k-th largest magnitude, and how many are larger."""
    bits = magnitudes(acc)
    kth = int(bits.sort(descending=True).values[k - 1])
    return kth, int((bits > kth).sum())


def value_of(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def bits_of(magnitude: float) -> int:
    """Return the bits of the nearest f32 that is finite and above 0."""
    if not magnitude < value_of(INFINITE - 1):
        return INFINITE - 1
    bits: int = struct.unpack("<I", struct.pack("<f", max(magnitude, 0.0)))[0]
    return min(max(bits, 1), INFINITE - 1)


def gaussian_threshold(rms: float, ratio: float) -> float:
    """Return the magnitude that a share ``ratio`` of normal values of mean 0 exceeds."""
    return rms * NormalDist().inv_cdf(1 - ratio / 2)


def refine(counts: Sequence[int], k: int) -> int:
    published = len(counts) == len(FACTORS[1])
    factors, factor = FACTORS[published], 1.0
    for _ in range(2 + published):
        count = counts[factors.index(factor)]
        if 2 * k / 3 <= count <= 4 * k / 3:
            break
        factor *= 0.5 if count < k else 1.5
    return factors.index(factor)


def between(mean: float, largest: float, share: float) -> float:
    """Return the magnitude at ``share`` of the way from the mean to the largest one."""
    return mean + share * (largest - mean)


def bisect(counts: Sequence[int], k: int) -> int:
    """Return the index in ``counts``, of ``SHARES``, where bisection for a count between k and 2 k ends."""
    low, high = 0.0, 1.0
    index = 0
    while high - low > 0.2:
        share = (low + high) / 2
        index = SHARES.index(share)
        if k < counts[index] < 2 * k:
            break
        low, high = (low, share) if counts[index] <= k else (share, high)
    return index


def trim(counts: Sequence[int], k: float) -> int:
    """Return the index of the first threshold, from the highest down, that ``k`` elements reach; else of the lowest."""
    return next((i for i, count in enumerate(counts) if count >= k), len(counts) - 1)


def exponential_tail(mean: float, ratio: float) -> float:
    """Return the value that a share ``ratio`` of exponential values exceeds."""
    return -mean * math.log(ratio)


def pareto_tail(mean: float, variance: float, ratio: float) -> float:
    """Return the value that a share ``ratio`` of generalized Pareto values exceeds, with a fit by moments."""
    relative = mean * mean / variance if variance > 0 else math.inf
    shape = 0.5 * (relative - 1)
    if not abs(shape) > 1e-6 or math.isinf(shape):
        return exponential_tail(mean, ratio)
    return 0.5 * mean * (relative + 1) * (1 - math.pow(ratio, shape)) / shape


def stage_ratios(ratio: float, stages: int) -> list[float]:
    """Return the share of each stage; their product is ``ratio``, the first is 1/4."""
    if stages == 1 or ratio >= 0.25:
        return [ratio]
    return [0.25] + [(ratio / 0.25) ** (1 / (stages - 1))] * (stages - 1)


def estimates(how: libraries.Chooser, acc: Tensor, memory: Tensor, sample: Tensor | None) -> list[float]:
    given = list(how.given[: how.count])
    if how.estimator == selection.GIVEN:
        return given
    if how.estimator == selection.SAMPLED:
        assert sample is not None and sample.numel() == how.sampled
        return [value_of(kth_magnitude(sample, how.sample_k)[0]) * factor for factor in LOWERED]
    stats = magnitude_stats(acc, 1)
    if stats.count <= how.k:
        return [SMALLEST]
    mean, largest = stats.total / stats.count, value_of(stats.largest)
    if how.estimator == selection.NORMAL:
        estimate = gaussian_threshold((stats.squares / stats.count) ** 0.5, how.k / stats.count)
        return [estimate * factor for factor in FACTORS[how.published]]
    if how.estimator in (selection.BISECTED, selection.TRIMMED):
        return [between(mean, largest, share) for share in (SHARES if how.estimator == selection.BISECTED else TRIMS)]
    threshold = 0.0
    for stage, ratio in enumerate(stage_ratios(how.k / stats.count, int(memory[2]) or how.stages)):
        if stage:
            stats = magnitude_stats(acc, bits_of(threshold))
        if stats.count < 2:
            break
        whole = stats.total / stats.count
        mean, variance = whole - threshold, stats.squares / stats.count - whole * whole
        if how.estimator == selection.EXPONENTIAL:
            threshold += exponential_tail(mean, ratio)
        elif given and not stage:
            threshold = given[0]
        else:
            threshold += pareto_tail(mean, variance, ratio)
    return [threshold]


def adapt(how: libraries.Chooser, count: int, memory: Tensor) -> None:
    """Let the number of stages adapt to what an estimate would send."""
    memory[3:] += torch.tensor([1.0, count / how.k], dtype=torch.float64)
    if memory[3] == WINDOW:
        mean = float(memory[4]) / WINDOW
        stages = (int(memory[2]) or how.stages) + (mean < 0.8) - (mean > 1.2)
        memory[2] = min(max(stages, 1), how.most_stages)
        memory[3:] = 0


def settled(how: libraries.Chooser, counts: Sequence[int]) -> int:
    """Return the index of the estimate where the search as published ends; ``counts`` are of the estimates."""
    if len(counts) == 1 or how.estimator == selection.GIVEN:
        return 0
    if how.estimator == selection.SAMPLED:
        return trim(counts, 0.8 * how.k)
    return {selection.NORMAL: refine, selection.BISECTED: bisect, selection.TRIMMED: trim}[how.estimator](counts, how.k)


def choose(how: libraries.Chooser, acc: Tensor, memory: Tensor, sample: Tensor | None) -> Tensor:
    n = acc.numel()
    if how.reuse > 1 and 1 <= memory[1] < how.reuse:
        kept = bits_of(float(memory[0]))
        count, broken = count_above(acc, [kept, INFINITE])
        if not broken and 4 * count >= how.k and (count < how.capacity or how.capacity == n):
            memory[1] += 1
            return torch.tensor([kept, -1])
        memory[1] = 0
    own = [bits_of(value) for value in estimates(how, acc, memory, sample)]
    last = bits_of(float(memory[0])) if memory[0] else own[0] if own else 0
    steps = [sign * step << 16 for step in STEPS for sign in (1, -1)]
    ladder = [*own, *(min(max(last + step, 1), INFINITE - 1) for step in steps[: 15 - len(own)])] if own else []
    *counts, broken = count_above(acc, [*ladder, INFINITE])
    if broken:
        return torch.tensor([INFINITE, -1])
    chosen = settled(how, counts[: len(own)]) if own else 0
    if how.estimator in (selection.EXPONENTIAL, selection.PARETO):
        adapt(how, counts[0], memory)
    usable = [i for i, count in enumerate(counts) if 0.8 * how.k <= count <= how.capacity]
    if how.published:
        usable = [chosen] if 1 <= counts[chosen] <= how.capacity and how.estimator != selection.TRIMMED else []
    if usable:
        threshold, ties = ladder[chosen if chosen in usable else max(usable, key=counts.__getitem__)], -1
    else:
        threshold, above = kth_magnitude(acc, how.k)
        ties = how.k - above if threshold else int(not above)
    memory[0], memory[1] = value_of(max(threshold, 1)), 1
    return torch.tensor([threshold, ties])
