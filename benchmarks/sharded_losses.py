"""What compressing FSDP2's weights and gradients does to a model's loss: Table 1 and Figure 6 of SDP4Bit.

    python -m benchmarks.sharded_losses [--steps 600] [--seeds 1] [--out benchmarks/results]

``examples/train_fsdp.py`` trains on Python's standard library on two nodes of two ranks, from the same weights and with
the same data each time; blocks compute in bf16, and uncompressed gradients are f32. Needs no quiet machine. With
``--out`` results are written after each run, and drawn at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import driver
from benchmarks.arguments import comma_separated, count, one_of
from benchmarks.report import write
from fusionlayer.cli import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["VARIANTS", "curves", "main", "summarize"]

ROOT = Path(__file__).parents[1]
BASELINE = "uncompressed"

VARIANTS: dict[str, tuple[str, str]] = {
    BASELINE: ("none", "none"),
    "qwd": ("qwd", "none"),
    "qw": ("qw", "none"),
    "tlq_hs": ("none", "tlq_hs"),
    "tlq": ("none", "tlq"),
    "ulq": ("none", "ulq"),
    "sdp4bit": ("qwd", "tlq_hs"),
    "qw + tlq_hs": ("qw", "tlq_hs"),
    "qw + ulq": ("qw", "ulq"),
    "zero++": ("qwz", "qgz"),
}
"""By name: what weights and what gradients travel as."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("sharded_losses", __doc__)
    parser.add_argument(
        "--variants",
        type=comma_separated(one_of(list(VARIANTS))),
        default=tuple(VARIANTS),
        help=f"of {', '.join(VARIANTS)} (all)",
    )
    parser.add_argument("--steps", type=count(), default=600, help="of training (600)")
    parser.add_argument("--seeds", type=count(), default=1, help="number of seeds, from 0 on (1)")
    parser.add_argument("--batch-size", type=count(), default=8, help="pieces of text per rank and step (8)")
    parser.add_argument("--width", type=count(), default=128, help="of the model (128)")
    parser.add_argument("--layers", type=count(), default=4, help="of the model (4)")
    driver.add_options(parser)
    options = parser.parse_args(arguments)
    environment = driver.begin(options)
    title = (
        f"Loss under FSDP2, 2 nodes of 2 ranks: GPT of width {options.width} and {options.layers} layers, "
        f"{options.steps} steps, batches of {options.batch_size}"
    )
    found: list[dict[str, Any]] = []
    runs = [(seed, name) for seed in range(options.seeds) for name in options.variants]
    for seed, name in driver.follow("benchmarks.sharded_losses", runs, "seed {0[0]}, {0[1]}".format):
        result = _train(VARIANTS[name], seed, options)
        if result is None:
            return 1
        kept = ("train_loss", "validation_loss", "validation_losses", "payload_per_step", "replicas_identical")
        found.append({"variant": name, "seed": seed} | {key: result[key] for key in kept})
        if options.out:  # runs are long: what is there is kept
            write(options.out, "sharded-losses", title, environment, found, summarize(found))
    pictures = {"sharded-losses": lambda: curves(found, title)}
    driver.finish(options, "sharded-losses", title, environment, found, summarize(found), pictures=pictures)
    return 0


def _train(variant: tuple[str, str], seed: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return what the example has said; None if it failed, which it has said on stderr."""
    weights, gradients = variant
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        said = {
            **{"weights": weights, "gradients": gradients, "nodes": 2, "seed": seed, "steps": options.steps},
            **{"batch-size": options.batch_size, "width": options.width, "layers": options.layers},
            **{"validate-every": max(1, options.steps // 12), "json": path},
        }
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        words = [word for key, value in said.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", *launcher, "examples/train_fsdp.py", *words]
        if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            return None
        trained: dict[str, Any] = json.loads(path.read_text())
        return trained


def summarize(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each variant: mean losses over seeds, and validation loss against that of the same seeds."""
    plain = {row["seed"]: row["validation_loss"] for row in found if row["variant"] == BASELINE}
    lines = []
    for name in dict.fromkeys(row["variant"] for row in found):
        rows = [row for row in found if row["variant"] == name]
        against = [row["validation_loss"] / plain[row["seed"]] - 1 for row in rows if row["seed"] in plain]
        weights, gradients = VARIANTS[name]
        lines.append(
            {
                "variant": name,
                "weights": weights,
                "gradients": gradients,
                "seeds": len(rows),
                "training loss": f"{statistics.fmean(row['train_loss'] for row in rows):.4f}",
                "validation loss": f"{statistics.fmean(row['validation_loss'] for row in rows):.4f}",
                "against uncompressed": f"{statistics.fmean(against):+.2%}" if against and name != BASELINE else "",
                "replicas": "identical" if all(row["replicas_identical"] for row in rows) else "DIFFERENT",
            }
        )
    return lines


def curves(found: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Return validation loss against steps, the mean over seeds, a line for each variant."""
    figure = drawing.figure(7.5, 3.4)
    axes = figure.subplots()
    for place, name in enumerate(dict.fromkeys(row["variant"] for row in found)):
        runs = [row["validation_losses"] for row in found if row["variant"] == name]
        steps = [step for step, _ in runs[0]]
        losses = [statistics.fmean(run[i][1] for run in runs) for i in range(len(steps))]
        colour = drawing.GREY if name == BASELINE else drawing.PALETTE[place % len(drawing.PALETTE)]
        axes.plot(steps, losses, label=f"{name}, {losses[-1]:.3f} at the end", color=colour)
    axes.set(xlabel="steps of training", ylabel="validation loss, mean over seeds", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    figure.suptitle(title, x=0.01, ha="left")
    drawing.name_lines(axes)
    return figure


if __name__ == "__main__":
    driver.leave(main)
