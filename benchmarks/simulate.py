"""Compare what `fusionlayer simulate` projects with measured training steps; nothing is measured.

    python -m benchmarks.simulate RESULTS.json --profile profiles/gpt_HARDWARE_DATE.yaml --update

It reads result files of benchmarks.training and projects every step in them that the profile has costs for. With
--update the profile keeps the errors, and `fusionlayer simulate` shows them as a band. `fusionlayer profile` measures
a profile.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import driver
from benchmarks.lab.network import seconds_of
from fusionlayer.base.errors import ConfigError, FusionLayerError
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.cost_model import parse_rate
from fusionlayer.planning.profile import Profile, Validation
from fusionlayer.planning.projection import Method, project
from fusionlayer.planning.simulation import Compute, Resources, run_step

__all__ = ["Comparison", "compare", "main", "read_cells", "summarize"]

_ALIASES = {"ddp-again": "ddp"}
_ALONE = "alone"
_CONNECTIONS = "+connections="
COMMENT = "A measured cost profile; profiles/README.md has the schema. Written by: {command}"


@dataclass(frozen=True)
class Comparison:
    """A measured step beside the projected one.

    Attributes:
        cell: facts of the measurement, as its result file has them.
        method: what was projected.
        workers: number of ranks.
        projected: seconds.
        measured: seconds.
        projected_bytes: that a host's link carries away; payload alone.
    """

    cell: Mapping[str, Any]
    method: Method
    workers: int
    projected: float
    measured: float
    projected_bytes: float

    @property
    def error(self) -> float:
        """projected / measured - 1."""
        return self.projected / self.measured - 1

    def _path(self) -> dict[str, Any]:
        if not self.cell.get("delay"):
            return {}
        lost, congestion = self.cell.get("frame_loss", 0.0), self.cell.get("congestion", "reno")
        return {"rtt, ms": f"{1e3 * _rtt_of(self.cell):g}", "lost": lost, "congestion": congestion}

    def row(self) -> dict[str, Any]:
        """Return the comparison for a table and a result file."""
        counted = self.cell.get("bytes_per_step")
        return {
            "model": self.cell["model"],
            "hosts": self.cell["hosts"],
            "workers": self.cell["workers"],
            "rate": self.cell["rate"],
            **self._path(),
            "method": self.cell["method"],
            "measured ms": round(self.measured * 1e3, 1),
            "projected ms": round(self.projected * 1e3, 1),
            "error": f"{self.error:+.1%}",
            "measured MB": round(counted / 1e6, 2) if counted is not None else "",
            "projected MB": round(self.projected_bytes / 1e6, 2),
        }


def _rtt_of(row: Mapping[str, Any]) -> float:
    """Return the round trip of a result's link in seconds, from ``delay`` each way, such as "25ms"."""
    return 2 * seconds_of("delay", row["delay"]) if row.get("delay") else 0.0


