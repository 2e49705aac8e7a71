"""``onebit``: the signs of values, and for each group the mean of their magnitudes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ... import native
from ...base.errors import ConfigError
from ...native.wire import Plane
from ..base import Codec, registry
from ..native import NativeCodec


@dataclass(frozen=True)
class OneBit(NativeCodec, name="onebit"):
    """A bit for each value, its sign, and an f32 scale for each ``group_size`` values: the mean of their magnitudes.

    1-bit SGD (Seide et al., 2014) and the compression stage of 1-bit Adam (Tang et al., ICML 2021) send the same. No
    other multiple of the signs is closer to the values. The codec needs error feedback, which in ``two_shot`` covers
    workers and the owner of each sum alike. A group with a value that is not finite decodes to NaN.

    Attributes:
        group_size: values that share a scale; a power of two from 32 to 4096. Fused tensors begin at multiples of 128,
            so a larger group may hold values of several tensors.
        warmup_steps: steps at the start of training in which values are sent uncompressed, until an optimizer such as
            Adam has an estimate of the gradients' variance.
    """

    needs_feedback: ClassVar[bool] = True

    group_size: int = 1024
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if type(self.group_size) is not int or self.group_size not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
            raise ConfigError(f"onebit codec: group_size={self.group_size!r}; expected a power of two from 32 to 4096")
        if type(self.warmup_steps) is not int or self.warmup_steps < 0:
            raise ConfigError(f"onebit codec: warmup_steps={self.warmup_steps!r}; expected at least 0")

    @property
    def block(self) -> int:
        """The group size."""
        return self.group_size

    def at_step(self, step: int) -> Codec:
        return self if step >= self.warmup_steps else registry.get("raw", header=self.header)

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        return [
            Plane("scales", -(-numel // self.group_size), torch.float32),
            Plane("signs", -(-numel // 8), torch.uint8),
        ]

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        return native.CodecParams(native.ONEBIT, (0, self.group_size))
