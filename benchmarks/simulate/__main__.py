"""Measure what `fusionlayer simulate` needs to know, and compare what it says with measured training steps.

    python -m benchmarks.simulate measure --model gpt --rates 100mbit,1gbit --out profiles
    python -m benchmarks.simulate connections --links 100mbit/50ms/0.0005/reno --profile profiles/gpt_HARDWARE_DATE.yaml
    python -m benchmarks.simulate steps --link 100mbit/50ms/0.0005/reno --methods ddp,int4,int4+connections=16
    python -m benchmarks.simulate validate RESULTS.json --profile profiles/gpt_HARDWARE_DATE.yaml --update
    python -m benchmarks.simulate links RESULTS.json --profile profiles/gpt_HARDWARE_DATE.yaml

`measure` takes about two minutes on two cores; it needs network namespaces, as `connections` and `steps` do, which
measure on long and lossy ways. `validate` reads result files of benchmarks.training or of `steps`; with --update the
profile remembers the errors, and `fusionlayer simulate` shows them as a band. `links` reads files of
benchmarks.collective --links, and predicts single calls; `sums` reads files of benchmarks.unequal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from benchmarks.collective.options import Link
from benchmarks.report import result_path, table
from benchmarks.training.workloads import MODELS
from fusionlayer.errors import FusionLayerError
from fusionlayer.planning.connections import way_name
from fusionlayer.planning.cost_model import parse_rate
from fusionlayer.planning.profile import Profile

from .links import predicted_calls, read_calls
from .measure import FULL, QUICK, measure, measure_connections
from .picture import draw
from .steps import measure_steps
from .sums import predicted_sums, read_sums
from .validate import compare, read_cells, rtt_of, summarize

COMMENT = "A measured cost profile; profiles/README.md has the schema. Written by: {command}"


def main() -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("simulate", __doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    measuring = commands.add_parser("measure", help="measure a profile in the lab")
    measuring.add_argument("--model", choices=list(MODELS), default="gpt", help="whose step is measured (default gpt)")
    measuring.add_argument(
        "--rates", type=comma_separated(_rate), default=("100mbit", "1gbit"), help="default 100mbit,1gbit"
    )
    measuring.add_argument("--out", type=Path, default=Path("profiles"), help="folder (default profiles)")
    measuring.add_argument("--hardware", help="name of the machine in the file name")
    measuring.add_argument("--quick", action="store_true", help="few sizes and repeats: a trial, not a measurement")
    measuring.add_argument("--busy-ok", action="store_true", help="measure although other work goes on")
    measuring.set_defaults(run=_measure)
    connecting = commands.add_parser("connections", help="measure what one connection carries over long ways")
    connecting.add_argument("--profile", type=Path, required=True, metavar="PROFILE.yaml", help="that gets the figures")
    connecting.add_argument(
        "--links",
        type=comma_separated(Link.parse),
        required=True,
        metavar="RATE/RTT/LOSS/CONGESTION,...",
        help="such as 100mbit/50ms/0.0005/reno",
    )
    connecting.add_argument("--repeats", type=count(), default=5, help="default 5")
    driver.add_options(connecting, timed=True)
    connecting.set_defaults(run=_connections)
    stepping = commands.add_parser("steps", help="measure steps on long and lossy ways, for validate")
    stepping.add_argument("--model", choices=list(MODELS), default="gpt", help="what is trained (default gpt)")
    stepping.add_argument("--link", type=Link.parse, required=True, metavar="RATE/RTT/LOSS/CONGESTION")
    stepping.add_argument("--methods", type=comma_separated(str), required=True, help="such as ddp,int4+connections=16")
    stepping.add_argument("--rounds", type=count(), default=8, help="turns of each method (default 8)")
    stepping.add_argument("--theme", default="steps", help="first part of the result files' names (default steps)")
    driver.add_options(stepping, timed=True)
    stepping.set_defaults(run=_steps)
    validating = commands.add_parser("validate", help="compare a profile's projections with measured steps")
    validating.add_argument("results", type=Path, nargs="+", metavar="RESULTS.json", help="of benchmarks.training")
    validating.add_argument("--profile", type=Path, required=True, metavar="PROFILE.yaml")
    validating.add_argument("--curves", action="store_true", help="interpolate measured transfers, not alpha-beta")
    validating.add_argument("--theme", help="first part of the result files' names (default: simulate-MODEL)")
    validating.add_argument("--update", action="store_true", help="store the errors in the profile")
    driver.add_options(validating)
    validating.set_defaults(run=_validate)
    linking = commands.add_parser("links", help="compare a profile's predictions with calls on long and lossy links")
    linking.add_argument("results", type=Path, nargs="+", metavar="RESULTS.json", help="of benchmarks.collective")
    linking.add_argument("--profile", type=Path, required=True, metavar="PROFILE.yaml")
    driver.add_options(linking)
    linking.set_defaults(run=_links)
    summing = commands.add_parser("sums", help="compare a profile's predictions with sums over links of unequal rates")
    summing.add_argument("results", type=Path, nargs="+", metavar="RESULTS.json", help="of benchmarks.unequal")
    summing.add_argument("--profile", type=Path, required=True, metavar="PROFILE.yaml")
    driver.add_options(summing)
    summing.set_defaults(run=_sums)
    options = parser.parse_args()
    try:
        options.run(options)
    except FusionLayerError as error:
        print(f"benchmarks.simulate: {error}", file=sys.stderr)
        return 1
    return 0


def _rate(text: str) -> str:
    try:
        parse_rate(text)
    except FusionLayerError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _measure(options: argparse.Namespace) -> None:
    environment = driver.begin(options, 2)
    profile = measure(options.model, options.rates, QUICK if options.quick else FULL, environment)
    options.out.mkdir(parents=True, exist_ok=True)
    path = result_path(options.out, options.model, environment).with_suffix(".yaml")
    profile.to_yaml(path, COMMENT.format(command=environment.command))
    print(path)


def _connections(options: argparse.Namespace) -> None:
    profile = Profile.from_yaml(options.profile)
    driver.begin(options, 2)
    found = measure_connections(options.links, replace(FULL, repeats=options.repeats))
    for way, rate in found.items():
        print(f"{way}: {rate / 1e6:.1f} Mbit/s")
    _store(options.profile, replace(profile, connections={**profile.connections, **found}))


def _steps(options: argparse.Namespace) -> None:
    environment = driver.begin(options, 2)
    rows = measure_steps(options.model, options.link, options.methods, options.rounds)
    shown = [
        {
            "method": row["method"],
            "step, ms": round(1e3 * row["step_seconds"], 1),
            "rounds, ms": f"{1e3 * min(times):.0f} to {1e3 * max(times):.0f}",
            "MB sent": round(row["bytes_per_step"] / 1e6, 2),
            "bits equal": row["identical"],
        }
        for row in rows
        for times in [[turn["seconds"] for turn in row["rounds"]]]
    ]
    link = options.link
    way = way_name(rtt_of(rows[0]), link.loss, link.congestion)
    title = f"Steps of {options.model} on two hosts, {link.rate}, {way}: means of {options.rounds} rounds"
    driver.finish(options, options.theme, title, environment, rows, shown)


def _store(path: Path, profile: Profile) -> None:
    profile.to_yaml(path, COMMENT.format(command=profile.environment.get("command", "hand")))


def _validate(options: argparse.Namespace) -> None:
    profile = Profile.from_yaml(options.profile)
    cells = [cell for path in options.results for cell in read_cells(path)]
    compared, left_out = compare(cells, profile, options.curves)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    if not compared:
        names = ", ".join(map(str, options.results))
        raise SystemExit(f"{names}: no step in it can be projected from {options.profile}")
    if options.update and any(rtt_of(each.cell) for each in compared):
        raise SystemExit("--update keeps errors by rate and workers, and these steps are of long ways; leave it out")
    known = summarize(compared, ", ".join(path.name for path in options.results))
    rows = [each.row() for each in compared]
    mean, median, largest = known.error
    title = f"Projected beside measured steps: error {mean:.1%} mean, {median:.1%} median, {largest:.1%} largest"
    theme = options.theme or f"simulate-{profile.model.name}"
    driver.finish(options, theme, title, driver.begin(options), rows, pictures={theme: lambda: draw(rows)})
    if options.update:
        _store(options.profile, replace(profile, validation=known))


def _links(options: argparse.Namespace) -> None:
    profile = Profile.from_yaml(options.profile)
    rows = [row for path in options.results for row in predicted_calls(read_calls(path), profile)]
    title = f"Predicted beside measured calls on long links: {_errors(rows)}"
    grouped = table("The same by what calls go over, and by MB", list(_by("over", rows)) + list(_by("MB", rows)))
    driver.finish(options, "simulate-links", title, driver.begin(options), rows, more=[grouped])


def _sums(options: argparse.Namespace) -> None:
    profile = Profile.from_yaml(options.profile)
    rows = [row for path in options.results for row in predicted_sums(read_sums(path), profile)]
    title = f"Predicted beside measured sums over links of unequal rates: {_errors(rows)}"
    driver.finish(options, "simulate-sums", title, driver.begin(options), rows)


def _by(key: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for value in dict.fromkeys(row[key] for row in rows):
        group = [row for row in rows if row[key] == value]
        yield {"calls": f"{value} MB" if key == "MB" else value, "number": len(group), "error": _errors(group)}


def _errors(rows: Sequence[Mapping[str, Any]]) -> str:
    errors = [abs(row["predicted ms"] / row["measured ms"] - 1) for row in rows]
    return f"error {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most"


if __name__ == "__main__":
    driver.leave(main)
