"""``fusionlayer simulate``: how long a step would take on more workers or another network, from a measured profile."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..planning.cluster import Scenario
from ..planning.collective_phases import ALGORITHMS
from ..planning.profile import Profile
from ..planning.projection import BASELINE, Band, Method, break_even, project, projected_band
from ..planning.simulation import Step
from .arguments import above_zero, join, names, numbers, positive, seconds
from .tables import print_table

__all__ = ["add_parser"]

_WORKERS = (2, 8, 64, 256, 1024, 4096)
_LATENCY_FACTORS = (0.25, 1.0, 4.0)

_EPILOG = """\
The band is the range of measured over projected steps when the profile was validated. EXTRAPOLATION names what lies
outside of what was validated: there the band says nothing. docs/simulation.md has the model and its assumptions.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "simulate",
        help="project steps to more workers or another network, from a measured profile",
        description="Project training steps of several methods to more workers or another network.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("profile", type=Path, metavar="PROFILE.yaml", help="measured costs (profiles/README.md)")
    parser.add_argument(
        "--workers", type=numbers, default=list(_WORKERS), metavar="N,N", help=f"default {join(_WORKERS)}"
    )
    parser.add_argument("--rate", help="of each host's link, such as 1gbit (default: the profile's highest)")
    parser.add_argument(
        "--codec", type=names, metavar="NAME,NAME", help="codecs of the profile to compare (default: all of them)"
    )
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), help="collective (default: as the engine chooses)")
    parser.add_argument("--planner", metavar="NAME", help="how gradients are fused (default: configured)")
    parser.add_argument("--overlap-forward", action="store_true", help="also with results awaited in the next forward")
    parser.add_argument("--per-host", type=positive, default=1, metavar="N", help="workers on each host (default 1)")
    parser.add_argument("--cores", type=above_zero, metavar="X", help="cores of each worker (default: as measured)")
    parser.add_argument("--latency", type=seconds, metavar="SECONDS", help="of a message (default: as measured)")
    parser.add_argument("--curves", action="store_true", help="interpolate measured transfers, not alpha-beta")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the projection that ``options`` ask for."""
    profile = Profile.from_yaml(options.profile)
    rate = options.rate or profile.fastest_rate
    scenario = Scenario(rate, options.per_host, options.cores, options.latency, curves=options.curves)
    workers = [count for count in options.workers if count % options.per_host == 0]
    if not workers:
        raise ConfigError(f"--workers: none is a multiple of --per-host {options.per_host}")
    codecs = options.codec or sorted(profile.codecs)
    suffixes = ("", "+overlap") if options.overlap_forward else ("",)
    names = [codec + suffix for codec in codecs for suffix in suffixes]
    methods = [
        Method.named(BASELINE, profile),
        *(Method.named(name, profile, options.algorithm, options.planner) for name in names),
    ]
    projection = Projection(profile, methods, scenario, workers)
    if options.json:
        print(json.dumps(projection.as_dict(), indent=1))
    else:
        projection.show()


@dataclass(frozen=True)
class Cell:
    """A projected step of a method."""

    workers: int
    method: Method
    step: Step
    band: Band
    speedup: float


@dataclass(frozen=True)
class Projection:
    """Methods, baseline first, on a growing number of workers."""

    profile: Profile
    methods: Sequence[Method]
    scenario: Scenario
    workers: Sequence[int]

    def seconds(self, method: Method, workers: int, latency_factor: float = 1.0) -> float:
        """Return the projected step."""
        scenario = self.scenario
        if latency_factor != 1:
            scenario = replace(scenario, curves=False, latency_factor=latency_factor)
        return project(self.profile, method, scenario, workers).seconds

    def cells(self) -> Iterator[Cell]:
        """Yield all methods for each number of workers."""
        for workers in self.workers:
            steps = [project(self.profile, method, self.scenario, workers) for method in self.methods]
            for method, step in zip(self.methods, steps, strict=True):
                band = projected_band(self.profile, method, self.scenario, workers, step.seconds)
                yield Cell(workers, method, step, band, steps[0].seconds / step.seconds)

    def ahead(self, method: Method) -> tuple[bool, list[int]]:
        """Return whether a method beats the baseline with the fewest workers, and where that changes."""

        def faster(workers: int) -> bool:
            return self.seconds(method, workers) < self.seconds(self.methods[0], workers)

        return faster(self.workers[0]), break_even(faster, self.workers, self.scenario.per_host)

    def latencies(self) -> Iterator[tuple[Method, list[float]]]:
        """Yield the steps of each method with the most workers, for each factor on the latency."""
        for method in self.methods:
            yield method, [self.seconds(method, self.workers[-1], factor) for factor in _LATENCY_FACTORS]

    def as_dict(self) -> dict[str, Any]:
        """Return the whole projection as plain data, in seconds and bytes."""
        changes = {method.name: self.ahead(method) for method in self.methods[1:]}
        return {
            "title": self.profile.title,
            "rate": self.scenario.rate,
            "per_host": self.scenario.per_host,
            "steps": [
                {
                    "workers": cell.workers,
                    "method": cell.method.name,
                    "step_seconds": cell.step.seconds,
                    "low": cell.band.low,
                    "high": cell.band.high,
                    "speedup": cell.speedup,
                    "compute_seconds": cell.step.alone,
                    "communication_seconds": cell.step.communication,
                    "bytes_per_step": cell.step.sent,
                    "extrapolated": list(cell.band.extrapolated),
                }
                for cell in self.cells()
            ],
            "break_even": {
                name: {"ahead_at_first": first, "changes_at": places} for name, (first, places) in changes.items()
            },
            "latency": {
                "workers": self.workers[-1],
                "factors": list(_LATENCY_FACTORS),
                "step_seconds": {method.name: seconds for method, seconds in self.latencies()},
            },
        }

    def show(self) -> None:
        """Print tables."""
        rows = []
        for cell in self.cells():
            band = cell.band
            rows.append(
                (
                    str(cell.workers),
                    cell.method.name,
                    _ms(cell.step.seconds),
                    "unknown" if band.low is None or band.high is None else f"{_ms(band.low)}..{_ms(band.high)}",
                    f"{cell.speedup:.2f}",
                    _ms(cell.step.seconds - cell.step.alone),
                    f"{cell.step.sent / 1e6:.2f}",
                    f"EXTRAPOLATION: {', '.join(band.extrapolated)}" if band.extrapolated else "",
                )
            )
        columns = ("workers", "method", "step ms", "band ms", "x ddp", "exposed ms", "MB/host", "")
        print_table(f"{self.profile.title}: {self._network()}", columns, rows, right=(0, 2, 3, 4, 5, 6))
        print_table(
            f"Faster than {BASELINE}, from {self.workers[0]} to {self.workers[-1]} workers",
            ("method", "where"),
            [(method.name, _spell(*self.ahead(method))) for method in self.methods[1:]],
        )
        print_table(
            f"Latency: step ms with {self.workers[-1]} workers",
            ("method", *(f"latency x{factor:g}" for factor in _LATENCY_FACTORS)),
            [(method.name, *map(_ms, seconds)) for method, seconds in self.latencies()],
            right=(1, 2, 3),
        )
        print(self._reliability())

    def _network(self) -> str:
        hosts = f", {self.scenario.per_host} workers on a host" if self.scenario.per_host > 1 else ""
        cluster = self.scenario.cluster(self.profile, self.workers[-1])
        latency = f"latency {cluster.between.latency * 1e6:.0f} us"
        return f"{self.scenario.rate}, {latency}, cores per worker {cluster.cores:g}{hosts}"

    def _reliability(self) -> str:
        known = self.profile.validation
        if known is None:
            return "This profile has not been compared with measured steps: all of this is EXTRAPOLATION."
        mean, median, largest = known.error
        return (
            f"Validated with {known.cells} measured steps ({known.workers[0]} to {known.workers[1]} workers, "
            f"{known.rates[0]} to {known.rates[1]}): error {mean:.0%} mean, {median:.0%} median, {largest:.0%} "
            f"largest; measured / projected {known.low:.2f}..{known.high:.2f}. Beyond that is EXTRAPOLATION."
        )


def _spell(first: bool, changes: Sequence[int]) -> str:
    if not changes:
        return "everywhere" if first else "nowhere"
    words = []
    ahead = first
    for place in changes:
        words.append(f"below {place}" if ahead else f"from {place}")
        ahead = not ahead
    return ", ".join(words)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"
