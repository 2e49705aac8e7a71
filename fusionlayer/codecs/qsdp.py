"""``qsdp``: integers on a grid that is shifted at random, for weights and gradients of sharded models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..seeds import derive_seed
from ..wire import Plane
from ._torch import TorchCodec

__all__ = ["QSDP"]

_TINY = 2.0**-100
_ROUNDER = 1.5 * 2.0**23


@dataclass(frozen=True)
class QSDP(TorchCodec, name="qsdp"):
    """Rounding to the nearest point of a shifted grid (Markov et al., "Quantized distributed training", ICML 2023).

    Values of a group become step * integer + shift, where the shift is drawn from [-step / 2, step / 2). The mean over
    shifts is the value, and no value is off by more than half a step. Step and shift are f32 and travel with each
    group: bits + 64 / group_size bits per element. A group with a value that is not finite decodes to NaN. A group
    whose values are all below 2^-100 decodes to zeros.

    Attributes:
        bits: 8 or 4.
        group_size: elements that share step and shift; a power of two from 32 to 1024, so that there are many shifts.
    """

    bits: int = 8
    group_size: int = 1024

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (4, 8):
            raise ConfigError(f"qsdp codec: bits={self.bits!r}; expected 4 or 8")
        if type(self.group_size) is not int or self.group_size not in (32, 64, 128, 256, 512, 1024):
            raise ConfigError(f"qsdp codec: group_size={self.group_size!r}; expected a power of two from 32 to 1024")

    @property
    def unbiased(self) -> bool:
        """Always: the mean over shifts is the value."""
        return True

    @property
    def block(self) -> int:
        """The group size."""
        return self.group_size

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        groups = -(-numel // self.group_size)
        return [
            Plane("steps", groups, torch.float32),
            Plane("shifts", groups, torch.float32),
            Plane("codes", groups * self.group_size * self.bits // 8, torch.uint8),
        ]

    def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
        steps, shifts, codes = planes
        values = torch.nn.functional.pad(x.float(), (0, -x.numel() % self.group_size)).view(-1, self.group_size)
        largest = values.abs().amax(1)
        # The largest value lies half a step inside the range of codes, so no shift moves a value out of it.
        step = largest / (2 ** (self.bits - 1) - 1.5)
        step = torch.where(largest < _TINY, 0.0, step).where(largest.isfinite(), torch.nan)
        draws = _draws(seed, offset, len(values), self.group_size).to(x.device)
        steps.copy_(step)
        shifts.copy_(torch.where(step == 0, 0.0, draws * step))
        # Adding _ROUNDER rounds to the nearest integer, as the sum has no bits below 1; torch's round is far slower.
        whole = ((values - shifts[:, None]) / step[:, None]).add_(_ROUNDER).sub_(_ROUNDER)
        whole = torch.where((step > 0)[:, None], whole, 0.0).to(torch.int8).view(torch.uint8)
        if self.bits == 8:
            codes.copy_(whole.view(-1))
        else:
            low, high = whole.chunk(2, 1)
            codes.copy_((low & 15 | high << 4).reshape(-1))

    def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
        steps, shifts, codes = planes
        rows = codes.view(len(steps), -1).view(torch.int8)
        if self.bits == 4:
            rows = torch.cat([rows << 4 >> 4, rows >> 4], 1)
        values = rows.float().mul_(steps[:, None]).add_(shifts[:, None])
        sound = steps.isfinite() & shifts.isfinite()
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