def read_cells(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a training benchmark's result file; keys beside the needed ones are left alone.

    Raises:
        ConfigError: it is no such file.
    """
    needed: dict[str, Any] = {"model": str, "hosts": int, "workers": int, "method": str, "step_seconds": (int, float)}
    try:
        rows = json.loads(path.read_text())["rows"]
        for row in rows:
            for key, kind in needed.items():
                if not isinstance(row[key], kind):
                    raise TypeError(f"{key}={row[key]!r}")
            if row["step_seconds"] <= 0 or not isinstance(row["rate"], (str, type(None))):
                raise ValueError(f"step_seconds={row['step_seconds']!r}, rate={row['rate']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no result file of the training benchmark: {error!r}; expected rows with "
            f"{', '.join([*needed, 'rate'])}"
        ) from error
    return list(rows)


def compare(
    cells: Sequence[Mapping[str, Any]], profile: Profile, curves: bool = False, algorithm: str | None = None
) -> tuple[list[Comparison], list[str]]:
    """Return the cells that ``profile`` can project, and in words why others are left out.

    All emulated hosts share the cores of the profile's machine. ``algorithm`` is the collective of lossy codecs, if it
    was another one than engines take now.
    """
    compared: list[Comparison] = []
    left_out: dict[str, None] = {}
    for cell in cells:
        try:
            compared += _project(cell, profile, curves, algorithm)
        except ConfigError as error:
            left_out[f"{cell['method']}: {error}"] = None
    if models := sorted({cell["model"] for cell in cells} - {profile.model.name}):
        left_out[f"{', '.join(models)}: the profile is of the model {profile.model.name}"] = None
    return compared, list(left_out)


def _project(cell: Mapping[str, Any], profile: Profile, curves: bool, algorithm: str | None) -> Iterator[Comparison]:
    if cell["model"] != profile.model.name:
        return
    workers = cell["hosts"] * cell["workers"]
    cores = profile.machine.cores / workers
    if cell["method"] == _ALONE:
        model = profile.model_alone
        compute = Compute(model.forward, model.backward, model.optimizer)
        alone = run_step(compute, [], Resources(cores, profile.machine.threads)).seconds
        raise ConfigError(
            f"a step of {workers} workers took {cell['step_seconds'] * 1e3:.0f} ms, by the profile {alone * 1e3:.0f} ms"
        )
    if cell["rate"] is None:
        raise ConfigError("a step on a link without limit; its rate is not known")
    name, _, connections = _ALIASES.get(cell["method"], cell["method"]).partition(_CONNECTIONS)
    scenario = Scenario(
        cell["rate"],
        cell["workers"],
        cores,
        curves=curves,
        rtt=_rtt_of(cell),
        loss=cell.get("frame_loss", 0.0),
        congestion=cell.get("congestion", "reno"),
        connections=int(connections) if connections else None,
    )
    method = Method.named(name, profile)
    if algorithm is not None and method.algorithm is None and not profile.codec(method.codec).lossless:
        method = replace(method, algorithm=algorithm)
    step = project(profile, method, scenario, workers)
    yield Comparison(cell, method, workers, step.seconds, float(cell["step_seconds"]), step.sent)


def summarize(compared: Sequence[Comparison], source: str) -> Validation:
    """Return what a profile keeps of comparisons, one at least."""
    errors = [abs(each.error) for each in compared]
    ratios = [each.measured / each.projected for each in compared]
    workers = [each.workers for each in compared]
    rates = sorted({each.cell["rate"] for each in compared}, key=parse_rate)
    return Validation(
        source=source,
        cells=len(compared),
        workers=(min(workers), max(workers)),
        rates=(rates[0], rates[-1]),
        methods=tuple(dict.fromkeys(each.method.name for each in compared)),
        error=(statistics.fmean(errors), statistics.median(errors), max(errors)),
        low=min(ratios),
        median=statistics.median(ratios),
        high=max(ratios),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("simulate", __doc__)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS.json", help="of benchmarks.training")
    parser.add_argument("--profile", type=Path, required=True, metavar="PROFILE.yaml")
    parser.add_argument("--curves", action="store_true", help="interpolate measured transfers, not alpha-beta")
    parser.add_argument(
        "--algorithm", metavar="NAME", help="collective of lossy codecs then (default: as engines take)"
    )
    parser.add_argument("--limit", type=float, metavar="PERCENT", help="exit 1 if an error is larger")
    parser.add_argument("--theme", help="first part of the result files' names (default: simulate-MODEL)")
    parser.add_argument("--update", action="store_true", help="store the errors in the profile")
    driver.add_options(parser)
    options = parser.parse_args(arguments)
    try:
        profile = Profile.from_yaml(options.profile)
        cells = [cell for path in options.results for cell in read_cells(path)]
    except FusionLayerError as error:
        print(f"benchmarks.simulate: {error}", file=sys.stderr)
        return 1
    compared, left_out = compare(cells, profile, options.curves, options.algorithm)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    if not compared:
        names = ", ".join(map(str, options.results))
        raise SystemExit(f"{names}: no step in it can be projected from {options.profile}")
    if options.update and any(_rtt_of(each.cell) for each in compared):
        raise SystemExit("--update keeps errors by rate and workers, and these steps are of long links; leave it out")
    known = summarize(compared, ", ".join(path.name for path in options.results))
    mean, median, largest = known.error
    title = f"Projected and measured steps: error {mean:.1%} mean, {median:.1%} median, {largest:.1%} largest"
    theme = options.theme or f"simulate-{profile.model.name}"
    driver.finish(options, theme, title, driver.begin(options), [each.row() for each in compared])
    if options.update:
        comment = COMMENT.format(command=profile.environment.get("command", "hand"))
        replace(profile, validation=known).to_yaml(options.profile, comment)
    return int(options.limit is not None and 100 * largest > options.limit)


if __name__ == "__main__":
    driver.leave(main)
