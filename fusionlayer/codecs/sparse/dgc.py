"""``dgc``: deep gradient compression, with a threshold from a sample, momentum correction, clipping and warm-up."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...base.errors import ConfigError
from ...base.libraries import Chooser
from ...native import selection
from ...native.wire import WireFormat
from ..base import Codec
from ..encoding import Encoding
from ..state import TensorState
from .sparsifier import ThresholdSparsifier

_RANK = 16  # the threshold is the 16th largest of the sample or a later one: its count is mostly off by 1/4 at most


def warm_up_density(density: float, stage: int, stages: int) -> float:
    """Return the density of warm-up stage 0, 1, ..., ``stages`` - 1; it falls exponentially towards ``density``."""
    return float(density ** ((stage + 1) / (stages + 1)))


def clipping(norm: Tensor, limit: float, ranks: int) -> Tensor:
    """Return the factor () f64, at most 1, that clips a rank's gradient of norm ``norm`` to limit / sqrt(ranks)."""
    limit /= math.sqrt(ranks)
    return limit / norm.clamp_min(limit)


@dataclass(frozen=True)
class DGC(ThresholdSparsifier, name="dgc"):
    """Top-k by a threshold from a strided sample of the tensor (Lin et al., "Deep Gradient Compression", ICLR 2018,
    sections 3.1 to 3.3).

    The sample is a share ``sampling`` of the elements: it begins at an element that the seed chooses and takes elements
    with a fixed stride. If the sample's threshold would send less than 0.8 k elements, it is lowered by a fifth, up to
    five times. If it would send too many, the k largest are selected.

    Momentum correction with factor masking, clipping and warm-up are off by default. With ``momentum`` the optimizer
    must not apply momentum itself. ``momentum`` and ``clip_norm`` need whole tensors and keep a state of each, so they
    work ahead of fusion only.

    Attributes:
        sampling: share of a tensor that the sample takes; it takes more of a small tensor.
        momentum: u = momentum * u + gradient is accumulated instead of the gradient, and u becomes 0 where an element
            is sent.
        nesterov: momentum in the form of Nesterov.
        clip_norm: largest norm of one tensor's summed gradient. Each rank clips its own gradient to clip_norm /
            sqrt(ranks) before accumulation. None: no clipping. (The paper clips by the norm of all tensors together.)
        warmup_steps: steps in which the density falls from near 1 to ``density``; 0: no warm-up.
        warmup_stages: number of densities in the warm-up, each used equally long.
    """

    sampling: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    clip_norm: float | None = None
    warmup_steps: int = 0
    warmup_stages: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.sampling <= 1:
            raise ConfigError(f"dgc codec: sampling={self.sampling!r}; expected a share above 0, at most 1")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"dgc codec: momentum={self.momentum!r}; expected at least 0 and less than 1")
        if self.nesterov and not self.momentum:
            raise ConfigError("dgc codec: nesterov=True without momentum; set momentum, 0.9 for instance")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"dgc codec: clip_norm={self.clip_norm!r}; expected a norm above 0, or None")
        if type(self.warmup_steps) is not int or self.warmup_steps < 0:
            raise ConfigError(f"dgc codec: warmup_steps={self.warmup_steps!r}; expected at least 0")
        if type(self.warmup_stages) is not int or not 1 <= self.warmup_stages <= 64:
            raise ConfigError(f"dgc codec: warmup_stages={self.warmup_stages!r}; expected 1 to 64")

    def at_step(self, step: int) -> Codec:
        if step >= self.warmup_steps:
            return self
        stage = step * self.warmup_stages // self.warmup_steps
        density = warm_up_density(self.density, stage, self.warmup_stages)
        return dataclasses.replace(self, density=density, warmup_steps=0)

    def encode_tensor(
        self, x: Tensor, payload: Tensor, state: TensorState, *, scale: float = 1.0, ranks: int = 1, seed: int = 0
    ) -> None:
        if self.clip_norm is not None:  # on a device the norm stays there
            given = x.float()
            factor = clipping(selection.norm(given) * abs(scale), self.clip_norm, ranks) * scale
            x, scale = given * factor.float(), 1.0
        super().encode_tensor(x, payload, state, scale=scale, ranks=ranks, seed=seed)

    def _encode_sum(
        self, x: Tensor, scale: float, wanted: Tensor, body: Tensor, state: TensorState, seed: int, offset: int
    ) -> None:
        if not self.momentum:
            return super()._encode_sum(x, scale, wanted, body, state, seed, offset)
        if "velocity" not in state.tensors:
            state.tensors["velocity"] = torch.zeros_like(wanted)
        velocity = state.tensors["velocity"]
        selection.accumulate_momentum(x, scale, self.momentum, self.nesterov, velocity, wanted)
        self._send(wanted, body, self._select(wanted, state, seed), seed, offset, clear=velocity)

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        if self.momentum or self.clip_norm is not None:
            raise ConfigError(
                f"{self}: momentum and clip_norm need each whole tensor and its memory; send it ahead of fusion "
                "(ahead=True), or leave them out"
            )
        super()._encode_rows(x, bodies, form, how)

    def _chooser(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> tuple[Chooser, Tensor]:
        # Rows of a matrix often have a power of two elements: an odd stride does not sample the same columns always.
        stride = max(1, min(round(1 / self.sampling), k // _RANK)) | 1
        sample = wanted[seed % stride :: stride].contiguous()
        how = self._how(selection.SAMPLED, wanted, k)
        how.sampled, how.sample_k = sample.numel(), math.ceil(k / wanted.numel() * sample.numel())
        return how, sample
