"""Tables of README and docs, each made from result files.

A page holds a table between two comments, ``<!-- table: headline -->`` and ``<!-- end of table -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from benchmarks.pages.found import CONVERGENCE, SCOREBOARD, TRAINING, Record, end, rows, the
from benchmarks.scoreboard.links import Link

__all__ = ["HEADLINE", "TABLES", "fill"]

Lines = Iterator[Sequence[str]]

HEADLINE = {
    "ddp": "DDP, f32",
    "ddp-bf16": "DDP, torch's bf16 hook",
    "int8": "fusionlayer, int8",
    "int4": "fusionlayer, int4",
    "ddp-powersgd": "DDP, torch's PowerSGD hook",
}
"""The methods that README compares, the slowest first, and what it calls them."""


def _interval(ratio: Record) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}..{ratio.high:.2f}]"


def _loss(method: str) -> str:
    return f"{end(method):.3f}" if rows(CONVERGENCE, method=method) else "not measured"


def headline() -> Lines:
    """Steps, bytes and loss of five methods."""
    yield "gradients by", "steps/s", "over DDP", "at 1 Gbit/s", "MB a step", "final loss"
    for method, name in HEADLINE.items():
        slow, fast = (the(TRAINING, rate=rate, method=method) for rate in ("100mbit", "1gbit"))
        yield (
            name,
            f"{1 / slow.step_seconds:.2f}",
            f"{slow.speedup.median:#.3g}x",
            f"{fast.speedup.median:#.3g}x",
            f"{slow.bytes_per_step / 1e6:.3g}",
            _loss(method),
        )


ALL_METHODS = (
    *("ddp-bf16", "ddp-powersgd", "horovod", "bf16", "int8", "int8+overlap", "int4", "int4+overlap"),
    *("topk", "dgc", "dgc+wfbp", "dgc+behind+single", "auto", "auto+fidelity=aggressive"),
)
_NOTES = {"ddp-powersgd": "ddp-powersgd, rank 4", "topk": "topk, density 0.01"}


def training() -> Lines:
    """Speed-ups of methods over DDP, next to what computing and sending would allow."""
    yield "method", "over DDP at 100 Mbit/s", "bound", "over DDP at 1 Gbit/s", "bound"
    for method in ALL_METHODS:
        cells = []
        for rate in ("100mbit", "1gbit"):
            row = the(TRAINING, rate=rate, method=method)
            ddp = the(TRAINING, rate=rate, method="ddp")
            cells += [_interval(row.speedup), f"{ddp.step_seconds / row.bound_seconds:.1f}"]
        yield _NOTES.get(method, method), *cells


SCORED = {
    "ddp": "`DistributedDataParallel(model)`",
    "ddp-powersgd": "the same, torch's PowerSGD hook",
    "accelerate-local": "accelerate's `LocalSGD`",
    "torchft-diloco": "torchft's `DiLoCo`",
    "int8": '`codec="int8"`',
    "int4": '`codec="int4"`',
    "int4+overlap": '`codec="int4", overlap_forward=model`',
    "onebit+freeze_step=75+warmup_codec=int4": '`fl.OneBitAdam(...)`, `codec="onebit"`',
    "int4+local=overlapped:every=4": '`codec="int4", sync=fl.Local.overlapped(4)`',
    "int4+local=overlapped:every=8": '`codec="int4", sync=fl.Local.overlapped(8)`',
    "int4+local=streaming": '`codec="int4", sync=fl.Local.streaming()`',
}
"""The methods that a page compares by minutes, and the arguments of ``fl.DistributedOptimizer`` for ours."""


def scoreboard() -> Lines:
    """Minutes until f32's loss at half of its steps by link, until its final one on one link, and what losses mean."""
    found = rows(SCOREBOARD, kind="score")
    links = [Link(*link.split("/")) for link in dict.fromkeys(row.link for row in found if row.link)]
    last = next(link for link in links if link.rate == "100mbit")
    _, half, final = found[0].levels
    words = {link: link.words.removesuffix(", 1 ms") for link in links}
    yield (
        f"minutes until loss {half:.3f}",
        *words.values(),
        f"until {final:.3f} at {words[last]}",
        "final loss",
        "seeds",
    )
    for method, name in SCORED.items():
        mine = {row.link: row for row in found if row.method == method and row.link}
        if any(row.seeds for row in mine.values()):
            first = next(iter(mine.values()))
            cells = [_arrival(mine.get(str(link)), 1) for link in links]
            yield name, *cells, _arrival(mine.get(str(last)), 2), f"{first.final:.3f}", str(first.seeds)
    alone = {link: next(row for row in found if row.link == str(link)).compute_seconds / 60 for link in links}
    steps = rows(SCOREBOARD, kind="losses", method="ddp")[0].losses[-1][0]
    cells = [f"{alone[link] * steps / 2:.3g}" for link in links]
    yield "computing alone, half and all of f32's steps", *cells, f"{alone[last] * steps:.3g}", "", ""


def _arrival(row: Record | None, level: int) -> str:
    if row is None:
        return "not measured"
    minutes = row.minutes[level]
    about = "~" if row.within_spread and level == len(row.minutes) - 1 else ""
    return "never" if minutes is None else f"{about}{minutes:.3g}"


def losses() -> Lines:
    """Final losses, beside DDP of the same seeds."""
    yield "method", "seeds", "final validation loss", "difference from DDP, by seed"
    ddp = {row.seed: row.final for row in rows(CONVERGENCE, method="ddp")}
    for method in dict.fromkeys(row.method for row in rows(CONVERGENCE)):
        mine = rows(CONVERGENCE, method=method)
        beside = [row.final - ddp[row.seed] for row in mine]
        spread = f"{min(beside):+.3f} to {max(beside):+.3f}" if len(mine) > 1 else f"{beside[0]:+.3f}"
        name = _NOTES.get(method, method).removesuffix(", density 0.01")
        yield name, str(len(mine)), _loss(method), "" if method == "ddp" else spread


def horovod() -> Lines:
    """The same calls by ``fusionlayer.torch`` and by Horovod."""
    yield "calls", "times as fast as Horovod", "95 %", "Horovod's processor time over ours"
    for row in rows("horovod"):
        processor = float(row["horovod, CPU ms"]) / float(row["fusionlayer, CPU ms"])
        fast = f"{float(row['times as fast as Horovod']):#.3g}"
        yield row.case, fast, row["95 %"].replace(" to ", ".."), f"{processor:.2g}"


TABLES: dict[str, Callable[[], Lines]] = {
    function.__name__: function for function in (headline, scoreboard, training, losses, horovod)
}


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns line up in a terminal, too: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def row(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return f"| {' | '.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])} |\n"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "".join([row(lines[0]), f"|{rule}|\n", *map(row, lines[1:])])


_PLACE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def fill(page: str) -> str:
    """Return the page's text with every table as the result files have it.

    Raises:
        LookupError: the page names a table that does not exist, or a table needs a row that no result has.
    """

    def write(place: re.Match[str]) -> str:
        if place[2] not in TABLES:
            raise LookupError(f"no table {place[2]!r}; there are {', '.join(TABLES)}")
        return f"{place[1]}\n{_markdown([*TABLES[place[2]]()])}\n{place[4]}"  # some readers need the blank lines

    return _PLACE.sub(write, page)
