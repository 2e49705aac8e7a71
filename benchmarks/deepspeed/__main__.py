"""DeepSpeed with its traffic compressed, beside DeepSpeed on gloo.

    python -m benchmarks.deepspeed steps --out benchmarks/results
    python -m benchmarks.deepspeed losses --out benchmarks/results

``steps``: two hosts with a rank each, links of 100 Mbit/s; seconds and bytes of a step. Each variant has processes of
its own, and they take turns: one start of each in every round. Ratios are those of a round's medians to the baseline's
of the same round. ``losses``: the validation loss of the example GPT after training, every variant from the same
weights and on the same data; it needs no quiet machine. Variants are those of ``variants.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import driver
from benchmarks.arguments import comma_separated, count, one_of
from benchmarks.lab import Network, launch, why_not
from benchmarks.quiet import pressure
from benchmarks.report import write
from benchmarks.training.summary import interval

from .variants import BASELINE, LIMITS, section

__all__ = ["main", "shown_losses", "shown_steps", "step_rows"]

ROOT = Path(__file__).parents[2]
KINDS = ("zero0", "zero1", "zero2", "zero3", "moe", "pipeline")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        for variant in options.variants:
            section(variant, options.kinds[0])
    except ValueError as error:
        _parser().error(f"--variants: {error}")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return _steps(options) if options.what == "steps" else _losses(options)


def _parser() -> argparse.ArgumentParser:
    parser = driver.make_parser("deepspeed", __doc__)
    parts = parser.add_subparsers(dest="what", required=True)
    kinds = comma_separated(one_of(KINDS))
    for name, chosen, variants, steps, batch in (
        ("steps", ("zero0", "zero2", "zero3"), (BASELINE, "int8", "int8 all", "int4", "zero++"), 4, 1),
        ("losses", ("zero0", "zero2", "zero3", "moe", "pipeline"), (BASELINE, "int8", "int4"), 300, 8),
    ):
        part = parts.add_parser(name)
        part.add_argument("--kinds", type=kinds, default=chosen, help=f"of {', '.join(KINDS)} ({','.join(chosen)})")
        part.add_argument("--variants", type=comma_separated(str), default=variants, help=f"({','.join(variants)})")
        part.add_argument("--steps", type=count(), default=steps, help=f"of each training ({steps})")
        part.add_argument("--batch", type=count(), default=batch, help=f"pieces of text for each rank ({batch})")
        driver.add_options(part, timed=name == "steps")
        if name == "losses":
            part.add_argument("--seeds", type=comma_separated(count(0)), default=(0,), help="of weights and data (0)")
            part.add_argument("--width", type=count(), default=128, help="of the model (128)")
            part.add_argument("--layers", type=count(), default=4, help="of the model (4)")
        else:
            part.add_argument("--rounds", type=count(), default=3, help="turns of each variant (3)")
            part.add_argument("--rate", default="100mbit", help="of the links (100mbit)")
            part.add_argument("--width", type=count(), default=384, help="of the model (384)")
            part.add_argument("--layers", type=count(), default=6, help="of the model (6)")
    return parser


# ---- steps -----------------------------------------------------------------------------------------------------------


def _steps(options: argparse.Namespace) -> int:
    try:
        network = Network(2, options.rate)
    except ValueError as error:
        _parser().error(str(error))
    if obstacle := why_not(network):
        _parser().error(f"needs network namespaces: {obstacle}")
    environment = driver.begin(options, 2)
    title = f"DeepSpeed steps at {options.rate}: 2 ranks, GPT of width {options.width} with {options.layers} layers"
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
    before = pressure()
    turns = [job for turn in range(options.rounds) for job in _jobs(options, seed=turn, warm=1, validate=False)]
    for kind, variant, job in driver.follow("benchmarks.deepspeed steps", turns, "{0[0]}, {0[1]}".format):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            worker = [sys.executable, "-m", "benchmarks.deepspeed.worker", job, str(result)]
            with launch(worker, network, timeout=900, stdout=subprocess.DEVNULL) as process:
                if process.wait():
                    return 1
            measured.setdefault((kind, variant), []).append(json.loads(result.read_text()))
    found = [{**row, "pressure": {"before": before, "after": pressure()}} for row in step_rows(measured)]
    driver.finish(options, "deepspeed-steps-2x1", title, environment, found, shown_steps(found))
    return 0


def step_rows(measured: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each kind and variant, with its ratios to the baseline of the same kind where there is one."""
    rows = []
    for (kind, variant), turns in measured.items():
        seconds = [statistics.median(turn["seconds"]) for turn in turns]
        sent = [statistics.median(turn["sent"]) for turn in turns]
        row: dict[str, Any] = {
            **{"kind": kind, "variant": variant, "seconds": statistics.median(seconds)},
            **{"sent": statistics.median(sent), "turns": list(turns)},
        }
        if base := measured.get((kind, BASELINE)):
            ratios = [statistics.median(theirs["seconds"]) / mine for theirs, mine in zip(base, seconds, strict=True)]
            low, high = interval(ratios)
            row["speedup"] = {"median": statistics.median(ratios), "low": low, "high": high}
            row["fewer_bytes"] = statistics.median(statistics.median(turn["sent"]) for turn in base) / row["sent"]
        rows.append(row)
    return rows


