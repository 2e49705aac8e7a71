"""The table of measured losses by which ``fusionlayer plan --fidelity local`` chooses.

It has what result files named scoreboard or convergence say of trainings with AdamW: each codec with its default
options, with local steps or without.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.pages.found import RESULTS, ROOT, load
from benchmarks.variants import LOCAL, SEPARATOR, Variant
from fusionlayer import codecs
from fusionlayer.planning.bucket_costs import short_name
from fusionlayer.planning.codec_rules import AUTO
from fusionlayer.planning.losses import LossCost

__all__ = ["PAGE", "cost", "costs", "page"]

PAGE = ROOT / "fusionlayer/planning/measured_losses.py"
TRAININGS = (
    "GPT of width 384, 6 layers and context 128; 2 workers with batches of 2; 600 steps of AdamW",
    "GPT of width 384, 6 layers and context 128; 4 workers with batches of 2; 600 steps of AdamW",
    "GPT of width 128, 4 layers and context 64; 2 workers with batches of 2; 600 steps of AdamW",
)
"""Beginnings of the trainings' titles; what an earlier one of as many workers has is not taken from a later one."""


def costs() -> list[LossCost]:
    """Return what result files say, ordered by codec and period."""
    finals: dict[int, dict[str, dict[int, tuple[float, str]]]] = defaultdict(lambda: defaultdict(dict))
    # Of files of one day those come last that are last by name.
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: (path.stem.rsplit("_", 1)[1], path.stem)):
        for training, method, seed, final in _finals(path):
            finals[training][method][seed] = final, path.stem
    found: dict[tuple[str, str | None, int], LossCost] = {}
    for place, methods in sorted(finals.items()):
        workers = int(re.findall(r"(\d+) workers", TRAININGS[place])[0])
        for method, seeds in sorted(methods.items()):
            told = cost(method, seeds, methods["ddp"])
            if told is not None:
                found.setdefault((told.codec, told.sync, workers), replace(told, workers=workers))
    return sorted(found.values(), key=lambda each: (each.codec, each.every, each.sync or "", each.workers))


def _finals(path: Path) -> Iterator[tuple[int, str, int, float]]:
    """Yield (place of the training, method, seed, final loss) of the losses in a result file."""
    data = load(path)
    for row in data.rows if isinstance(data.get("rows"), list) else []:
        if "losses" not in row or "final" not in row or "link" in row:
            continue
        title = row.get("training", data.title).removeprefix("Convergence: ")
        for place, training in enumerate(TRAININGS):
            if title.startswith(training):
                yield place, row["method"], row["seed"], row["final"]


def cost(method: str, seeds: dict[int, tuple[float, str]], baseline: dict[int, tuple[float, str]]) -> LossCost | None:
    """Return what a method costs; None if it has options that the table does not tell, or no seed of f32's."""
    both = sorted(seeds.keys() & baseline.keys())
    try:
        variant = Variant.parse(method)
    except ValueError:
        return None
    words = method.split(SEPARATOR)
    syncs = [word for word in words if word.startswith(LOCAL)]
    adapts = variant.sync is not None and variant.sync.adapts
    if not both or variant.codec == AUTO or adapts or len(words) > max(1, len(syncs) + (words[0] not in syncs)):
        return None
    final, f32 = (statistics.fmean(of[seed][0] for seed in both) for of in (seeds, baseline))
    percent = round(100 * (final / f32 - 1), 2)
    source = seeds[both[-1]][1]
    name = short_name(variant.make_codec().bare) if words[0] in syncs else words[0]
    if name not in codecs.names():  # options that no preset has
        return None
    if not syncs:
        return LossCost(name, percent, source, len(both))
    preset, *options = syncs[0].removeprefix(LOCAL).split(":")
    sync = f"{preset}({', '.join(options)})"
    local = variant.sync
    return LossCost(name, percent, source, len(both), sync, local.first_every, local.fragments, local.delay)


def page() -> str:
    """Return the module with the table."""
    lines = [
        '"""Losses that were measured. ``python -m benchmarks.pages`` makes this file from result files."""',
        "",
        "from __future__ import annotations",
        "",
        "from .losses import LossCost, LossCosts",
        "",
    ]
    known = costs()
    sources = {source: f"_{number}" for number, source in enumerate(dict.fromkeys(each.source for each in known), 1)}
    lines += [f'{name} = "{source}"' for source, name in sources.items()]
    lines += ["", "MEASURED = LossCosts(", "    ("]
    for each in known:
        values = [f'"{each.codec}"', repr(each.percent), sources[each.source], repr(each.seeds)]
        if each.sync is not None:
            values += [f'"{each.sync}"', *map(repr, (each.every, each.fragments, each.delay))]
        values += [f"workers={each.workers}"] if each.workers != 2 else []
        lines.append(f"        LossCost({', '.join(values)}),")
    return "\n".join([*lines, "    )", ")"]) + "\n"
