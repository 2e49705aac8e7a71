"""``dynamiq``: a few bits per value where sums are encoded anew at every hop, more of them where the energy is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .. import native
from ..errors import ConfigError
from ..wire import Plane
from ._arrangement import Arrangement
from ._native import NativeCodec
from ._widths import allocate, deal, pack_widths

if TYPE_CHECKING:
    from ..transport import Transport
    from ._base import Codec

__all__ = ["DynamiQ"]

SUPER_GROUP, GROUP = 256, 16
_LINE = 64  # bytes of codes of a super-group with 2 bits
_UNIT = 1e-4  # of epsilon
_MOST_RANKS = 1 << 14


@dataclass(frozen=True)
class DynamiQ(NativeCodec, name="dynamiq"):
    """2, 4 or 8 bits for each value of a super-group, ``bits`` on average, all included (DynamiQ, 2026).

    Super-groups of 256 values have a scale in bf16, groups of 16 in them one of 8 bits. Levels lie closer together near
    zero. Rounding is stochastic, and the values' expectation is the value. Larger super-groups get more bits.

    ``ring`` and ``butterfly`` let it agree: ranks add up the mean and the energy of each super-group, 4 bytes for 256
    values. From these follow on every rank the bits that each gets, of all the tensor has, and which chunk it travels
    in, so that all chunks take equally much. Values travel relative to the mean over ranks, and ranks round with
    numbers that are anticorrelated: where one rounds up, another rounds down. Elsewhere each message is made by itself,
    with bits by its own energy.

    A message has ``bits`` for each value, and 24 bytes for 64 super-groups are part of that; codes are rounded up to
    128 bytes. What ranks exchange to agree is not. A NaN or Inf makes its super-group NaN.

    Attributes:
        bits: budget for each value, 3 to 8.
        variable: super-groups get different bits; without, as many as the largest power of two in ``bits``, whatever
            that and the scales come to.
        nonuniform: levels are those of the epsilons; without, they are evenly spaced.
        hierarchical: groups' scales are relative to their super-group's; without, bf16 each.
        correlated: ranks' rounding is anticorrelated.
        centred: values travel relative to the mean of their super-group.
        epsilon4: levels of 4 bits are f(r) = ((1 + 2 e^2)^r - 1) / ((1 + 2 e^2)^7 - 1), in steps of 1e-4; 0.05 to 0.33.
        epsilon8: of 8 bits, likewise with 127 for 7; 0.02 to 0.07.
        given: (m,) uint8, the bits that ranks agreed on, in the order of travel.
        agreed: the order, and the means.
        shared: seed that all ranks have.
        place: number of this rank's interval for rounding, and of how many.
    """

    local: ClassVar[bool] = False  # super-groups compete for bits

    bits: int = 5
    variable: bool = True
    nonuniform: bool = True
    hierarchical: bool = True
    correlated: bool = True
    centred: bool = True
    epsilon4: float = 0.27
    epsilon8: float = 0.061
    given: Tensor | None = field(default=None, kw_only=True, compare=False, repr=False)
    agreed: Arrangement | None = field(default=None, kw_only=True, compare=False, repr=False)
    shared: int | None = field(default=None, kw_only=True, compare=False, repr=False)
    place: tuple[int, int] = field(default=(0, 1), kw_only=True, compare=False, repr=False)
    _packed: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 3 <= self.bits <= 8:
            raise ConfigError(f"dynamiq codec: bits={self.bits!r}; expected a budget of 3 to 8 bits per value")
        for name in ("variable", "nonuniform", "hierarchical", "correlated", "centred"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"dynamiq codec: {name}={getattr(self, name)!r}; expected True or False")
        for name, least, most in (("epsilon4", 0.05, 0.33), ("epsilon8", 0.02, 0.07)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value <= most:
                raise ConfigError(f"dynamiq codec: {name}={value!r}; expected {least} to {most}")

    @property
    def unbiased(self) -> bool:
        """True."""
        return True

    @property
    def block(self) -> int:
        """A super-group."""
        return SUPER_GROUP

    @property
    def arrangement(self) -> Arrangement | None:
        """What ranks agreed on."""
        return self.agreed

    def agree(
        self,
        x: Tensor,
        transport: Transport,
        *,
        seed: int = 0,
        residual: Tensor | None = None,
        chunks: Sequence[int] | None = None,
        movable: bool = True,
    ) -> Codec:
        """Return the codec of a sum in these ``chunks``; without them, where none is kept in order, this one."""
        if chunks is None or not x.numel():
            return self
        means, energies = native.dynamiq_stats(x, residual)
        facts = torch.cat([means / transport.size, energies]).bfloat16()
        transport.all_reduce(facts)
        means, energies = facts.float().split(means.numel())
        lengths = [-(-n // SUPER_GROUP) for n in chunks]
        bits = self._allocated(energies, lengths, movable)
        order = deal(bits, lengths) if movable and len(lengths) > 1 else None
        given = bits if order is None else bits[order]
        if self.header:
            transport.agree("bits of super-groups", given.cpu().numpy().tobytes())
        centre = means.nan_to_num(0.0, 0.0, 0.0) if self.centred else None
        correlated = self.correlated and transport.size <= _MOST_RANKS
        return replace(
            self,
            given=given,
            agreed=Arrangement(x.numel(), SUPER_GROUP, order, centre, transport.size),
            shared=seed,
            place=(_interval(transport.rank, transport.size), transport.size) if correlated else (0, 1),
        )

    def _allocated(self, energies: Tensor, lengths: Sequence[int], movable: bool = True) -> Tensor:
        """Return (m,) uint8, the bits of each super-group of messages of so many."""
        if not self.variable:
            return torch.full_like(energies, self._width, dtype=torch.uint8)
        rooms = [self._lines(n) for n in lengths]
        if movable:
            return allocate(energies, lengths, rooms)
        parts = zip(energies.split(list(lengths)), lengths, rooms, strict=True)
        return torch.cat([allocate(part, [n], [room]) for part, n, room in parts])

    @property
    def _width(self) -> int:
        return 1 << (self.bits.bit_length() - 1)

    def _lines(self, groups: int) -> int:
        """Return the units of 64 bytes that a message of so many super-groups has for codes."""
        if not self.variable:
            return groups * self._width // 2
        scales = 2 + GROUP if self.hierarchical else 2 * GROUP
        left = groups * (SUPER_GROUP * self.bits // 8 - scales) - 24 * -(-groups // 64)
        return min(4 * groups, max(groups, 2 * -(-left // (2 * _LINE))))

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        groups = -(-numel // SUPER_GROUP)
        return [
            Plane("widths", 24 * -(-groups // 64), torch.uint8),
            Plane("scales", groups * self.hierarchical, torch.bfloat16),
            Plane("group scales", groups * GROUP, torch.uint8 if self.hierarchical else torch.bfloat16),
            Plane("codes", self._lines(groups) * _LINE, torch.uint8),
        ]

    def _spec(
        self, numel: int, encoded: torch.dtype, dtype: torch.dtype, seed: int = 0, offset: int = 0
    ) -> native.Spec:
        rank, ranks = self.place
        epsilons = [round(value / _UNIT) * self.nonuniform for value in (self.epsilon4, self.epsilon8)]
        lines = self._lines(-(-numel // SUPER_GROUP))
        flags = 0 if self.hierarchical else native.DYNAMIQ_FLAT
        param = (flags, lines, rank | ranks << 16, epsilons[0] | epsilons[1] << 16)
        known = self.shared if ranks > 1 and self.shared is not None else seed
        return native.CodecParams(native.DYNAMIQ, param).spec(numel, dtype, known, offset)

    def _place_widths(self, x: Tensor, bodies: Tensor, n: int, offset: int, residual: Tensor | None) -> None:
        """Write the widths of ``bodies`` (k, nbytes): as agreed on, or by the energy of each piece of ``x``."""
        groups = -(-n // SUPER_GROUP)
        for i, body in enumerate(bodies):
            plane = body[: 24 * -(-groups // 64)]
            if self.given is None:
                part = slice(i * n, (i + 1) * n)
                _, energies = native.dynamiq_stats(x[part], None if residual is None else residual[part])
                _pack(self._allocated(energies, [groups]), plane)
            else:
                plane.copy_(self._given_widths(offset // SUPER_GROUP + i * groups, groups))

    def _given_widths(self, first: int, groups: int) -> Tensor:
        """Return the plane of widths of these super-groups, which every hop of their chunk has."""
        key = first, groups
        if key not in self._packed:
            assert self.given is not None
            bits = self.given[first : first + groups]
            plane = torch.empty(24 * -(-groups // 64), dtype=torch.uint8, device=bits.device)
            _pack(bits, plane)
            self._packed[key] = plane
        return self._packed[key]

    def _encode_rows(self, x: Tensor, bodies: Tensor, n: int, seed: int, offset: int, residual: Tensor | None) -> None:
        if n and len(bodies):
            self._place_widths(x, bodies, n, offset, residual)
            super()._encode_rows(x, bodies, n, seed, offset, residual)

    def _recode_rows(
        self,
        bodies: Tensor,
        body: Tensor,
        n: int,
        dtype: torch.dtype,
        x: Tensor | None,
        seed: int,
        offset: int,
        residual: Tensor | None,
    ) -> None:
        if self.given is None:  # the bits follow from the sum
            total = torch.zeros(n, device=body.device) if x is None else x.to(torch.float32, copy=True)
            self._sum_rows(bodies, total, dtype, add=True)
            return self._encode_rows(total, body.unsqueeze(0), n, seed, offset, residual)
        self._place_widths(body, body.unsqueeze(0), n, offset, residual)
        super()._recode_rows(bodies, body, n, dtype, x, seed, offset, residual)


def _pack(bits: Tensor, plane: Tensor) -> None:
    if bits.is_cuda:
        plane.copy_(pack_widths(bits))
    else:
        native.dynamiq_widths(bits, plane)


def _interval(rank: int, ranks: int) -> int:
    """Return the number of the interval that a rank rounds in, before the shift that differs by element.

    Neighbours in a ring, whose sums are about equally large, are far apart: steps are the golden section of all, or the
    number next to it that leads through all intervals.
    """
    golden = ranks * (5**0.5 - 1) / 2
    coprime = [step for step in range(1, ranks + 1) if math.gcd(step, ranks) == 1]
    return rank * min(coprime, key=lambda step: abs(step - golden)) % ranks
