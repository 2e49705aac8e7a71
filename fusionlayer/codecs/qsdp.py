"""``qsdp``: integers between the minimum and the maximum of a group, for weights and gradients of sharded models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..seeds import derive_seed
from ..wire import Plane
from ._arithmetic import rounding_noise
from ._base import registry
from ._torch import TorchCodec

__all__ = ["QSDP"]

_TINY = 2.0**-100
_ROUNDER = 1.5 * 2.0**23


@dataclass(frozen=True)
class QSDP(TorchCodec, name="qsdp"):
    """Points of a grid from minimum to maximum of a group (Markov et al., "Quantized distributed training", ICML 2023).

    The grid of each group is step * integer + origin; step and origin are f32 and travel with the group: bits +
    64 / group_size bits per element. Either rounding is unbiased. A group with a value that is not finite decodes to
    NaN. A group whose values lie within 2^-100 decodes to their middle, so equal values come back.

    Attributes:
        bits: 8 or 4.
        group_size: elements that share step and origin; a power of two from 32 to 1024, so that there are many shifts.
        rounding: "shift", which the paper has for weights: the grid is shifted by up to half a step at random, and
            values go to the nearest point. The mean over shifts is the value, and no value is off by more than half a
            step. "stochastic", which it has for gradients: each value goes up or down at random.
    """

    bits: int = 8
    group_size: int = 1024
    rounding: Literal["shift", "stochastic"] = "shift"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (4, 8):
            raise ConfigError(f"qsdp codec: bits={self.bits!r}; expected 4 or 8")
        if type(self.group_size) is not int or self.group_size not in (32, 64, 128, 256, 512, 1024):
            raise ConfigError(f"qsdp codec: group_size={self.group_size!r}; expected a power of two from 32 to 1024")
        if self.rounding not in ("shift", "stochastic"):
            raise ConfigError(f"qsdp codec: rounding={self.rounding!r}; expected 'shift' or 'stochastic'")

    @property
    def unbiased(self) -> bool:
        """Always: the mean over shifts, or over draws, is the value."""
        return True

    @property
    def block(self) -> int:
        """The group size."""
        return self.group_size

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        groups = -(-numel // self.group_size)
        return [
            Plane("steps", groups, torch.float32),
            Plane("origins", groups, torch.float32),
            Plane("codes", groups * self.group_size * self.bits // 8, torch.uint8),
        ]

    def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
        steps, origins, codes = planes
        if not x.numel():
            return
        lacking = -x.numel() % self.group_size
        values = torch.cat([x, x[-1:].expand(lacking)]).float().view(-1, self.group_size)
        lowest, highest = values.aminmax(dim=1)
        lower, upper = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        # A shifted grid needs room for one more step, so that no shift moves a value out of the range of codes.
        shifted = self.rounding == "shift"
        parts = upper - lower - shifted
        step = highest / parts - lowest / parts
        step = torch.where(step < _TINY, 0.0, step).where(step.isfinite(), torch.nan)
        middle = highest / 2 + lowest / 2
        shares = _draws(seed, offset, len(values), self.group_size).to(x.device) + 0.5 if shifted else 0.5
        origin = middle + shares * step
        steps.copy_(step)
        origins.copy_(torch.where(step == 0, middle, origin))
        points = (values - origin[:, None]) / step[:, None]
        if not shifted:
            points += rounding_noise(seed, offset, values.numel(), x.device).view_as(values)
        # Adding _ROUNDER rounds to the nearest integer, as the sum has no bits below 1; torch's round is far slower.
        whole = points.clamp_(lower, upper).add_(_ROUNDER).sub_(_ROUNDER)
        whole = torch.where((step > 0)[:, None], whole, 0.0).to(torch.int8).view(torch.uint8)
        if self.bits == 8:
            codes.copy_(whole.view(-1))
        else:
            low, high = whole.chunk(2, 1)
            codes.copy_((low & 15 | high << 4).reshape(-1))

    def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
        steps, origins, codes = planes
        rows = codes.view(len(steps), -1).view(torch.int8)
        if self.bits == 4:
            rows = torch.cat([rows << 4 >> 4, rows >> 4], 1)
        values = rows.float().mul_(steps[:, None]).add_(origins[:, None])
        sound = steps.isfinite() & origins.isfinite()
        out.copy_(torch.where(sound[:, None], values, torch.nan).view(-1)[: out.numel()])


def _draws(seed: int, offset: int, groups: int, size: int) -> Tensor:
    """Return (groups,) f32, uniform in [-1/2, 1/2): SplitMix64 at the place of each group's first element."""
    with np.errstate(over="ignore"):
        first = np.arange(groups, dtype=np.uint64) * np.uint64(size) + np.uint64(offset)
        state = (first + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(derive_seed(seed))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return torch.from_numpy((state >> np.uint64(40)).astype(np.float32)) * 2.0**-24 - 0.5


registry.add_preset("qsdp_gradients", "qsdp", rounding="stochastic")
