"""``switched``: sums native or zipped, whichever takes less time as measured during training (ZipCCL, section 5.2)."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import codecs
from ..base.errors import ConfigError
from ..codecs import Codec
from ..native.wire import DTYPE_CODES
from ..process.clock import Clock, Stamp, clock_of
from ..transport import Transport
from ..transport._sum import sum_in_rank_order
from ..transport.composed import by_rank
from . import zipped as zipping
from ._alpha_beta import AlphaBeta, Costs, describe
from ._base import check_pair, collective

__all__ = ["KINDS", "Costs", "Decision", "Switcher", "switched", "switcher_of"]

KINDS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
SAMPLES = 5
"""Calls of each form that are timed before the first choice; their median counts."""
RECENT = 3
"""Timed calls of each form after a prediction, and the last calls of each form whose median counts later."""
GAIN = 0.02
"""Share of the time that the other form must save before a switch: less is noise, and choices would flap."""
LOOKING = 0.01
"""Share of the time that timing the slower form may cost."""
LOOK_AFTER = (32, 1024)
"""Fewest and most calls between two timings."""
TRUSTED = 8
"""Calls after which a predicted choice is measured."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """The choice for calls of about one size; the same on all ranks.

    Attributes:
        kind: the collective, one of ``KINDS``.
        nbytes: bytes that a rank sends in the native form.
        calls: number of calls so far.
        native: seconds of the native form; None if they were not measured.
        zipped: seconds of the zipped form; None if they were not measured.
        factor: share of bytes that is left after encoding; None if it was not measured.
        zips: whether the zipped form is used.
    """

    kind: str
    nbytes: int
    calls: int
    native: float | None
    zipped: float | None
    factor: float | None
    zips: bool


class _Cell:
    """The measurements and the choice for calls of one collective with sizes between two powers of two."""

    def __init__(self) -> None:
        self.nbytes = self.calls = 0
        self.precision = 1.0
        self.zips = False
        self.decided = False
        self.look = 1  # forms are timed from this call on
        self.pending: list[bool] = []  # forms still to be timed, one in each call; True is zipped
        self.timed: list[tuple[bool, Stamp, Stamp]] = []  # forms with beginning and end, whose seconds are not read yet
        self.samples: dict[bool, deque[float]] = {form: deque(maxlen=SAMPLES) for form in (False, True)}
        self.factor: float | None = None
        self.agreed: tuple[float, float, float] | None = None  # seconds of both forms, factor


class Switcher:
    """Lossless collectives, each in the form that takes less time: native or zipped.

    For each collective, calls with sizes between two powers of two share a choice. At first a few calls of both forms
    are timed. This is left out if ``expected`` costs, or lines through the times of other sizes, predict which form is
    faster. Ranks exchange their medians and take the largest, so all make the same choice. From then on only the chosen
    form runs; the native form calls no codec. At intervals that grow with the cost of the other form, one call of each
    form is timed again, so the choice follows network and data. It changes only for a form that saves 2 %.

    Each rank has one, and all ranks make the same calls, in the same order, with the same sizes.

    Args:
        transport: the ranks; only the calling thread uses it.
        codec: lossless and of variable size; None is ``zip``.
        expected: costs of collectives, by name, used until there are measurements; the same on all ranks.
        clock: times the calls; None: the clock of the tensors' device. Results of the device's clock are read in the
            next call of the same size, so that the host need not wait.

    Raises:
        ConfigError: the codec is not lossless and of variable size.
    """

    def __init__(
        self,
        transport: Transport,
        codec: Codec | None = None,
        *,
        expected: Mapping[str, Costs] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.codec = codec or codecs.get("zip").bare
        if not self.codec.zips:
            raise ConfigError(f"a switcher got {self.codec}; expected a lossless codec of variable size, such as zip")
        self._transport = transport
        self._clock = clock
        self._expected = dict(expected or {})
        self._cells: dict[tuple[str, int], _Cell] = {}
        self._sync = 0.0

    # ---- collectives ------------------------------------------------------------------------------------------------

    def all_gather(self, x: Tensor, out: Tensor, *, lengths: Sequence[int] | None = None) -> None:
        """Fill ``out`` with all ranks' ``x``: see ``zipped.all_gather``."""
        transport = self._transport
        counts = [x.numel()] * transport.size if lengths is None else list(lengths)

        def native() -> None:
            parts = list(out.split(counts))
            mine = parts[transport.rank]
            if mine.data_ptr() != x.data_ptr():
                mine.copy_(x)
            messages = {rank: (x.view(torch.uint8), part.view(torch.uint8)) for rank, part in enumerate(parts)}
            del messages[transport.rank]
            transport.exchange(messages)

        others, size = transport.size - 1, x.element_size()
        self.run(
            "all_gather",
            others * max(counts) * size,
            native,
            lambda: zipping.all_gather(x, out, self.codec, transport, lengths=counts),
            like=x,
            sent=others * x.numel() * size,
        )

    def all_to_all(
        self,
        x: Tensor,
        out: Tensor,
        sends: Sequence[int],
        recvs: Sequence[int],
        *,
        largest: int | None = None,
        design: int = 2,
    ) -> None:
        """Send parts of ``x`` to the ranks and fill ``out`` with theirs: see ``zipped.all_to_all``.

        ``largest`` is the greatest number of elements that any rank sends to others, the same on all ranks. If it is
        None, the ranks exchange it first.
        """
        transport, size = self._transport, x.element_size()
        mine = sum(sends) - sends[transport.rank]
        if largest is None:
            numel = torch.tensor([mine], device="cpu")
            transport.all_reduce_max(numel)
            largest = int(numel)

        def native() -> None:
            parts = (
                part.view(torch.uint8).split([n * size for n in ends]) for part, ends in ((x, sends), (out, recvs))
            )
            transport.exchange(by_rank(*parts))

        self.run(
            "all_to_all",
            largest * size,
            native,
            lambda: zipping.all_to_all(x, out, sends, recvs, self.codec, transport, design=design),
            like=x,
            sent=mine * size,
        )

    def reduce_scatter(
        self,
        x: Tensor,
        out: Tensor,
        *,
        native: Callable[[], object] | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        """Fill ``out`` with the sum over ranks of this rank's part of ``x``: see ``zipped.reduce_scatter``.

        Args:
            x, out: as there.
            native: fills ``out`` by a library's own reduce-scatter, which zipping has to beat then (equation 6). It may
                add in another order, so the last bits depend on measurements. None: rows are sent uncompressed and
                summed in rank order, to the bits of the zipped form.
            wire: type to which values are rounded before they are sent zipped, such as bf16 for a sum in f32. Its bytes
                over the bytes of ``x`` are s of equation 7. None: values are not rounded, s is 1.
        """
        transport = self._transport

        def in_rank_order() -> None:
            every = torch.empty_like(x).view(transport.size, -1)
            transport.all_to_all(x.view(transport.size, -1).view(torch.uint8), every.view(torch.uint8))
            sum_in_rank_order(every.unbind(0), out)

        self.run(
            "reduce_scatter",
            (transport.size - 1) * x.nbytes // transport.size,
            (native or in_rank_order) if out.numel() else lambda: None,
            lambda: zipping.reduce_scatter(x if wire is None else x.to(wire), out, self.codec, transport),
            like=x,
            precision=1.0 if wire is None else wire.itemsize / x.element_size(),
        )

    def all_reduce(self, x: Tensor, *, residual: Tensor | None = None) -> None:
        """Replace ``x`` (n,) by its sum over ranks; either form gives the same bits on all ranks.

        The native form is the transport's own all-reduce, which may add in another order than ``zipped``.
        """
        transport = self._transport
        self.run(
            "all_reduce",
            2 * (transport.size - 1) * x.nbytes // transport.size,
            lambda: transport.all_reduce(x),
            lambda: zipping.zipped(x, self.codec, transport, residual=residual),
            like=x,
        )

    def run(
        self,
        kind: str,
        nbytes: int,
        native: Callable[[], object],
        zipped: Callable[[], object],
        *,
        like: Tensor,
        sent: int | None = None,
        precision: float = 1.0,
    ) -> bool:
        """Call ``native`` or ``zipped``; return True if it called ``zipped``.

        Args:
            kind: name of the call, the key of its costs.
            nbytes: bytes that a rank sends in the native form; the same on all ranks.
            native: makes the call in the native form.
            zipped: makes the call over this switcher's transport, by zipped collectives.
            like: a tensor of the kind that is sent; types other than f32, bf16 and f16 have only the native form.
            sent: bytes that this rank sends in the native form, if that is less than ``nbytes``.
            precision: bytes of an element in the zipped form divided by those in the native form.
        """
        if self._transport.size == 1 or not nbytes or like.dtype not in DTYPE_CODES:
            native()
            return False
        cell = self._cells.setdefault((kind, nbytes.bit_length()), _Cell())
        cell.calls += 1
        cell.nbytes, cell.precision = nbytes, precision
        clock = self._clock or clock_of(like.device)
        if cell.timed and not cell.pending:
            self._agree(kind, cell, clock)
        if not cell.pending and cell.calls >= cell.look:
            self._begin_to_look(kind, cell, precision)
        if not cell.pending:
            (zipped if cell.zips else native)()
            return cell.zips
        form = cell.pending.pop(0)
        self._time(cell, form, zipped if form else native, clock, (nbytes if sent is None else sent) * precision)
        if not cell.pending and not clock.lags:
            self._agree(kind, cell, clock)
        return form

    # ---- choices ----------------------------------------------------------------------------------------------------

    @property
    def decisions(self) -> list[Decision]:
        """The choices so far, by collective and size."""
        found = []
        for (kind, _), cell in sorted(self._cells.items()):
            native, zipped, factor = cell.agreed or (None, None, None)
            found.append(Decision(kind, cell.nbytes, cell.calls, native, zipped, factor, cell.zips))
        return found

    def costs(self, kind: str) -> Costs | None:
        """Return the costs of a collective: lines through its measured sizes, or else the expected costs.

        None if fewer than two sizes were measured and no costs were expected.
        """
        known = [(cell, *cell.agreed) for (name, _), cell in self._cells.items() if name == kind and cell.agreed]
        if len({cell.nbytes for cell, *_ in known}) < 2:
            return self._expected.get(kind)
        native = AlphaBeta.through([(cell.nbytes, seconds) for cell, seconds, _, _ in known])
        zipped = AlphaBeta.through([(e * cell.precision * cell.nbytes, seconds) for cell, _, seconds, e in known])
        return Costs(native, zipped, known[-1][-1])

    def __str__(self) -> str:
        """Return text with each choice, and for each collective the costs that predict new sizes."""
        lines = []
        for choice in self.decisions:
            seen = "predicted"
            if choice.native is not None and choice.zipped is not None:
                seen = f"native {1e3 * choice.native:.3f} ms, zipped {1e3 * choice.zipped:.3f} ms"
                seen += f", {choice.factor:.3f} of the bytes"
            form = "zipped" if choice.zips else "native"
            lines.append(f"{choice.kind} of {choice.nbytes} bytes: {form} ({seen}; {choice.calls} calls)")
        for kind in KINDS:
            if costs := self.costs(kind):
                lines.append(f"{kind}: {describe(costs)}")
        return "\n".join(lines) or "no call yet"

    def _begin_to_look(self, kind: str, cell: _Cell, precision: float) -> None:
        costs = None if cell.decided else self.costs(kind)
        if costs is not None:
            native, zipped = costs.seconds(cell.nbytes, precision)
            cell.zips, cell.decided = zipped < native, True
            cell.look = cell.calls + TRUSTED
            return
        first = cell.zips
        cell.pending = [first, not first] * (1 if cell.agreed else RECENT if cell.decided else SAMPLES)

    def _time(self, cell: _Cell, form: bool, call: Callable[[], object], clock: Clock, elements: float) -> None:
        # All ranks start together. Otherwise the time would contain the wait for the last rank. Devices meet in a sum.
        if clock.lags:
            self._transport.all_reduce(torch.zeros(1, device=clock.device))
        else:
            self._transport.barrier()
        before, start = self._transport.bytes_sent, clock.stamp()
        call()
        cell.timed.append((form, start, clock.stamp()))
        if form and elements:
            cell.factor = (self._transport.bytes_sent - before) / elements

    def _agree(self, kind: str, cell: _Cell, clock: Clock) -> None:
        for form, begun, ended in cell.timed:
            passed = clock.seconds(begun, ended)
            cell.samples[form].append(clock.waited(begun, ended) if passed is None else passed)
        cell.timed.clear()
        counting = RECENT if cell.decided else SAMPLES
        mine = [statistics.median(list(cell.samples[form])[-counting:]) for form in (False, True)]
        known = torch.tensor([*mine, cell.factor or 0.0, self._sync], dtype=torch.float64, device="cpu")
        start = time.perf_counter()
        # The largest values, the same on all ranks: ranks that chose differently would wait for each other for ever.
        self._transport.all_reduce_max(known)
        self._sync = time.perf_counter() - start
        native, zipped, factor, sync = known.tolist()
        cell.agreed = native, zipped, factor
        seconds = {False: native, True: zipped}
        before, first = cell.zips, not cell.decided
        if first:
            cell.zips = zipped < native
        elif seconds[not cell.zips] < (1 - GAIN) * seconds[cell.zips]:
            cell.zips = not cell.zips
        cell.decided = True
        extra = max(0.0, seconds[not cell.zips] - seconds[cell.zips]) + 3 * sync
        fewest, most = LOOK_AFTER
        cell.look = cell.calls + 1 + min(max(fewest, math.ceil(extra / seconds[cell.zips] / LOOKING)), most)
        if self._transport.rank == 0 and (first or cell.zips != before):
            choice = "zipped" if cell.zips else "native"
            words = "%s of %d bytes: %s (native %.3f ms, zipped %.3f ms, %.3f of the bytes)"
            _logger.info(words, kind, cell.nbytes, choice, 1e3 * native, 1e3 * zipped, factor)


def switcher_of(transport: Transport, codec: Codec | None = None) -> Switcher:
    """Return the transport's switcher for a codec (None: ``zip``); the first call makes it."""
    kept: dict[Codec, Switcher] = transport.__dict__.setdefault("_switchers", {})
    chosen = codec or codecs.get("zip").bare
    if chosen not in kept:
        kept[chosen] = Switcher(transport, chosen)
    return kept[chosen]


@collective(
    "switched", takes=lambda codec, size: codec.zips, because="chooses between dense sums and those of zipped messages"
)
def switched(x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None) -> None:
    """Sum by ``zipped`` or by ``dense``, whichever takes less time for tensors of this size.

    All ranks get the same bits. But the two may sum in different orders, so results may differ in the last bit from one
    run to the next.
    """
    check_pair("switched", codec, transport.size)
    switcher_of(transport, codec).all_reduce(x, residual=residual)
