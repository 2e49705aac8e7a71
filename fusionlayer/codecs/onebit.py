"""``onebit``: the signs of values, and for each group the mean of their magnitudes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import native
from ..errors import ConfigError
from ..wire import Plane, WireFormat
from ._base import Codec, registry
from ._encoding import Encoding
from ._native import NativeCodec
from ._torch import TorchCodec

__all__ = ["OneBit"]


@dataclass(frozen=True)
class OneBit(NativeCodec, TorchCodec, name="onebit"):
    """A bit for each value, its sign, and an f32 scale for each ``group_size`` values: the mean of their magnitudes.

    1-bit SGD (Seide et al., 2014) and the compression stage of 1-bit Adam (Tang et al., ICML 2021) send the same. No
    other multiple of the signs is closer to the values. The codec needs error feedback, which in ``two_shot`` covers
    workers and the owner of each sum alike. A group with a value that is not finite decodes to NaN. On the CPU each
    verb is one pass of a kernel; tensors elsewhere go through torch operations.

    Attributes:
        group_size: values that share a scale; a power of two from 32 to 4096. Fused tensors begin at multiples of 128,
            so a larger group may hold values of several tensors.
        warmup_steps: steps at the start of training in which values travel as they are, until an optimizer such as Adam
            knows the variance of gradients.
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

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        # A message of f32 has the same planes, and x + residual is not rounded to the type of x.
        _base(x)._encode_rows(self, x, bodies, self.wire(form.numel), how)

    def _decode_rows(self, bodies: Tensor, out: Tensor, form: WireFormat) -> None:
        _base(out)._decode_rows(self, bodies, out, form)

    def _sum_rows(self, bodies: Tensor, out: Tensor, form: WireFormat, add: bool) -> None:
        _base(out)._sum_rows(self, bodies, out, form, add)

    def _recode_rows(self, bodies: Tensor, body: Tensor, form: WireFormat, x: Tensor | None, how: Encoding) -> None:
        _base(body)._recode_rows(self, bodies, body, form, x, how)

    def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
        scales, signs = planes
        # The order of a sum changes its f64 value by far less than an f32 resolves, so every device gets the same bits.
        full = x.numel() - x.numel() % self.group_size
        scales[: full // self.group_size] = x[:full].view(-1, self.group_size).abs().mean(1, dtype=torch.float64)
        if full < x.numel():
            scales[-1] = x[full:].abs().mean(dtype=torch.float64)
        finite = scales.isfinite()
        scales.masked_fill_(~finite, torch.nan)
        # signbit reads the bits themselves: the result does not depend on whether the CPU flushes subnormals to zero.
        signs.copy_(_pack(x.signbit() & finite[:, None].expand(-1, self.group_size).reshape(-1)[: x.numel()]))

    def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
        scales, signs = planes
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        bits = _unpack(signs, len(scales) * self.group_size).view(-1, self.group_size)
        out.copy_(bits.float().mul_(-2).add_(1).mul_(scales[:, None]).view(-1)[: out.numel()])


def _base(tensor: Tensor) -> type[NativeCodec | TorchCodec]:
    """Return the class whose verbs a tensor takes: the kernels run on the CPU alone."""
    return NativeCodec if tensor.device.type == "cpu" else TorchCodec


def _pack(bits: Tensor) -> Tensor:
    """Return (ceil(n / 8),) uint8: bit i of byte j, from the lowest, is element 8 j + i of ``bits`` (n,) bool."""
    octets = torch.nn.functional.pad(bits.byte(), (0, -bits.numel() % 8)).view(-1, 8)
    return (octets << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, count: int) -> Tensor:
    """Return (count,) uint8: the bits of ``packed``, then zeros."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[:, None] >> places & 1).view(-1)[:count]
    return torch.nn.functional.pad(bits, (0, count - bits.numel()))
