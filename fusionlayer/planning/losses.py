"""The measured losses of ways of sending; each figure names its result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .. import codecs
from ..base import records
from ..base.errors import ConfigError
from .bucket_costs import short_name


@dataclass(frozen=True)
class LossCost:
    """How a training ended, compared with one that sends f32 gradients in each step.

    Attributes:
        codec: name of a codec or preset, which had its default options.
        percent: by how much the final loss was higher, in percent of that of f32; means over the same seeds. Below 0,
            it was lower.
        source: a file of benchmarks/results, without its ending.
        seeds: number of trainings.
        sync: method of ``fusionlayer.Local`` and its arguments, as "averaging(every=4)"; None: gradients in each step.
        every, fragments, delay: of that ``Local``.
        workers: the workers that took part. Local steps cost more with more workers: averages of more gradients are
            less noisy, and each worker's own progress differs more from them.
    """

    codec: str
    percent: float
    source: str
    seeds: int = 1
    sync: str | None = None
    every: int = 1
    fragments: int = 1
    delay: int = 0
    workers: int = 2

    def __post_init__(self) -> None:
        records.check(self)
        if not (1 <= self.fragments <= self.every and 0 <= self.delay < self.every):
            raise ConfigError(
                f"every={self.every}, fragments={self.fragments}, delay={self.delay}; expected at least one fragment, "
                "at most one a step, and a delay below every"
            )
        if self.workers < 2:
            raise ConfigError(f"workers={self.workers}; expected at least 2, for one alone sends nothing")
        if self.sync is None and self.every > 1:
            raise ConfigError(f"every={self.every} without sync; give it too, such as averaging(every={self.every})")


@dataclass(frozen=True)
class LossCosts:
    """A table of losses. A file of them is a list."""

    costs: tuple[LossCost, ...]

    @classmethod
    def from_yaml(cls, path: str | Path) -> LossCosts:
        """Read a table from a file.

        Raises:
            ConfigError: the file is not a valid table.
        """
        return records.load(cls, path, "losses")

    def at(self, workers: int) -> LossCosts:
        """Return the entries for this many workers: local steps of at least as many, as far as any were measured.

        Of entries that differ only in the number of workers, the nearest one comes last.
        """
        enough = min(workers, max((cost.workers for cost in self.costs if cost.sync), default=workers))
        kept = (cost for cost in self.costs if cost.sync is None or cost.workers >= enough)
        return LossCosts(tuple(sorted(kept, key=lambda cost: -abs(cost.workers - workers))))

    def of(self, codec: str, sync: str | None = None) -> LossCost | None:
        """Return the known losses of a codec with gradients in each step, or with local steps; None: it was not
        measured.

        Of several entries the last counts. ``codec`` is a name that ``short_name`` gives.

        Raises:
            ConfigError: an entry names an unknown codec.
        """
        return next((cost for cost in reversed(self.costs) if (_short(cost.codec), cost.sync) == (codec, sync)), None)

    def local(self, codec: str) -> list[LossCost]:
        """Return the known losses of a codec with local steps."""
        syncs = dict.fromkeys(cost.sync for cost in self.costs if _short(cost.codec) == codec and cost.sync)
        return [cost for cost in (self.of(codec, sync) for sync in syncs) if cost is not None]


@cache
def _short(name: str) -> str:
    return short_name(codecs.get(name).bare)