def shown_steps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table for people."""
    return [
        {
            "": row["kind"],
            "traffic": row["variant"],
            "step, ms": f"{1e3 * row['seconds']:.0f}",
            "MB sent by a host": f"{row['sent'] / 1e6:.2f}",
            "fewer bytes": f"{row['fewer_bytes']:.2f}x" if "fewer_bytes" in row else "",
            "faster": "{median:.2f} [{low:.2f}..{high:.2f}]".format(**row["speedup"]) if "speedup" in row else "",
        }
        for row in rows
    ]


# ---- losses ----------------------------------------------------------------------------------------------------------


def _losses(options: argparse.Namespace) -> int:
    environment = driver.begin(options)
    title = f"Losses under DeepSpeed: {options.steps} steps, 2 ranks, batches of {options.batch}"
    found: list[dict[str, Any]] = []
    runs = [(seed, *job) for seed in options.seeds for job in _jobs(options, seed=seed)]
    for seed, kind, variant, job in driver.follow("benchmarks.deepspeed losses", runs, "{0[1]}, {0[2]}".format):
        result = _train(job)
        if result is None:
            return 1
        row = {"kind": kind, "variant": variant, "seed": seed, "sent": statistics.median(result["sent"])}
        found.append({**row, **{key: result[key] for key in ("loss", "validation", "exempt")}})
        print(f"{kind}, {variant}: {result['validation']:.4f}", file=sys.stderr, flush=True)
        if options.out:  # runs are long: what is there is kept
            write(options.out, "deepspeed-losses", title, environment, found, shown_losses(found))
    driver.finish(options, "deepspeed-losses", title, environment, found, shown_losses(found))
    return 0


def _train(job: str) -> dict[str, Any] | None:
    """Return what the workers have measured; None if they failed, which they have said on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, "-m", *launcher, "-m", "benchmarks.deepspeed.worker", job, str(result)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not result.exists():  # what is written is whole; DeepSpeed's own end may fail
            print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
            return None
        trained: dict[str, Any] = json.loads(result.read_text())
        return trained


def shown_losses(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table for people: losses, and validation loss against that of the baseline."""
    base = {(row["kind"], row["seed"]): row["validation"] for row in rows if row["variant"] == BASELINE}
    shown = []
    for row in rows:
        theirs = base.get((row["kind"], row["seed"]))
        change = None if theirs is None or row["variant"] == BASELINE else row["validation"] / theirs - 1
        limit = None if change is None else LIMITS.get(row["variant"])
        verdict = "" if change is None or limit is None else f"{limit:.1%}: {'yes' if change <= limit else 'NO'}"
        shown.append(
            {
                "": row["kind"],
                "traffic": row["variant"],
                "seed": row["seed"],
                "training loss": f"{row['loss']:.4f}",
                "validation loss": f"{row['validation']:.4f}",
                f"against {BASELINE}": "" if change is None else f"{change:+.2%}",
                "within": verdict,
                "routers exempt": str(len(row["exempt"])) if row["exempt"] else "",
            }
        )
    return shown


# ---- both ------------------------------------------------------------------------------------------------------------


def _jobs(options: argparse.Namespace, **more: Any) -> Iterator[tuple[str, str, str]]:
    """Yield kind, variant, and the job as JSON."""
    shape = {"width": options.width, "layers": options.layers, "heads": max(1, options.width // 32)}
    for kind in options.kinds:
        for variant in options.variants:
            chosen = section(variant, kind)
            if kind == "zero0" and chosen is not None and ("weights" in chosen or "zero_plus_plus" in chosen):
                continue  # nobody sends weights
            job = {"kind": kind, "section": chosen, "steps": options.steps, "batch": options.batch, "shape": shape}
            yield kind, variant, json.dumps({**job, **more})


if __name__ == "__main__":
    driver.leave(main)
