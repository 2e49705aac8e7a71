"""``sidco``: a threshold from a distribution that is fitted to the magnitudes, in stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .. import native
from ..errors import ConfigError
from ._sparse import SMALLEST, ThresholdSparsifier, bits_of
from ._state import TensorState

__all__ = ["SIDCo", "exponential_tail", "gamma_tail", "pareto_tail", "stage_ratios"]

_FIRST_RATIO = 0.25
_WINDOW = 5  # the number of stages adapts after so many estimates
_SAMPLE = 1 << 16


def exponential_tail(mean: float, ratio: float) -> float:
    """Return the value that a share ``ratio`` of exponential values exceeds."""
    return -mean * math.log(ratio)


def pareto_tail(mean: float, variance: float, ratio: float) -> float:
    """Return the value that a share ``ratio`` of generalized Pareto values exceeds, with a fit by moments.

    If variance = mean^2, the shape is 0 and the distribution is exponential.
    """
    relative = mean * mean / variance if variance > 0 else math.inf
    shape = 0.5 * (relative - 1)
    if not abs(shape) > 1e-6 or math.isinf(shape):
        return exponential_tail(mean, ratio)
    return 0.5 * mean * (relative + 1) * (1 - math.pow(ratio, shape)) / shape


def gamma_tail(mean: float, log_gap: float, ratio: float) -> float:
    """Return the value that a share ``ratio`` of gamma values exceeds, by Minka's approximation of the likeliest shape.

    Args:
        mean: mean of the values.
        log_gap: logarithm of the mean minus the mean of the logarithms; positive.
        ratio: the share.
    """
    from scipy.special import gammaincinv  # takes a while to import

    gap = max(log_gap, 1e-6)
    shape = (3 - gap + math.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
    return mean / shape * float(gammaincinv(shape, 1 - ratio))


def stage_ratios(ratio: float, stages: int) -> list[float]:
    """Return the share of each stage; their product is ``ratio``, the first is 1/4."""
    if stages == 1 or ratio >= _FIRST_RATIO:
        return [ratio]
    return [_FIRST_RATIO] + [(ratio / _FIRST_RATIO) ** (1 / (stages - 1))] * (stages - 1)


@dataclass(frozen=True)
class SIDCo(ThresholdSparsifier, name="sidco"):
    """The elements beyond the quantile of a sparsity-inducing distribution (Abdelmoniem et al., "SIDCo", MLSys 2021).

    Stage 1 fits the distribution to all magnitudes; each further stage fits it to those above the last threshold. Each
    stage costs a pass over the tensor. The number of stages adapts every five estimates. If they sent more than 1.2
    times k on average it falls by one; if they sent less than 0.8 times k it rises by one. Elements that are exactly 0
    do not count.

    Attributes:
        distribution: "exponential"; "generalized_pareto"; "gamma", with generalized Pareto from the second stage on.
        stages: number of stages to begin with.
    """

    distribution: Literal["exponential", "gamma", "generalized_pareto"] = "exponential"
    stages: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distribution not in ("exponential", "gamma", "generalized_pareto"):
            raise ConfigError(
                f"sidco codec: distribution={self.distribution!r}; expected 'exponential', 'gamma' or "
                "'generalized_pareto'"
            )
        if type(self.stages) is not int or not 1 <= self.stages <= 16:
            raise ConfigError(f"sidco codec: stages={self.stages!r}; expected 1 to 16")

    def _estimate(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> list[float]:
        stats = native.magnitude_stats(wanted, 1)
        if stats.count <= k:
            return [SMALLEST]
        threshold = 0.0
        for stage, ratio in enumerate(stage_ratios(k / stats.count, int(state.numbers.get("stages", self.stages)))):
            if stage:
                stats = native.magnitude_stats(wanted, bits_of(threshold))
            if stats.count < 2:
                break
            whole = stats.total / stats.count
            mean, variance = whole - threshold, stats.squares / stats.count - whole * whole
            if self.distribution == "exponential":
                threshold += exponential_tail(mean, ratio)
            elif self.distribution == "gamma" and not stage:
                threshold = gamma_tail(mean, _log_gap(wanted, seed), ratio)
            else:
                threshold += pareto_tail(mean, variance, ratio)
        return [threshold]

    def _choose(self, counts: Sequence[int], k: int, state: TensorState) -> int:
        numbers = state.numbers
        numbers["sent"] = numbers.get("sent", 0) + counts[0] / k
        numbers["estimates"] = numbers.get("estimates", 0) + 1
        if numbers["estimates"] == _WINDOW:
            mean = numbers["sent"] / _WINDOW
            stages = numbers.get("stages", self.stages) + (mean < 0.8) - (mean > 1.2)
            most = max(1, math.ceil(-math.log2(self.density)))
            numbers.update(stages=min(max(stages, 1), most), sent=0, estimates=0)
        return 0


def _log_gap(x: Tensor, seed: int) -> float:
    """Return log(mean |x|) - mean(log |x|) of a sample of the elements that are not 0 and not subnormal."""
    stride = max(1, x.numel() // _SAMPLE) | 1
    sample = x[seed % stride :: stride].abs()
    sample = sample[sample >= torch.finfo(torch.float32).tiny].double()
    return float(sample.mean().log() - sample.log().mean()) if sample.numel() else 1.0
