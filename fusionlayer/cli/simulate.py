"""``fusionlayer simulate``: how long a step would take on more workers or another network, from a measured profile."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.errors import ConfigError
from ..planning.cluster import Scenario
from ..planning.collective_phases import OWN
from ..planning.cost_model import parse_rate
from ..planning.profile import Profile
from ..planning.projection import BASELINE, Band, Method, break_even, project, projected_band
from ..planning.simulation import SimulatedStep
from .parsers.simulate import WORKERS
from .progress import ProgressLine
from .tables import Column, Table, print_text, show
from .units import BYTES, SECONDS, in_one_unit


def run(options: argparse.Namespace) -> None:
    """Print the projection that ``options`` ask for."""
    profile = Profile.from_yaml(options.profile)
    slowest = min(options.rates, key=parse_rate) if options.rates else profile.fastest_rate
    rate = options.rate or slowest
    per_host = options.per_host or profile.machine.per_host
    scenario = Scenario(
        rate,
        per_host,
        options.cores,
        options.latency,
        curves=options.curves,
        rtt=options.rtt,
        loss=options.loss,
        congestion=options.congestion,
        connections=options.connections,
        rates=tuple(options.rates or ()),
    )
    if options.cores is not None and profile.machine.on_device:
        raise ConfigError(f"--cores {options.cores:g} with a profile of {profile.machine.device}; leave it out")
    default = [len(options.rates) * per_host] if options.rates else list(WORKERS)
    workers = [count for count in options.workers or default if count % per_host == 0]
    if not workers:
        raise ConfigError(f"--workers: none is a multiple of --per-host {per_host}")
    codecs = options.codec or sorted(profile.codecs)
    suffixes = ("", "+overlap") if options.overlap_forward else ("",)
    names = [codec + suffix for codec in codecs for suffix in suffixes]
    baselines = [BASELINE, *(f"{BASELINE}-{form}" for form in OWN if profile.uses_nccl)]
    methods = [
        *(Method.named(name, profile) for name in baselines),
        *(Method.named(name, profile, options.algorithm, options.planner) for name in names),
    ]
    with ProgressLine("simulate") as progress:
        projection = Projection.of(profile, methods, scenario, workers, progress)
    if options.json:
        print(json.dumps(projection.as_dict(), indent=1))
    else:
        show(projection.tables(), options.columns)
        print_text(projection.reliability())


@dataclass(frozen=True)
class ProjectedStep:
    """A projected step of a method."""

    workers: int
    method: Method
    step: SimulatedStep
    band: Band
    speedup: float


@dataclass(frozen=True)
class Projection:
    """Methods, baseline first, on a growing number of workers.

    Attributes:
        cells: all methods for each number of workers.
        ahead: by method, whether it beats the baseline with the fewest workers, and where that changes.
    """

    profile: Profile
    scenario: Scenario
    workers: Sequence[int]
    cells: Sequence[ProjectedStep]
    ahead: Mapping[str, tuple[bool, list[int]]]

    @classmethod
    def of(
        cls,
        profile: Profile,
        methods: Sequence[Method],
        scenario: Scenario,
        workers: Sequence[int],
        progress: ProgressLine,
    ) -> Projection:
        """Return the projection; the more workers, the longer a step takes to simulate."""
        cells: list[ProjectedStep] = []
        ahead: dict[str, tuple[bool, list[int]]] = {}
        known: dict[tuple[str, int], float] = {}
        total = len(workers) + 1

        def seconds(method: Method, count: int) -> float:
            if (method.name, count) not in known:
                known[method.name, count] = project(profile, method, scenario, count).seconds
            return known[method.name, count]

        for place, count in enumerate(workers):
            for number, method in enumerate(methods):
                progress.at((place + number / len(methods)) / total, f"{method.name}, {count} workers")
                step = project(profile, method, scenario, count)
                known[method.name, count] = step.seconds
                band = projected_band(profile, method, scenario, count, step.seconds)
                cells.append(ProjectedStep(count, method, step, band, seconds(methods[0], count) / step.seconds))
        for number, method in enumerate(methods[1:]):
            progress.at((len(workers) + number / len(methods)) / total, f"{method.name}, break-even")

            def faster(count: int, method: Method = method) -> bool:
                return seconds(method, count) < seconds(methods[0], count)

            ahead[method.name] = faster(workers[0]), break_even(faster, workers, scenario.per_host)
        return cls(profile, scenario, workers, cells, ahead)

    def as_dict(self) -> dict[str, Any]:
        """Return the whole projection as plain data, in seconds and bytes."""
        return {
            "title": self.profile.title,
            "rate": self.scenario.rate,
            "rates": list(self.scenario.rates),
            "per_host": self.scenario.per_host,
            "rtt": self.scenario.rtt,
            "loss": self.scenario.loss,
            "congestion": self.scenario.congestion,
            "connections": self.scenario.connections,
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
                for cell in self.cells
            ],
            "break_even": {
                name: {"ahead_at_first": first, "changes_at": places} for name, (first, places) in self.ahead.items()
            },
        }

    def tables(self) -> list[Table]:
        """Return the steps, and where methods are faster than the baseline."""
        steps = [cell.step for cell in self.cells]
        bands = [cell.band for cell in self.cells]
        unit, (seconds, low, high, exposed) = in_one_unit(
            SECONDS,
            [step.seconds for step in steps],
            [band.low for band in bands],
            [band.high for band in bands],
            [step.seconds - step.alone for step in steps],
        )
        volume, (sent,) = in_one_unit(BYTES, [step.sent for step in steps])
        beyond = [f"EXTRAPOLATION: {', '.join(band.extrapolated)}" if band.extrapolated else "" for band in bands]
        between = [f"{a}..{b}" if a and b else "unknown" for a, b in zip(low, high, strict=True)]
        projected = [
            Column("workers", [str(cell.workers) for cell in self.cells]),
            Column("method", [cell.method.name for cell in self.cells], text=True),
            Column("step", seconds, unit),
            Column("band", between, unit),
            Column("speed-up", [f"{cell.speedup:.2f}" for cell in self.cells], f"x {BASELINE}"),
            Column("exposed", exposed, unit, gives_way=2),
            Column("sent", sent, f"{volume}/host", gives_way=1),
        ]
        if any(beyond):
            projected.append(Column("beyond what was validated", beyond, text=True, wraps=True))
        where = [
            Column("method", list(self.ahead), text=True),
            Column("where", [_spell(*change) for change in self.ahead.values()], text=True),
        ]
        return [
            Table(f"{self.profile.title}: {self._network()}", projected),
            Table(f"Faster than {BASELINE}, from {self.workers[0]} to {self.workers[-1]} workers", where),
        ]

    def _network(self) -> str:
        hosts = f", {self.scenario.per_host} workers on a host" if self.scenario.per_host > 1 else ""
        cluster = self.scenario.cluster(self.profile, self.workers[-1])
        latency = f"latency {cluster.between.latency * 1e6:.0f} us"
        computing = "a device" if self.profile.machine.on_device else f"cores per worker {cluster.cores:g}"
        over = self.scenario.connections
        lossy = f", loss {self.scenario.loss:g}, {self.scenario.congestion}" if self.scenario.loss else ""
        lossy += f", {over} connection{'s' if over > 1 else ''}" if over is not None else ""
        rate = ", ".join(self.scenario.rates) or self.scenario.rate
        return f"{rate}, {latency}{lossy}, {computing}{hosts}"

    def reliability(self) -> str:
        """Return a sentence on the accuracy of the projection."""
        known = self.profile.validation
        if known is None:
            told = "This profile has not been compared with measured steps: all of this is EXTRAPOLATION."
            return told + self.profile.machine.assumed
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
