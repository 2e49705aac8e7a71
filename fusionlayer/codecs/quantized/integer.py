"""``int``: integers of 2, 3, 4 or 8 bits with one scale per group; presets ``int2`` to ``int8``; ``int_full``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ... import native
from ...base.errors import ConfigError
from ...native.wire import Plane, WireFormat
from ...observe.timeline import here
from ..base import Codec, registry
from ..capabilities import TransformCodec
from ..encoding import Encoding
from ..native import NativeCodec


@dataclass(frozen=True)
class Int(TransformCodec, NativeCodec, name="int"):
    """Integers of ``bits`` bits and an f32 scale for each ``group_size`` elements (SDP4Bit, sections 3.2 and 3.3).

    bits + 32 / group_size bits per element are sent. A group with a value that is not finite decodes to NaN; a group
    whose values are all below 2^-100 decodes to zeros. ``wire_format.md`` has the planes.

    4 and 8 bits have a level at 0 and one at the largest magnitude. 2 and 3 bits have levels at odd multiples of half a
    step, none at 0; the few values beyond the outermost level saturate, and error feedback sends the rest later.

    Attributes:
        bits: 8, 4, 3 or 2.
        group_size: elements that share a scale; a power of two from 32 to 4096.
        hadamard: rotate each 32 values by a Hadamard matrix first, which spreads outliers over their neighbours.
        rounding: "nearest", with half the variance, or "stochastic", unbiased, seeded per step and reproducible.
    """

    _full: ClassVar[bool] = False  # whether the lowest code of two's complement is used too

    bits: int = 8
    group_size: int = 128
    hadamard: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (2, 3, 4, 8):
            raise ConfigError(f"int codec: bits={self.bits!r}; expected 2, 3, 4 or 8")
        if type(self.group_size) is not int or self.group_size not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
            raise ConfigError(f"int codec: group_size={self.group_size!r}; expected a power of two from 32 to 4096")
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError(f"int codec: rounding={self.rounding!r}; expected 'nearest' or 'stochastic'")
        if not isinstance(self.hadamard, bool):
            raise ConfigError(f"int codec: hadamard={self.hadamard!r}; expected True or False")
        if self._full and (self.bits < 4 or self.hadamard or self.rounding == "stochastic"):
            raise ConfigError(
                f"{self}: the full range is for 4 or 8 bits, not rotated and rounded to the nearest; leave the other "
                "options out, or take 'int' or 'tlq'"
            )

    @property
    def unbiased(self) -> bool:
        """Whether rounding is stochastic."""
        return self.rounding == "stochastic"

    @property
    def block(self) -> int:
        """The group size."""
        return self.group_size

    @cached_property
    def untransformed(self) -> Codec:
        """This codec without the rotation: it decodes messages to rotated values, and it encodes rotated values."""
        return dataclasses.replace(self, hadamard=False) if self.hadamard else self

    @property
    def transform_run(self) -> int:
        """The size of the Hadamard matrix."""
        return 32 if self.hadamard else 1

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        groups = -(-numel // self.group_size)
        return [
            Plane("scales", groups, torch.float32),
            Plane("codes", groups * self.group_size * self.bits // 8, torch.uint8),
        ]

    def encode_difference(self, x: Tensor, base: Tensor, payload: Tensor, *, seed: int = 0, offset: int = 0) -> None:
        """As in ``Codec``, but in one pass without a difference in memory."""
        for tensor in (x, base):
            self._check_tensors(tensor, payload.unsqueeze(0))
        if x.dtype is not torch.float32 or x.shape != base.shape:
            raise ConfigError(
                f"{self}: a difference of {x.dtype} {tuple(x.shape)} and {tuple(base.shape)}; expected float32, "
                "one shape"
            )
        form = self.wire(x.numel(), x.dtype)
        spec = self._seeded(form, base.dtype, Encoding(seed, offset))
        with here.doing("fusionlayer: encode"):
            native.encode_difference(spec, form.offsets, x, base, payload[form.body : form.capacity])
        if self.header:
            self._seal(payload, form)

    def _recode_foreign(self, source: Codec, payloads: Tensor, body: Tensor, form: WireFormat, how: Encoding) -> None:
        if not isinstance(source, Int):
            return super()._recode_foreign(source, payloads, body, form, how)
        theirs = source.wire(form.numel, form.dtype)
        bodies = source._verified(payloads, theirs).unsqueeze(1)
        spec, known = self._seeded(form, form.dtype, how), source._known(theirs, form.dtype)
        native.recode_rows(known, theirs.offsets, bodies, spec, form.offsets, [0], how.residual, body.unsqueeze(0))

    def _sums(self, source: Codec) -> bool:
        return isinstance(source, Int) and source._is_direct

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        flags = native.INT_HADAMARD * self.hadamard + native.INT_STOCHASTIC * (self.rounding == "stochastic")
        return native.CodecParams(native.INT, (self.bits, self.group_size, flags + native.INT_FULL * self._full))


@dataclass(frozen=True)
class FullRangeInt(Int, name="int_full"):
    """``int`` over the full range of 4 or 8 bits, as in ZeRO++: with 4 bits, levels -8 to 7.

    A step is the largest magnitude over 8, or over 128, where ``int`` has 7 and 127. So steps are shorter, and a
    largest magnitude that is positive loses one step. Blocks are not rotated and values are rounded to the nearest.
    """

    _full: ClassVar[bool] = True


registry.add_preset("int8", "int", bits=8)
registry.add_preset("int4", "int", bits=4, hadamard=True)
registry.add_preset("int3", "int", bits=3, hadamard=True)
registry.add_preset("int2", "int", bits=2, hadamard=True)
