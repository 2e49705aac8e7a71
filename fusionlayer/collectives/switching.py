"""Native or zipped: which of the two takes less time, found out while training runs (ZipCCL, section 5.2)."""

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
from ..codecs import Codec
from ..errors import ConfigError
from ..transport import Transport
from ..transport._sum import sum_in_rank_order
from ..wire import DTYPE_CODES
from . import zipped as zipping
from ._alpha_beta import AlphaBeta
from ._base import collective

__all__ = ["KINDS", "Costs", "Decision", "Switcher", "switched", "switcher_of"]

KINDS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
SAMPLES = 5
"""Calls of each form that are timed before the first choice, and of which the median counts."""
RECENT = 3
"""Last timed calls of each form that count later, and the first ones where a prediction has chosen."""
GAIN = 0.02
"""Share of the time that the other form must save to be switched to: less is noise, and would flap."""
LOOKING = 0.01
"""Share of the time that looking at the other form may take, so long as it is the slower one."""
LOOK_AFTER = (32, 1024)
"""Fewest and most calls from one look to the next."""
TRUSTED = 8
"""Calls that a choice lasts that was predicted, not measured."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Costs:
    """What a collective takes in both forms, by d bytes that a rank sends in its native form.

    Native: T(d) = alpha + beta d (equation 6). Zipped: T(d) = alpha + beta e s d + codec s d (equation 7, and what
    encoding and decoding take); s is the precision factor, below 1 where the native form sends wider elements.

    Attributes:
        native: seconds by bytes that travel.
        zipped: seconds by bytes that travel.
        factor: e, what is left of a byte.
        codec: seconds of encoding and decoding for each byte before that.
    """

    native: AlphaBeta
    zipped: AlphaBeta
    factor: float
    codec: float = 0.0

    def seconds(self, nbytes: float, precision: float = 1.0) -> tuple[float, float]:
        """Return seconds of the native and of the zipped form."""
        elements = precision * nbytes
        return self.native(nbytes), self.zipped(self.factor * elements) + self.codec * elements

    def zips_from(self, precision: float = 1.0) -> float:
        """Return from how many bytes on the zipped form takes less time; infinite where it never does."""
        gained = self.native.beta - precision * (self.factor * self.zipped.beta + self.codec)
        paid = self.zipped.alpha - self.native.alpha
        return math.inf if gained <= 0 else max(0.0, paid / gained)


@dataclass(frozen=True)
class Decision:
    """What was chosen for calls of about one size; the same on all ranks.

    Attributes:
        kind: the collective, of ``KINDS``.
        nbytes: that a rank sends in its native form.
        calls: made so far.
        native: seconds, None if they were not measured.
        zipped: seconds, None if they were not measured.
        factor: what is left of a byte, None if that was not measured.
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
    """What is known of the calls of one collective whose sizes lie between two powers of two."""

    def __init__(self) -> None:
        self.nbytes = self.calls = 0
        self.zips = False
        self.decided = False
        self.look = 1  # number of the call from which on forms are timed
        self.pending: list[bool] = []  # forms to time now; True is zipped
        self.samples: dict[bool, deque[float]] = {form: deque(maxlen=SAMPLES) for form in (False, True)}
        self.factor: float | None = None
        self.agreed: tuple[float, float, float] | None = None  # seconds of both forms, factor


