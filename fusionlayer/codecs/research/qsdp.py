"""``qsdp``: integers between the minimum and the maximum of a group, for weights and gradients of sharded models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ... import native
from ...base.errors import ConfigError
from ...native.wire import Plane
from ..base import registry
from ..native import NativeCodec


@dataclass(frozen=True)
class QSDP(NativeCodec, name="qsdp"):
    """Points of a grid from minimum to maximum of a group (Markov et al., "Quantized distributed training", ICML 2023).

    The grid of each group is step * integer + origin; step and origin are f32 and are sent with the group: bits + 64 /
    group_size bits per element. Either rounding is unbiased. A group with a value that is not finite decodes to NaN. A
    group whose values lie within 2^-100 decodes to their middle, so equal values stay equal.

    Attributes:
        bits: 8 or 4.
        group_size: elements that share step and origin; a power of two from 32 to 1024, so that there are many shifts.
        rounding: "shift", which the paper has for weights: the grid is shifted by up to half a step at random, and
            values are rounded to the nearest point. The mean over shifts is the value, and no value is off by more than
            half a step. "stochastic", which it has for gradients: each value goes up or down at random.
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

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        flags = native.QSDP_STOCHASTIC * (self.rounding == "stochastic")
        return native.CodecParams(native.QSDP, (self.bits, self.group_size, flags))


registry.add_preset("qsdp_gradients", "qsdp", rounding="stochastic")
