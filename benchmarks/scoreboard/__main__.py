"""Which method brings a training to a loss first, on which network: minutes to three losses, method by method.

    python -m benchmarks.scoreboard --out benchmarks/results
    python -m benchmarks.scoreboard --parts losses --methods ddp,int8,int4 --seeds 0,1,2
    python -m benchmarks.scoreboard --resume --parts steps --networks 100mbit/1ms,30mbit/50ms
    python -m benchmarks.scoreboard --parts none --merge other/records --out benchmarks/results
    python -m benchmarks.scoreboard --quick

Losses are trained once for each method and seed, since they do not depend on the network. Steps are timed on each
network, all methods in turns. Minutes are the product; --measure trains for real on three networks and compares.

Each run leaves a record in --records, so that a campaign can be interrupted and go on with --resume. Losses may be
trained by several processes at once, with the same --records and --resume. Steps need a quiet machine.
benchmarks/README.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import driver, peers
from benchmarks.arguments import comma_separated, count, one_of, positive
from benchmarks.lab import why_not
from benchmarks.report import table

from . import campaign
from .campaign import SETUPS
from .links import LINKS, Link
from .methods import METHODS, NODES, QUICK, check
from .methods import why_not as impossible
from .picture import picture
from .records import Found, Records, read
from .settings import Settings
from .summary import checks, columns, overview, scores

PARTS = ("losses", "steps", "none")
MEASURED = ("int4@100mbit/1ms", "ddp-powersgd@30mbit/50ms", "int4+local=overlapped:every=8@30mbit/1ms")
QUICK_STEPS, QUICK_LINK = 12, Link("100mbit", "1ms")


def main() -> int:
    """Run the command line; return the exit status."""
    parser, options = _parse()
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            _make_quick(options, Path(folder))
        return _run(parser, options)


def _make_quick(options: argparse.Namespace, records: Path) -> None:
    """Change the options to a tiny scoreboard, whose records are thrown away and whose figures mean nothing."""
    options.model, options.steps, options.methods, options.seeds = (
        "gpt-small",
        QUICK_STEPS,
        options.methods or QUICK,
        (0,),
    )
    options.networks, options.rounds, options.records, options.busy_ok = (QUICK_LINK,), 1, records, True


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    settings = SETUPS[options.model].settings(options.model, *options.hosts, options.steps, options.learning_rate)
    methods = _available(options.methods or METHODS[settings.optimizer] + (NODES if settings.hosts else ()))
    found = Found(settings)
    theme = settings.theme + (f"-{options.learning_rate:g}" if options.learning_rate else "")
    folder = options.records / theme
    if folder.exists() and any(folder.glob("*.json")) and not options.resume:
        parser.error(f"{folder} has records; go on with --resume, or choose another --records")
    try:
        read(options.losses, found, losses_alone=True)
        read([*options.merge, *([folder] if folder.exists() else [])], found)
    except ValueError as error:
        parser.error(f"--losses or --merge: {error}")
    environment = driver.begin(options)
    records = Records(folder, settings.title, environment)
    failed = _campaign(options, settings, methods, records, found)
    if len(found.machines()) > 1:
        parser.error(f"steps were timed on {' and '.join(sorted(found.machines()))}; times of two machines do not mix")
    _report(options, settings, theme, environment, found)
    if failed:
        print(f"not all went well: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _available(methods: Sequence[str]) -> list[str]:
    """Return the methods that can run here, and say why others cannot."""
    absent = {name: reason for name in methods if (reason := impossible(name))}
    for name, reason in {**absent, **peers.LEFT_OUT}.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    return [name for name in methods if name not in absent]


def _campaign(
    options: argparse.Namespace, settings: Settings, methods: Sequence[str], records: Records, found: Found
) -> list[str]:
    """Do what is missing, and return what failed, in words."""
    losses = campaign.runs(methods, options.seeds, found) if "losses" in options.parts else []
    steps = campaign.cells(methods, options.networks, found) if "steps" in options.parts else []
    links = [link for link, _ in steps] + [link for _, link in options.measure]
    if links and (obstacle := why_not(links[0].network(settings.hosts or settings.workers))):
        raise SystemExit(f"steps need emulated networks, which there are none of here ({obstacle}); --parts losses")
    if losses or steps:
        seconds = campaign.expected_seconds(losses, steps, settings, options.rounds)
        parts = [f"losses of {len(losses)} runs, about {_hours(seconds[0])}"] if losses else []
        parts += [f"steps on {len(steps)} networks, about {_hours(seconds[1])}"] if steps else []
        print(f"to do: {'; '.join(parts)}; records in {records.folder}", file=sys.stderr)
    try:
        failed = campaign.run_losses(losses, settings, records, found)
        failed += campaign.run_steps(
            *(steps, settings, records, found),
            rounds=options.rounds,
            at_once=options.at_once,
            busy_ok=options.busy_ok,
        )
        return failed + campaign.measure(options.measure, options.seeds[0], settings, records, found, options.busy_ok)
    except KeyboardInterrupt:
        return ["interrupted"]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 3600 else f"{max(1.0, seconds / 60):.0f} min"


def _report(options: argparse.Namespace, settings: Settings, theme: str, environment: Any, found: Found) -> None:
    """Print the tables, and with ``--out`` write result and picture."""
    rows = scores(found, options.seeds)
    if not rows:
        print("nothing measured yet", file=sys.stderr)
        return
    title = settings.title.replace("Convergence", "Scoreboard")
    links = dict.fromkeys(row["link"] for row in rows if row["link"])
    more = [
        table(f"At {Link(*link.split('/')).words}: minutes", [columns(row) for row in rows if row["link"] == link])
        for link in links
    ]
    if compared := checks(found):
        more.append(table("Minutes of all steps, computed and measured as a whole", compared))
    theme = options.theme or theme
    pictures = {theme: lambda: picture(rows)} if any(row["link"] and row["minutes"][-1] for row in rows) else {}
    driver.finish(
        options, theme, title, environment, [*rows, *found.rows()], overview(rows), more=more, pictures=pictures
    )


def _method(text: str) -> str:
    try:
        return check(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _place(text: str) -> tuple[str, Link]:
    method, at, link = text.partition("@")
    if not at:
        raise argparse.ArgumentTypeError(f"{text!r}; expected METHOD@RATE/RTT, such as {MEASURED[0]}")
    return _method(method), Link.parse(link)


def _layout(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None or int(match[1]) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}; expected hosts and workers on each, such as 2x1 or 4x1")
    return int(match[1]), int(match[2])


def _parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = driver.make_parser("scoreboard", __doc__)
    parser.add_argument("--model", choices=list(SETUPS), default="gpt", help="what is trained (default gpt)")
    parser.add_argument("--hosts", type=_layout, default=(2, 1), help="hosts x workers on each (default 2x1)")
    parser.add_argument("--methods", type=comma_separated(_method), help="comma-separated (default: all)")
    parser.add_argument("--seeds", type=comma_separated(count(0)), default=(0, 1, 2), help="default 0,1,2")
    parser.add_argument(
        "--networks",
        type=comma_separated(Link.parse),
        default=LINKS,
        help=f"RATE/RTT, comma-separated (default {','.join(map(str, LINKS))})",
    )
    parser.add_argument("--steps", type=count(), help="of training (default: the model's, 600 for gpt)")
    parser.add_argument(
        "--learning-rate", type=positive, help="at the end of its warm-up (default: the model's, 0.001 for gpt)"
    )
    parser.add_argument(
        "--parts",
        type=comma_separated(one_of(PARTS)),
        default=("losses", "steps"),
        help="what is to be done: losses, steps, or none (default losses,steps)",
    )
    parser.add_argument("--rounds", type=count(), default=5, help="turns of each method (default 5)")
    parser.add_argument("--at-once", type=count(), default=10, help="methods in one set of processes (default 10)")
    parser.add_argument(
        "--measure",
        type=comma_separated(_place),
        default=(),
        metavar="METHOD@NETWORK,...",
        nargs="?",
        const=tuple(map(_place, MEASURED)),
        help=f"train these for real, with the first seed, and compare; by itself: {', '.join(MEASURED)}",
    )
    parser.add_argument(
        "--records", type=Path, default=Path("build/scoreboard"), help="folder of records (default build/scoreboard)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the records that are there")
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], help="take results, or folders of records, of others too"
    )
    parser.add_argument(
        "--losses", type=Path, nargs="+", default=[], help="take the losses of these results, whatever their machine"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps, only to see that it works")
    parser.add_argument("--theme", help="first part of the result files' names (default: of what is trained)")
    driver.add_options(parser, timed=True)
    return parser, parser.parse_args()


if __name__ == "__main__":
    driver.leave(main)
