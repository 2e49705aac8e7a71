"""Planners beside each other on an emulated network: the waiting that each is predicted to leave, and what it leaves.

    python -m benchmarks.ablation --rates 100mbit,1gbit --codec dgc --out benchmarks/results

For each rate `fusionlayer profile` measures a profile on that network, every planner makes a plan of it, and all plans
train the model in turns, in one set of processes, in an order that is shuffled in every round. Waiting is from the end
of backward, in which sparse codecs have encoded ahead of fusion, until all gradients are there. SAFusion's figure 14.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fusionlayer as fl
from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from benchmarks.lab import Network, launch, why_not
from benchmarks.training.cell import Cell
from benchmarks.training.methods import COMPUTE
from benchmarks.training.summary import interval
from benchmarks.training.workloads import MODELS
from benchmarks.variants import SEPARATOR
from fusionlayer.cli import drawing
from fusionlayer.plan import FusionPlan
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.plans import make_plan
from fusionlayer.planning.prediction import predict_plan
from fusionlayer.planning.profile import Profile
from fusionlayer.planning.simulation import Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["main"]

OURS = "safusion"


@dataclass(frozen=True)
class Planned:
    """A plan, what is predicted of it, and the planners that have made it, the first of them by name."""

    plan: FusionPlan
    predicted: Step
    planners: tuple[str, ...]


def make_plans(profile: Profile, codec: str, rate: str | None, workers: int) -> list[Planned]:
    """Return the plan of every planner for the profile's model, equal ones once."""
    scenario = Scenario(rate or next(iter(profile.links)), curves=True)
    plans: dict[bytes, FusionPlan] = {}
    makers: dict[bytes, tuple[str, ...]] = {}
    for name in fl.planners.names():
        made = make_plan(profile, fl.planners.get(name), fl.codecs.get(codec).bare, scenario, workers, measured=True)
        plans[made.digest()] = made
        makers[made.digest()] = (*makers.get(made.digest(), ()), name)
    return [
        Planned(plan, predict_plan(profile, plan, scenario, measured=True), makers[digest])
        for digest, plan in plans.items()
    ]


