"""``sidco``: a threshold from a distribution that is fitted to the magnitudes, in stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...base.errors import ConfigError
from ...base.libraries import Chooser
from ...native import selection
from ..state import TensorState
from .sparsifier import MEMORY, ThresholdSparsifier

_FIRST_SHARE = 0.25  # of the elements, for the first of several stages
_MOST_STAGES = 64
_SAMPLE = 1 << 16


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

    @property
    def waits(self) -> bool:
        """With a gamma distribution: for the mean and its like, of each tensor."""
        return self.distribution == "gamma"

    def _chooser(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> tuple[Chooser, None]:
        estimator = selection.EXPONENTIAL if self.distribution == "exponential" else selection.PARETO
        most = min(_MOST_STAGES, max(1, math.ceil(-math.log2(self.density))))
        first = self._estimate(wanted, k, state, seed)
        return self._how(estimator, wanted, k, first, stages=self.stages, most=most), None

    def _estimate(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> list[float]:
        """Return the first stage's threshold where the core does not find it: of a gamma distribution."""
        if self.distribution != "gamma":
            return []
        stats = selection.magnitude_stats(wanted, 1)
        if stats.count <= k:
            return []
        kept = state.tensors.get(MEMORY)
        stages = self.stages if kept is None else int(kept[2]) or self.stages
        ratio = k / stats.count
        share = ratio if stages == 1 else max(ratio, _FIRST_SHARE)
        return [gamma_tail(stats.total / stats.count, _log_gap(wanted, seed), share)]


def _log_gap(x: Tensor, seed: int) -> float:
    """Return log(mean |x|) - mean(log |x|) of a sample of the elements that are not 0 and not subnormal."""
    stride = max(1, x.numel() // _SAMPLE) | 1
    sample = x[seed % stride :: stride].abs()
    sample = sample[sample >= torch.finfo(torch.float32).tiny].double()
    return float(sample.mean().log() - sample.log().mean()) if sample.numel() else 1.0
