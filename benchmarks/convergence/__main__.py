"""Final validation loss of every method beside that of f32 gradients, with its spread over seeds.

    python -m benchmarks.convergence [--presets ddp,int8,int4] [--seeds 3] [--out benchmarks/results]
    python -m benchmarks.convergence --resume benchmarks/results/convergence-gpt-2x1-adamw_HARDWARE_DATE.json

Trains on this machine's loopback; how fast that is does not matter. A run is one method with one seed. With
``--out`` each one is in the result file as soon as it has ended; ``--resume`` with the same settings does what is
missing there.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from benchmarks.peers import PEERS
from benchmarks.report import Environment, result_path, table, write
from benchmarks.variants import Variant

from .running import train
from .settings import OPTIMIZERS, Settings, methods
from .summary import summarize
from .tasks import TASKS


def main() -> int:
    """Run the command line; return the exit status."""
    parser, options = _parse()
    settings = Settings(
        options.model,
        options.workers,
        options.batch_size,
        options.steps,
        options.learning_rate,
        options.every,
        options.optimizer,
    )
    environment = driver.begin(options)
    folder: Path | None = options.out
    rows: list[dict[str, Any]] = []
    if options.resume:
        try:
            rows, environment = _resume(options.resume, settings, environment)
        except ValueError as error:
            parser.error(str(error))
        folder = options.resume.parent
    elif folder and (path := result_path(folder, settings.theme, environment)).exists():
        parser.error(f"{path} exists; continue it with --resume {path}, or choose another --out")
    have = {(row["method"], row["seed"]) for row in rows}
    runs = [(m, s) for s in range(options.seeds) for m in options.presets if (m, s) not in have]
    failed = []
    try:
        for number, (method, seed) in enumerate(driver.follow("convergence", runs, "{0[0]}, seed {0[1]}".format), 1):
            label = f"[{number}/{len(runs)}] {method}, seed {seed}"
            losses = run(method, seed, settings, label)
            if losses is None:
                failed.append(f"{method}, seed {seed}")
                continue
            row = {"method": method, "seed": seed, "final": losses[-1][1], "losses": losses}
            rows.append({**row, "commit": environment.commit})
            if folder:
                write(folder, settings.theme, settings.title, environment, rows, summarize(rows))
    except KeyboardInterrupt:
        failed.append("interrupted")
    if rows:
        print(table(settings.title, summarize(rows)))
        print(environment)
    if failed:
        print(f"not all runs ended well: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(method: str, seed: int, settings: Settings, label: str) -> list[list[float]] | None:
    """Return (step, validation loss) pairs of one run, in order of steps; None if it failed, which stderr tells of.

    Args:
        method: one of ``methods()``.
        seed: of weights and data.
        settings: what is trained.
        label: what progress is told under, on stderr.
    """
    points = train(method, seed, settings, label)
    return points and [[point.step, point.loss] for point in points]


def _resume(path: Path, settings: Settings, environment: Environment) -> tuple[list[dict[str, Any]], Environment]:
    """Return the rows of an earlier result file, and ``environment`` as one that writes to that same file.

    Raises:
        ValueError: there is no such file, or its results were made in another way.
    """
    try:
        found = json.loads(path.read_text())
        title, rows, before = found["title"], list(found["rows"]), Environment(**found["environment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--resume {path}: no result file of this benchmark ({error}); start with --out") from error
    if title != settings.title:
        raise ValueError(f"--resume {path} has {title!r}, asked for is {settings.title!r}; give the same settings")
    for name in ("hardware", "torch"):
        if getattr(before, name) != getattr(environment, name):
            raise ValueError(
                f"--resume {path}: {name} was {getattr(before, name)!r} and is {getattr(environment, name)!r}; "
                "start anew with --out"
            )
    return rows, replace(environment, date=before.date)


def _method(name: str) -> str:
    try:
        if name not in PEERS:
            Variant.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    default = Settings()
    parser = driver.make_parser("convergence", __doc__)
    parser.add_argument(
        "--presets",
        type=comma_separated(_method),
        default=methods(),
        help="methods, comma-separated; a codec may have words behind it, as in dgc+behind+single "
        f"(default {','.join(methods())})",
    )
    parser.add_argument("--seeds", type=count(), default=3, help="number of seeds, from 0 on (default 3)")
    parser.add_argument("--model", choices=list(TASKS), default=default.model, help=f"default {default.model}")
    parser.add_argument(
        "--workers",
        type=count(2, min(task.pieces for task in TASKS.values())),
        default=default.workers,
        help="default 2",
    )
    parser.add_argument(
        "--batch-size", type=count(), default=default.batch_size, help="pieces of text per worker and step, default 2"
    )
    parser.add_argument("--steps", type=count(), default=default.steps, help=f"default {default.steps}")
    parser.add_argument(
        "--learning-rate", type=float, default=default.learning_rate, help=f"default {default.learning_rate:g}"
    )
    parser.add_argument(
        "--every", type=count(), default=default.every, help=f"steps between validations, default {default.every}"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=default.optimizer, help="default AdamW")
    parser.add_argument("--hardware", help="name of the machine in the file name")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--out", type=Path, help="folder for result files; without it nothing is written")
    target.add_argument("--resume", type=Path, metavar="FILE", help="a JSON result file to be completed")
    return parser, parser.parse_args()


if __name__ == "__main__":
    driver.leave(main)
