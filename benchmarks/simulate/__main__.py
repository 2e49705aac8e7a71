"""Measure what `fusionlayer simulate` needs to know, and compare what it says with measured training steps.

    python -m benchmarks.simulate measure --model gpt --rates 100mbit,1gbit --out profiles
    python -m benchmarks.simulate validate RESULTS.json --profile profiles/gpt_HARDWARE_DATE.yaml --update
    python -m benchmarks.simulate links RESULTS.json --profile profiles/gpt_HARDWARE_DATE.yaml

`measure` takes about two minutes on two cores; it needs network namespaces. `validate` reads a result file of
benchmarks.training; with --update the profile remembers the errors, and `fusionlayer simulate` shows them as a band.
`links` reads one of benchmarks.collective --links, and predicts single calls on long and lossy links.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import driver
from benchmarks.arguments import comma_separated
from benchmarks.report import result_path
from benchmarks.training.workloads import MODELS
from fusionlayer.errors import FusionLayerError
from fusionlayer.planning.cost_model import parse_rate
from fusionlayer.planning.profile import Profile

from .links import predicted_calls, read_calls
from .measure import FULL, QUICK, measure
from .validate import compare, read_cells, summarize

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
    validating = commands.add_parser("validate", help="compare a profile's projections with measured steps")
    validating.add_argument("results", type=Path, metavar="RESULTS.json", help="of benchmarks.training")
    validating.add_argument("--profile", type=Path, required=True, metavar="PROFILE.yaml")
    validating.add_argument("--curves", action="store_true", help="interpolate measured transfers, not alpha-beta")
    validating.add_argument("--update", action="store_true", help="store the errors in the profile")
    driver.add_options(validating)
    validating.set_defaults(run=_validate)
    linking = commands.add_parser("links", help="compare a profile's predictions with calls on long and lossy links")
    linking.add_argument("results", type=Path, nargs="+", metavar="RESULTS.json", help="of benchmarks.collective")
    linking.add_argument("--profile", type=Path, required=True, metavar="PROFILE.yaml")
    driver.add_options(linking)
    linking.set_defaults(run=_links)
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


def _validate(options: argparse.Namespace) -> None:
    profile = Profile.from_yaml(options.profile)
    compared, left_out = compare(read_cells(options.results), profile, options.curves)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    if not compared:
        raise SystemExit(f"{options.results}: no step in it can be projected from {options.profile}")
    known = summarize(compared, options.results.name)
    rows = [each.row() for each in compared]
    mean, median, largest = known.error
    title = f"Projected beside measured steps: error {mean:.1%} mean, {median:.1%} median, {largest:.1%} largest"
    driver.finish(options, f"simulate-{profile.model.name}", title, driver.begin(options), rows)
    if options.update:
        comment = COMMENT.format(command=profile.environment.get("command", "hand"))
        replace(profile, validation=known).to_yaml(options.profile, comment)


def _links(options: argparse.Namespace) -> None:
    profile = Profile.from_yaml(options.profile)
    rows = [row for path in options.results for row in predicted_calls(read_calls(path), profile)]
    errors = [abs(row["predicted ms"] / row["measured ms"] - 1) for row in rows]
    title = f"Predicted beside measured calls on long links: error {statistics.median(errors):.0%} in the median"
    driver.finish(options, "simulate-links", title, driver.begin(options), rows)


if __name__ == "__main__":
    driver.leave(main)