def rows(
    rate: str | None, planned: Sequence[Planned], measured: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each plan: what was predicted and measured of it; ``measured`` is by the planners' first."""
    ours = next(one for one in planned if OURS in one.planners)
    mine = _waiting(measured[ours.planners[0]])
    found = []
    for one in planned:
        turns = measured[one.planners[0]]["rounds"]
        waiting = _waiting(measured[one.planners[0]])
        more = [theirs - own for theirs, own in zip(waiting, mine, strict=True)]
        found.append(
            {
                "rate": rate,
                "planners": list(one.planners),
                "buckets": len(one.plan.buckets),
                "predicted_waiting": one.predicted.waiting,
                "predicted_idle": one.predicted.idle,
                "waiting": statistics.median(waiting),
                "waiting_interval": interval(waiting),
                "more_than_ours": statistics.median(more),
                "more_interval": interval(more),
                "step_seconds": statistics.median(turn["seconds"] for turn in turns),
                "bytes_per_step": statistics.median(turn["sent"] for turn in turns),
                "rounds": turns,
            }
        )
    return sorted(found, key=lambda row: float(row["waiting"]))


def _waiting(measured: Mapping[str, Any]) -> list[float]:
    return [turn["waiting"] for turn in measured["rounds"]]


def columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a table for people, milliseconds."""
    low, high = (bound * 1e3 for bound in row["waiting_interval"])
    more_low, more_high = (bound * 1e3 for bound in row["more_interval"])
    ours = OURS in row["planners"]
    return {
        "link": row["rate"] or "no limit",
        "planner": ", ".join(row["planners"]),
        "buckets": str(row["buckets"]),
        "predicted waiting, ms": f"{row['predicted_waiting'] * 1e3:.1f}",
        "waiting, ms": f"{row['waiting'] * 1e3:.1f}",
        "95 %": f"{low:.1f}..{high:.1f}",
        f"more than {OURS}": "" if ours else f"{row['more_than_ours'] * 1e3:+.1f} [{more_low:+.1f}..{more_high:+.1f}]",
        "step, ms": f"{row['step_seconds'] * 1e3:.1f}",
    }


def picture(found: Sequence[Mapping[str, Any]], what: str) -> Figure:
    """Return waiting by planner, predicted and measured, one panel for each rate."""
    rates = list(dict.fromkeys(row["rate"] for row in found))
    most = max(sum(row["rate"] == rate for row in found) for rate in rates)
    figure = drawing.figure(4.4 * len(rates), 1.2 + 0.36 * most)
    for axes, rate in zip(figure.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        mine = [row for row in found if row["rate"] == rate][::-1]
        places = range(len(mine))
        own = [1e3 * row["waiting"] for row in mine]
        below = [value - 1e3 * row["waiting_interval"][0] for value, row in zip(own, mine, strict=True)]
        above = [1e3 * row["waiting_interval"][1] - value for value, row in zip(own, mine, strict=True)]
        axes.barh(
            places, own, 0.6, xerr=[below, above], color=drawing.PALETTE[0], error_kw={"lw": 0.8}, label="measured"
        )
        predicted = [1e3 * row["predicted_waiting"] for row in mine]
        axes.plot(predicted, places, "D", color=drawing.PALETTE[1], label="predicted")
        names = ["\n".join([", ".join(row["planners"][:2]), ", ".join(row["planners"][2:])]).strip() for row in mine]
        axes.set_yticks(places, names)
        axes.set(xlabel="waiting in a step, ms", title=rate or "no limit")
    figure.suptitle(f"{what}: how long training waits, by planner", x=0.01, ha="left")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def main() -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("ablation", __doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt", help="what is trained (default gpt)")
    parser.add_argument(
        "--rates", type=comma_separated(str), default=("100mbit", "1gbit"), help="default 100mbit,1gbit"
    )
    parser.add_argument("--hosts", type=count(2), default=2, help="number of hosts, a worker on each (default 2)")
    parser.add_argument("--codec", choices=fl.codecs.names(), default="dgc", help="of all gradients (default dgc)")
    parser.add_argument("--rounds", type=count(), default=10, help="turns of each plan (default 10)")
    parser.add_argument("--repeats", type=count(), default=11, help="of the profile's measurements (default 11)")
    driver.add_options(parser, timed=True)
    options = parser.parse_args()
    try:
        networks = [Network(options.hosts, rate) for rate in options.rates]
    except ValueError as error:
        parser.error(str(error))
    if obstacle := why_not(networks[0]):
        parser.error(f"needs network namespaces: {obstacle}")
    environment = driver.begin(options, options.hosts)
    found: list[dict[str, Any]] = []
    for network in driver.follow("benchmarks.ablation", networks):
        mine = _measure(network, options)
        if mine is None:
            return 1
        found += mine
    title = f"Waiting by planner: {options.model}, {options.codec}, {options.hosts} hosts, {options.rounds} rounds"
    shown = [columns(row) for row in found]
    theme = f"ablation-{options.model}-{options.hosts}x1"
    pictures = {theme: lambda: picture(found, f"{options.model}, {options.codec}")}
    driver.finish(options, theme, title, environment, found, shown, pictures=pictures)
    return 0


def _measure(network: Network, options: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Return the rows of one network; None if workers failed, which they have said on stderr."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = ["--repeats", str(options.repeats), "--largest", str(4**10)]
        profiling = [
            "profile",
            "--model",
            f"benchmarks.training.workloads:{options.model.replace('-', '_')}",
            "--codec",
            options.codec,
            *sizes,
            "--out",
            str(folder),
        ]
        if network.rate is not None:
            profiling += ["--rate", network.rate]
        if not _run([sys.executable, "-m", "fusionlayer", *profiling], network):
            return None
        planned = make_plans(Profile.from_yaml(next(folder.glob("*.yaml"))), options.codec, network.rate, network.hosts)
        plans = {}
        for one in planned:
            path = folder / f"{one.planners[0]}.plan"
            one.plan.to_yaml(path)
            plans[SEPARATOR.join([options.codec, one.planners[0]])] = str(path)
        methods = (COMPUTE, *plans)
        cell = Cell(options.model, network.hosts, 1, network.rate, methods, options.rounds, plans=plans)
        result = folder / "result.json"
        worker = [sys.executable, "-m", "benchmarks.training.worker", json.dumps(asdict(cell)), str(result)]
        if not _run(worker, network):
            return None
        measured = json.loads(result.read_text())
    by_planner = {method.rpartition(SEPARATOR)[2]: turns for method, turns in measured.items()}
    return rows(network.rate, planned, by_planner)


def _run(command: Sequence[str], network: Network) -> bool:
    with launch(command, network, timeout=3600, stdout=sys.stderr.fileno()) as process:
        return process.wait() == 0


if __name__ == "__main__":
    driver.leave(main)
