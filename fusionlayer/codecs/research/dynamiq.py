"""``dynamiq``: a few bits per value for sums that every hop encodes again, with more bits where the energy is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ... import native
from ...base.errors import ConfigError
from ...base.libraries import Spec
from ...native.wire import Plane, WireFormat
from ..arrangement import Arrangement
from ..base import Codec
from ..capabilities import AgreeingCodec
from ..encoding import Encoding
from ..native import NativeCodec
from ._widths import allocate, deal, pack_widths

if TYPE_CHECKING:
    from ...transport import Transport

SUPER_GROUP, GROUP = 256, 16
_LINE = 64  # bytes of codes of a super-group with 2 bits
_UNIT = 1e-4  # the core takes epsilons in steps of this size
_MOST_RANKS = 1 << 14


@dataclass(frozen=True)
class DynamiQ(AgreeingCodec, NativeCodec, name="dynamiq"):
    """2, 4 or 8 bits for each value of a super-group; ``bits`` on average, metadata included (DynamiQ, 2026).

    A super-group of 256 values has a bf16 scale; each group of 16 values in it has a scale of 8 bits. Levels lie closer
    together near zero. Rounding is stochastic and unbiased. Super-groups with more energy get more bits.

    Unless you name another collective, it takes ``butterfly`` over a power of two of ranks, ``ring`` over other
    numbers, and ``one_shot`` over two. In ``ring`` and ``butterfly`` the ranks agree first: they sum the mean and the
    energy of each super-group, 4 bytes for 256 values. Every rank computes from these the bits of each super-group and
    its chunk, so that all chunks take equally many bytes. Values are sent relative to the mean over ranks. Ranks round
    with anticorrelated random numbers: where one rounds up, another rounds down. In other collectives each message gets
    its bits from its own energy.

    A message has ``bits`` for each value, which include 24 bytes for 64 super-groups; codes are rounded up to 128
    bytes. The bytes that ranks exchange to agree come on top. A NaN or Inf makes its super-group NaN.

    Attributes:
        bits: budget for each value, 3 to 8.
        variable: super-groups get different bits. False gives each the largest power of two in ``bits``, without regard
            to the budget.
        nonuniform: the epsilons set the levels. False spaces levels evenly.
        hierarchical: scales of groups are relative to that of their super-group. False gives each 32 values a bf16
            scale, which takes as many bits (DynamiQ, table 6).
        correlated: the rounding of ranks is anticorrelated.
        centred: values are sent relative to the mean of their super-group.
        epsilon4: levels of 4 bits are f(r) = ((1 + 2 e^2)^r - 1) / ((1 + 2 e^2)^7 - 1), in steps of 1e-4; 0.05 to 0.33.
        epsilon8: levels of 8 bits, by the same formula with 127 for 7; 0.02 to 0.07.
        given: (m,) uint8, the bits that ranks agreed on, in wire order.
        agreed: the order and the means that ranks agreed on.
        shared: the seed that all ranks have.
        place: number of this rank's rounding interval, and the number of intervals.
    """

    local: ClassVar[bool] = False  # super-groups compete for bits
    collective: ClassVar[str | None] = "butterfly"

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
        """Always: rounding is stochastic."""
        return True

    @property
    def waits(self) -> bool:
        """Always: for the bits of super-groups, on which ranks agree."""
        return True

    @property
    def block(self) -> int:
        """A super-group."""
        return SUPER_GROUP

    @property
    def arrangement(self) -> Arrangement | None:
        """The order and the means that ranks agreed on."""
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
        """Return the codec of a sum in these ``chunks``; without chunks, return this codec itself."""
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
        """Return (m,) uint8, the bits of each super-group; message i has ``lengths[i]`` super-groups."""
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
        """Return the units of 64 bytes that a message of ``groups`` super-groups has for codes."""
        if not self.variable:
            return groups * self._width // 2
        scales = GROUP + 2 * self.hierarchical
        left = groups * (SUPER_GROUP * self.bits // 8 - scales) - 24 * -(-groups // 64)
        return min(4 * groups, max(groups, 2 * -(-left // (2 * _LINE))))

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        groups = -(-numel // SUPER_GROUP)
        return [
            Plane("widths", 24 * -(-groups // 64), torch.uint8),
            Plane("scales", groups * self.hierarchical, torch.bfloat16),
            Plane("group scales", groups * GROUP, torch.uint8)
            if self.hierarchical
            else Plane("group scales", groups * GROUP // 2, torch.bfloat16),
            Plane("codes", self._lines(groups) * _LINE, torch.uint8),
        ]

    def _spec(self, numel: int, encoded: torch.dtype, dtype: torch.dtype) -> Spec:
        rank, ranks = self.place
        epsilons = [round(value / _UNIT) * self.nonuniform for value in (self.epsilon4, self.epsilon8)]
        lines = self._lines(-(-numel // SUPER_GROUP))
        flags = 0 if self.hierarchical else native.DYNAMIQ_FLAT
        param = (flags, lines, rank | ranks << 16, epsilons[0] | epsilons[1] << 16)
        return native.CodecParams(native.DYNAMIQ, param).spec(numel, dtype)

    def _seeded(self, form: WireFormat, dtype: torch.dtype, how: Encoding) -> Spec:
        if self.place[1] > 1 and self.shared is not None:
            how = how._replace(seed=self.shared)
        return super()._seeded(form, dtype, how)

    def _place_widths(self, x: Tensor, bodies: Tensor, n: int, how: Encoding) -> None:
        """Write the widths of ``bodies`` (k, nbytes): the agreed ones, or those by the energy of ``x``."""
        groups = -(-n // SUPER_GROUP)
        for i, body in enumerate(bodies):
            plane = body[: 24 * -(-groups // 64)]
            if self.given is None:
                part = how.part(i * n, (i + 1) * n, 0)
                _, energies = native.dynamiq_stats(x[i * n : (i + 1) * n], part.residual)
                _pack(self._allocated(energies, [groups]), plane)
            else:
                plane.copy_(self._given_widths(how.offset // SUPER_GROUP + i * groups, groups))

    def _given_widths(self, first: int, groups: int) -> Tensor:
        """Return the plane of widths of these super-groups, made once: every hop of their chunk has the same."""
        key = first, groups
        if key not in self._packed:
            assert self.given is not None
            bits = self.given[first : first + groups]
            plane = torch.empty(24 * -(-groups // 64), dtype=torch.uint8, device=bits.device)
            _pack(bits, plane)
            self._packed[key] = plane
        return self._packed[key]

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        if form.numel and len(bodies):
            self._place_widths(x, bodies, form.numel, how)
            super()._encode_rows(x, bodies, form, how)

    def _recode_rows(self, bodies: Tensor, body: Tensor, form: WireFormat, x: Tensor | None, how: Encoding) -> None:
        if self.given is None:  # the energy of the sum decides the bits, so the sum is made first
            return Codec._recode_rows(self, bodies, body, form, x, how)
        self._place_widths(body, body.unsqueeze(0), form.numel, how)
        super()._recode_rows(bodies, body, form, x, how)


def _pack(bits: Tensor, plane: Tensor) -> None:
    if bits.is_cuda:
        plane.copy_(pack_widths(bits))
    else:
        native.dynamiq_widths(bits, plane)


def _interval(rank: int, ranks: int) -> int:
    """Return the number of the interval in which a rank rounds, before the shift that differs by element.

    Neighbours in a ring have sums of about equal size, so their intervals are far apart. The step from one rank to the
    next is the golden section of ``ranks``, or the nearest number that visits all intervals.
    """
    golden = ranks * (5**0.5 - 1) / 2
    coprime = [step for step in range(1, ranks + 1) if math.gcd(step, ranks) == 1]
    return rank * min(coprime, key=lambda step: abs(step - golden)) % ranks
