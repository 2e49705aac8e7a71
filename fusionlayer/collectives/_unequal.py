"""``two_shot`` with shares: ranks sum parts of different lengths, so that slow links carry less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from torch import Tensor

from ..base.errors import ConfigError
from ..base.seeds import derive_seed
from ..codecs import AgreeingCodec, Codec
from ..transport import Transport
from ..transport.composed import by_rank
from ._base import AllReduce, get
from ._pieces import cut
from .two_shot import summing

TAKES_SHARES = "two_shot"
"""The collective that can have shares."""

_MOST_PIECES = 32
"""In the first exchange of all a rank only sends, in the last it only receives: of n pieces 1 / n is not overlapped."""

_LEAST = 1 << 16
"""Elements of a piece, at least: each piece costs a round trip."""


def by_shares(name: str, shares: Sequence[int]) -> AllReduce:
    """Return the collective ``name`` with these shares; without any, the collective itself.

    Raises:
        ConfigError: there is no such collective, or it cannot have shares.
    """
    if shares and name != TAKES_SHARES:
        raise ConfigError(f"shares={list(shares)} with algorithm {name!r}; only {TAKES_SHARES!r} takes shares")
    return partial(two_shot_by_shares, shares=tuple(shares)) if shares else get(name)


def parts_of(numel: int, shares: Sequence[int], block: int) -> list[slice]:
    """Return each rank's part of ``numel`` elements, in rank order: whole blocks, and a last one that may be shorter.

    Lengths are as ``shares`` to each other, rounded to blocks. A part may be empty.
    """
    blocks, total = -(-numel // block), sum(shares)
    # Integers alone, so that every rank finds the same bounds.
    bounds = [min(blocks * before // total * block, numel) for before in accumulate(shares, initial=0)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def two_shot_by_shares(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    shares: Sequence[int],
    seed: int = 0,
    residual: Tensor | None = None,
) -> None:
    """Sum as ``two_shot`` does, with parts of a length for each rank: rank j sums a part as large as ``shares[j]``.

    With share w of a message of M bytes, a rank sends (1 - w) M to the ranks that sum, and (size - 1) w M of what it
    has
    summed: (1 + (size - 2) w) M together, and it receives as much. So a rank with share 0 sends M, a rank with an equal
    share almost 2 M. But it sends before and receives after the sum. Hence the tensor is sent in pieces, and the sums
    of one piece are sent in the same exchange as the summands of the next one: both directions of each link are busy.

    Blocks stay the same, so codecs that quantise by blocks and round to nearest give the result of ``two_shot``. The
    arguments are those of ``AllReduce``.
    """
    if not x.numel():
        return
    if isinstance(codec, AgreeingCodec):
        codec = codec.agree(x, transport, seed=seed, residual=residual)
    pieces = cut(x.numel(), max(_LEAST, -(-x.numel() // _MOST_PIECES)), codec.block)
    sum_of = _Sum(x, codec, transport, shares, seed, residual)
    before: _Round | None = None
    for part in [*pieces, None]:
        now = None if part is None else sum_of.round(part)
        sum_of.exchange(now, before)
        if before is not None:
            sum_of.decode(before, now)
        if now is not None:
            sum_of.recode(now)
        before = now


@dataclass(frozen=True)
class _Round:
    """A piece: each rank's part of it, and the bytes of that part's message, which are 0 for an empty part."""

    parts: list[slice]
    sizes: list[int]


class _Sum:
    """One sum by shares.

    A row of ``outgoing`` is sent to one rank in an exchange: its summands of a piece, then this rank's sums of the
    previous piece. A row of ``incoming`` comes from one rank, in the same order.
    """

    def __init__(
        self,
        x: Tensor,
        codec: Codec,
        transport: Transport,
        shares: Sequence[int],
        seed: int,
        residual: Tensor | None,
    ) -> None:
        self._x, self._codec, self._transport, self._residual = x, codec, transport, residual
        self._shares, self._seed = shares, seed
        self._sums, self._run = (codec, 1) if residual is not None else summing(codec)
        self._rows: tuple[Tensor, Tensor, Tensor] | None = None

    def round(self, piece: slice) -> _Round:
        """Return a piece, whose summands are encoded into ``outgoing``."""
        x, codec = self._x, self._codec
        inside = parts_of(piece.stop - piece.start, self._shares, codec.block)
        parts = [slice(piece.start + part.start, piece.start + part.stop) for part in inside]
        sizes = [codec.wire(n, x.dtype).capacity if (n := part.stop - part.start) else 0 for part in parts]
        if self._rows is None:  # the first piece is the longest
            size, longest = self._transport.size, max(sizes)
            scratch = partial(self._transport.scratch, device=x.device)
            outgoing, incoming = (scratch(name, 2 * size * longest).view(size, -1) for name in ("outgoing", "incoming"))
            self._rows = outgoing, incoming, scratch("sums", longest)
        outgoing, seed = self._rows[0], derive_seed(self._seed, self._transport.rank, 0)
        for to, (part, nbytes) in enumerate(zip(parts, sizes, strict=True)):
            if nbytes:
                residual = None if self._residual is None else self._residual[part]
                codec.encode(x[part], outgoing[to, :nbytes], seed=seed, offset=part.start, residual=residual)
        return _Round(parts, sizes)

    def exchange(self, now: _Round | None, before: _Round | None) -> None:
        """Send the summands of the piece ``now`` and the sums of the piece ``before``."""
        assert self._rows is not None
        outgoing, incoming, mine = self._rows
        rank, size = self._transport.rank, self._transport.size
        nothing = [0] * size
        summands, sums = now.sizes if now else nothing, before.sizes if before else nothing
        for to in range(size):
            outgoing[to, summands[to] : summands[to] + sums[rank]].copy_(mine[: sums[rank]])
        sends = [outgoing[to, : summands[to] + sums[rank]] for to in range(size)]
        recvs = [incoming[source, : summands[rank] + sums[source]] for source in range(size)]
        self._transport.exchange(by_rank(sends, recvs))

    def decode(self, before: _Round, now: _Round | None) -> None:
        """Decode the sums of a piece that have come, with the summands of the piece ``now`` before them."""
        assert self._rows is not None
        start = now.sizes[self._transport.rank] if now else 0
        for source, (part, nbytes) in enumerate(zip(before.parts, before.sizes, strict=True)):
            if nbytes:
                self._codec.decode(self._rows[1][source, start : start + nbytes], self._x[part])

    def recode(self, now: _Round) -> None:
        """Sum the summands of a piece that have come, and encode the sum."""
        assert self._rows is not None
        _, incoming, mine = self._rows
        rank = self._transport.rank
        part, nbytes = now.parts[rank], now.sizes[rank]
        self._sums.recode(
            incoming[:, :nbytes],
            mine[:nbytes],
            -(-(part.stop - part.start) // self._run) * self._run,
            dtype=self._x.dtype,
            seed=derive_seed(self._seed, rank, 1),
            offset=part.start,
            residual=None if self._residual is None else self._residual[part],
        )
