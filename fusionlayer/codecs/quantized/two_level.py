"""``tlq``: integers of one width between nodes, another inside them; presets ``tlq_hs`` and ``ulq``; and ``qgz``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from ...base.errors import ConfigError
from ..base import Codec, registry
from ..capabilities import TwoLevelCodec
from .integer import FullRangeInt, Int


@dataclass(frozen=True)
class TwoLevelInt(TwoLevelCodec, Int, name="tlq"):
    """``int`` between nodes, and ``int`` of ``inner_bits`` inside them (SDP4Bit, section 3.2).

    It is made for ``two_level``. Collectives that do not know nodes use it as the codec between nodes.

    Attributes:
        bits: between nodes, 8, 4, 3 or 2.
        rounding: see ``int``; stochastic by default, so that both levels are unbiased.
        hadamard: see ``int``, on both levels: preset ``tlq_hs``.
        inner_bits: inside nodes, 8, 4, 3 or 2; preset ``ulq`` has 4 on both levels, and stochastic rounding.
        inner_group_size: elements that share a scale inside nodes; a power of two from 32 to 4096.
    """

    _inside: ClassVar[type[Int]] = Int

    bits: int = 4
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    inner_bits: int = 8
    inner_group_size: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            _ = self.within
        except ConfigError as error:
            raise ConfigError(f"{error} (inner_bits={self.inner_bits}, inside nodes)") from None

    @cached_property
    def within(self) -> Codec:
        """The codec of messages inside a node."""
        return self._inside(self.inner_bits, self.inner_group_size, self.hadamard, self.rounding, header=self.header)

    @property
    def block(self) -> int:
        """The larger of the two group sizes."""
        return max(self.group_size, self.inner_group_size)


@dataclass(frozen=True)
class QuantizedGradients(TwoLevelInt, name="qgz"):
    """``int_full`` of 4 bits on both levels, which ZeRO++ sends for gradients (Wang et al., 2023, section 3.3).

    Rounded to the nearest, values lose less than half of the loss with ``ulq``, which rounds stochastically, but
    rounding is biased. Options are ``tlq``'s.
    """

    _full: ClassVar[bool] = True
    _inside: ClassVar[type[Int]] = FullRangeInt

    rounding: Literal["nearest", "stochastic"] = "nearest"
    inner_bits: int = 4
    inner_group_size: int = 128


registry.add_preset("tlq_hs", "tlq", hadamard=True)
registry.add_preset("ulq", "tlq", inner_bits=4, inner_group_size=128)
