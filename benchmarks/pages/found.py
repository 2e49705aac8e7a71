"""What was measured: rows of the committed result files, by theme and by what identifies a row."""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.lab import Network

__all__ = [
    *("CONVERGENCE", "NAMES", "RESULTS", "ROOT", "SCOREBOARD", "TRAINING", "Record"),
    *(
        "end",
        "errors",
        "link_gain",
        "link_share",
        "load",
        "mean",
        "more",
        "result",
        "rows",
    ),
    *("score", "scored", "sharded", "speedup", "the", "zipped"),
]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
TRAINING, CONVERGENCE, SGD = "training-gpt-2x1", "convergence-gpt-2x1-adamw", "convergence-gpt-2x1-sgd"
SCOREBOARD = "scoreboard-gpt-2x1-adamw"
CODECS = (
    *("bf16", "int8", "int4", "mxfp4", "topk", "dgc", "sidco"),
    *("dgc+safusion", "dgc+wfbp", "dgc+behind+single", "auto"),
)
"""Methods of the training benchmark that compress, without overlap."""


class Record(dict[str, Any]):
    """A row whose keys are attributes, too: ``row.speedup.median``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no {name!r}; there are {', '.join(self)}") from None


@functools.cache
def result(theme: str) -> Record:
    """Return the newest result of a theme, such as ``training-gpt-2x1``: its ``title`` and its ``rows``.

    Raises:
        LookupError: there is none.
    """
    paths = sorted(RESULTS.glob(f"{theme}_*.json"), key=lambda path: path.stem.rsplit("_", 1)[1])
    if not paths:
        raise LookupError(f"no result {theme}_<hardware>_<date>.json in {RESULTS}")
    return load(paths[-1])


def load(path: Path) -> Record:
    """Return a result file's content, with the names that methods have today."""
    found: Record = json.loads(path.read_text(), object_hook=Record)
    date = found.get("environment", {}).get("date", "9999")
    for row in found.rows:
        # Torch's hook had this name then, which is a codec's now.
        if date <= "2026-11-22" and row.get("method") == "powersgd":
            row["method"] = "ddp-powersgd"
    return found


def rows(theme: str, **keys: object) -> list[Record]:
    """Return the rows of a theme's newest result that have these values."""
    return [row for row in result(theme).rows if all(row.get(key) == value for key, value in keys.items())]


def the(theme: str, **keys: object) -> Record:
    """Return the only row that has these values.

    Raises:
        LookupError: there is none, or more than one.
    """
    found = rows(theme, **keys)
    if len(found) != 1:
        raise LookupError(f"{theme} has {len(found)} rows with {keys}; expected one")
    return found[0]


def mean(theme: str, column: str, **keys: object) -> float:
    """Return the mean of a column over the rows that have these values."""
    return statistics.fmean(float(row[column]) for row in rows(theme, **keys))


def more(theme: str, column: str, **keys: object) -> float:
    """Return by what part a mean is above another: the key that has a pair of values says of which and above which."""
    ((pair, (one, other)),) = ((key, value) for key, value in keys.items() if isinstance(value, tuple))
    return mean(theme, column, **{**keys, pair: one}) / mean(theme, column, **{**keys, pair: other}) - 1


def errors(theme: str) -> list[float]:
    """Return the errors of projected steps, without their signs, in per cent."""
    return [abs(float(row.error.removesuffix("%"))) for row in rows(theme)]


def end(method: str, theme: str = CONVERGENCE) -> float:
    """Return the final loss of a method, the mean over seeds."""
    return mean(theme, "final", method=method)


def speedup(method: str, rate: str, setting: str = "gpt-2x1") -> float:
    """Return how many times as many steps a method makes as DDP does."""
    median: float = the(f"training-{setting}", method=method, rate=rate).speedup.median
    return median


def zipped(call: str, size: int, rate: str = "100mbit") -> float:
    """Return how many times as fast a zipped collective is as the native one, the median over rounds."""
    seconds = the("zipped", call=call, size=size, rate=rate).seconds
    return statistics.median(native / own for native, own in zip(seconds.native, seconds.zipped, strict=True))


def sharded(rate: str, variant: str) -> float:
    """Return how many times as fast a step over FSDP2 in bf16 is as torch's own, the median over rounds."""
    median: float = the(f"sharded-2x2-bf16-{rate}", variant=variant).speedup.median
    return median


def link_share(operation: str, codec: str = "", size: int = 1 << 26, theme: str = "links", **link: object) -> float:
    """Return the share of the link that an operation of the benchmark of collectives uses, headers included."""
    row = the(theme, operation=operation, codec=codec, size=size, **link)
    rate = Network(2, row.rate).bits_per_second
    assert rate
    return statistics.median(8 * sent / rate / each for sent, each in zip(row.sent, row.seconds, strict=True))


def link_gain(operation: str, codec: str = "", size: int = 1 << 26, theme: str = "links", **link: object) -> float:
    """Return how many times as fast an operation is as gloo's all-reduce of as many elements in f32."""
    seconds = the(theme, operation=operation, codec=codec, size=size, **link).seconds
    gloo = the(theme, operation="gloo all_reduce", size=size, **link).seconds
    return statistics.median(theirs / own for theirs, own in zip(gloo, seconds, strict=False))


def scored(method: str, link: str, theme: str = SCOREBOARD) -> Record:
    """Return a method's row of a scoreboard on a link, such as ``100mbit/1ms``."""
    return the(theme, kind="score", method=method, link=link)


def score(method: str, link: str, share: int = -1, theme: str = SCOREBOARD) -> float:
    """Return the scoreboard's minutes until a loss on a link, such as ``100mbit/1ms``: by default until f32's last.

    Raises:
        LookupError: the method does not get there.
    """
    minutes: float | None = scored(method, link, theme).minutes[share]
    if minutes is None:
        raise LookupError(f"{method} does not reach that loss at {link}")
    return minutes


NAMES: dict[str, Any] = {
    **{"ADAMW": CONVERGENCE, "SGD": SGD, "SCOREBOARD": SCOREBOARD, "CODECS": CODECS},
    **{
        each.__name__: each
        for each in (
            *(
                end,
                errors,
                link_gain,
                link_share,
                mean,
                more,
                rows,
                score,
                scored,
                sharded,
            ),
            *(speedup, the, zipped),
        )
    },
    **{each.__name__: each for each in (float, max, min)},
    "fmean": statistics.fmean,
    "median": statistics.median,
}
"""What expressions of ``figures.yaml`` may use."""