class Switcher:
    """Collectives that lose no bit, each in the form that takes less time: as it is, or zipped.

    Calls of about one size are alike: of each collective, sizes between two powers of two share a choice. At first both
    forms are timed, a few calls each, unless ``expected`` costs or lines through what other sizes have taken tell which
    is faster. Ranks take the largest of their medians, so all choose alike. From then on the chosen form runs and
    nothing else: native means that no codec is called. Once in a while, less often the more the other form would cost,
    one call of each is timed again, so the choice follows network and data; it changes only for a form that saves 2 %.

    All ranks hold one each and make the same calls, in the same order, with the same sizes.

    Args:
        transport: the ranks; only the calling thread uses it.
        codec: lossless and of variable size; None is ``zip``.
        expected: costs of collectives, by name, until measurements are better; the same on all ranks.

    Raises:
        ConfigError: another codec.
    """

    def __init__(
        self, transport: Transport, codec: Codec | None = None, *, expected: Mapping[str, Costs] | None = None
    ) -> None:
        self.codec = codec or codecs.get("zip").bare
        if not self.codec.zips:
            raise ConfigError(f"a switcher got {self.codec}; expected a lossless codec of variable size, such as zip")
        self._transport = transport
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
            empty = x[:0].view(torch.uint8)
            sends, recvs = [x.view(torch.uint8)] * transport.size, [part.view(torch.uint8) for part in parts]
            sends[transport.rank] = recvs[transport.rank] = empty
            transport.exchange(sends, recvs)

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

        ``largest`` is the greatest number of elements that a rank sends to others, the same on all ranks; where it is
        None they exchange that first.
        """
        transport, size = self._transport, x.element_size()
        mine = sum(sends) - sends[transport.rank]
        if largest is None:
            numel = torch.tensor([mine])
            transport.all_reduce_max(numel)
            largest = int(numel)

        def native() -> None:
            transport.exchange(
                [part.view(torch.uint8) for part in x.split(list(sends))],
                [part.view(torch.uint8) for part in out.split(list(recvs))],
            )

        self.run(
            "all_to_all",
            largest * size,
            native,
            lambda: zipping.all_to_all(x, out, sends, recvs, self.codec, transport, design=design),
            like=x,
            sent=mine * size,
        )

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        """Fill ``out`` with the sum over ranks of this rank's part of ``x``: see ``zipped.reduce_scatter``."""
        transport = self._transport

        def native() -> None:
            every = torch.empty_like(x).view(transport.size, -1)
            transport.all_to_all(x.view(transport.size, -1).view(torch.uint8), every.view(torch.uint8))
            sum_in_rank_order(every.unbind(0), out)

        self.run(
            "reduce_scatter",
            (transport.size - 1) * out.nbytes,
            native if out.numel() else lambda: None,
            lambda: zipping.reduce_scatter(x, out, self.codec, transport),
            like=x,
        )

    def all_reduce(self, x: Tensor, *, residual: Tensor | None = None) -> None:
        """Replace ``x`` (n,) by its sum over ranks; both forms have the same bits on all ranks.

        The native form, the transport's own, may add in another order than ``zipped`` does.
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
        """Call ``native`` or ``zipped``; return whether it was the latter.

        Args:
            kind: by what name costs are known.
            nbytes: that a rank sends in the native form; the same on all ranks.
            native: makes the call as it is.
            zipped: makes it over this switcher's transport, by zipped collectives.
            like: a tensor of the kind that travels; of other types than f32, bf16 and f16 only the native form is.
            sent: bytes that this rank sends in the native form, where that is less than ``nbytes``.
            precision: bytes of an element that is zipped by bytes of one that travels natively.
        """
        if self._transport.size == 1 or not nbytes or like.dtype not in DTYPE_CODES:
            native()
            return False
        cell = self._cells.setdefault((kind, nbytes.bit_length()), _Cell())
        cell.calls += 1
        cell.nbytes = nbytes
        if not cell.pending and cell.calls >= cell.look:
            self._begin_to_look(kind, cell, precision)
        if not cell.pending:
            (zipped if cell.zips else native)()
            return cell.zips
        form = cell.pending.pop(0)
        self._time(cell, form, zipped if form else native, like.device, (nbytes if sent is None else sent) * precision)
        if not cell.pending:
            self._agree(kind, cell)
        return form

    # ---- choices ----------------------------------------------------------------------------------------------------

    @property
    def decisions(self) -> list[Decision]:
        """What has been chosen so far, by collective and size."""
        found = []
        for (kind, _), cell in sorted(self._cells.items()):
            native, zipped, factor = cell.agreed or (None, None, None)
            found.append(Decision(kind, cell.nbytes, cell.calls, native, zipped, factor, cell.zips))
        return found

    def costs(self, kind: str) -> Costs | None:
        """Return equations 6 and 7 for a collective: lines through what its sizes took, else what was expected.

        None where fewer than two sizes were measured and nothing was expected.
        """
        known = [(cell.nbytes, *cell.agreed) for (name, _), cell in self._cells.items() if name == kind and cell.agreed]
        if len({nbytes for nbytes, *_ in known}) < 2:
            return self._expected.get(kind)
        native = AlphaBeta.through([(nbytes, seconds) for nbytes, seconds, _, _ in known])
        zipped = AlphaBeta.through([(factor * nbytes, seconds) for nbytes, _, seconds, factor in known])
        return Costs(native, zipped, known[-1][-1])

    def __str__(self) -> str:
        """Return a line for each choice, and the lines that sizes not seen yet are predicted by."""
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

    def _time(self, cell: _Cell, form: bool, call: Callable[[], object], device: torch.device, elements: float) -> None:
        # From a common start, or the time would be that of the rank that came last.
        self._transport.barrier()
        _wait_for(device)
        before, start = self._transport.bytes_sent, time.perf_counter()
        call()
        _wait_for(device)
        cell.samples[form].append(time.perf_counter() - start)
        if form and elements:
            cell.factor = (self._transport.bytes_sent - before) / elements

    def _agree(self, kind: str, cell: _Cell) -> None:
        counting = RECENT if cell.decided else SAMPLES
        mine = [statistics.median(list(cell.samples[form])[-counting:]) for form in (False, True)]
        known = torch.tensor([*mine, cell.factor or 0.0, self._sync], dtype=torch.float64)
        start = time.perf_counter()
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


def describe(costs: Costs, precision: float = 1.0) -> str:
    """Return equations 6 and 7 in figures, and from which size on the zipped form is the faster."""
    threshold = costs.zips_from(precision)
    where = "never zipped" if threshold == math.inf else f"zipped from {threshold / 1e3:.1f} kB on"
    return (
        f"native {_line(costs.native)}; zipped {_line(costs.zipped)} of {costs.factor:.3f} of the bytes"
        f"{f', codec {1e9 * costs.codec:.3f} ns per byte' if costs.codec else ''}: {where}"
    )


def _line(line: AlphaBeta) -> str:
    return f"{1e3 * line.alpha:.3f} ms + {1e9 * line.beta:.3f} ns per byte"


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def switcher_of(transport: Transport, codec: Codec | None = None) -> Switcher:
    """Return the switcher of a transport for a codec (None: ``zip``), made at the first call and kept with it."""
    kept: dict[Codec, Switcher] = transport.__dict__.setdefault("_switchers", {})
    chosen = codec or codecs.get("zip").bare
    if chosen not in kept:
        kept[chosen] = Switcher(transport, chosen)
    return kept[chosen]


@collective("switched")
def switched(x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None) -> None:
    """Sum as ``zipped`` does, or as ``dense``, whichever takes less time for tensors of this size.

    All ranks get the same bits, but those of the two differ as their orders of summing do: results may differ in the
    last bit from one run to the next.
    """
    if not codec.zips:
        raise ConfigError(
            f"algorithm 'switched' chooses between dense and zipped sums and cannot use {codec}; choose another "
            "algorithm, or codec 'zip'"
        )
    switcher_of(transport, codec).all_reduce(x, residual=residual)
