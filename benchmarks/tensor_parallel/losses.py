"""What compressing activations does to a model's loss: TACO's ablation (its section 5.2.2) on the example GPT.

    python -m benchmarks.tensor_parallel.losses --out benchmarks/results

``examples/train_tp.py`` trains on Python's standard library by each codec, tensor-parallel over two and over four
ranks, from the same weights and with the same data; losses are a function of the arguments and the machine's
instruction set. Needs no quiet machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from benchmarks.report import write

__all__ = ["VARIANTS", "main"]

ROOT = Path(__file__).parents[2]

VARIANTS: dict[str, tuple[str, ...]] = {
    "uncompressed": ("raw",),
    "taco": ("taco",),
    "taco, INT8": ("taco", "format=int8"),
    "taco, E5M2": ("taco", "format=e5m2"),
    "block scales alone": ("taco", "hadamard=false"),
    "one scale per tensor": ("fp8",),
    "one scale per tensor, E5M2": ("fp8", "format=e5m2"),
}
"""By what they are in the paper's ablation: codec and options of ``train_tp.py``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("tensor_parallel.losses", __doc__)
    parser.add_argument("--ranks", type=comma_separated(count(2)), default=(2, 4), help="numbers of ranks (2,4)")
    parser.add_argument("--steps", type=count(), default=400, help="of training (400)")
    parser.add_argument("--batch-size", type=count(), default=8, help="pieces of text (8)")
    parser.add_argument("--only", type=comma_separated(str), help=f"of {'; '.join(VARIANTS)}")
    driver.add_options(parser)
    options = parser.parse_args(arguments)
    chosen = {name: VARIANTS[name] for name in VARIANTS if not options.only or name in options.only}
    if options.only and set(options.only) - set(VARIANTS):
        parser.error(f"--only {','.join(options.only)}; choose from {', '.join(VARIANTS)}")
    environment = driver.begin(options)
    title = f"Loss by codec of activations: {options.steps} steps, batches of {options.batch_size}"
    found: list[dict[str, Any]] = []
    runs = [(ranks, name) for ranks in options.ranks for name in chosen]
    for ranks, name in driver.follow("benchmarks.tensor_parallel.losses", runs, "{0[0]} ranks, {0[1]}".format):
        variant = chosen[name]
        result = _train(ranks, variant, options.steps, options.batch_size)
        if result is None:
            return 1
        row = {"ranks": ranks, "variant": name, "codec": variant[0], "options": ", ".join(variant[1:])}
        kept = ("train_loss", "validation_loss", "bytes_per_step", "ranks_agree")
        found.append(row | {key: result[key] for key in kept})
        if options.out:  # runs are long: what is there is kept
            write(options.out, "tensor-parallel-losses", title, environment, found, _shown(found))
    driver.finish(options, "tensor-parallel-losses", title, environment, found, _shown(found))
    return 0


def _train(ranks: int, variant: Sequence[str], steps: int, batch: int) -> dict[str, Any] | None:
    """Return what the example has said; None if it failed, which it has said on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        sizes = ["--steps", str(steps), "--batch-size", str(batch), "--codec", variant[0], "--json", str(result)]
        extra = [word for option in variant[1:] for word in ("--codec-option", option)]
        command = [sys.executable, "-m", *launcher, "examples/train_tp.py", *sizes, *extra]
        if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            return None
        trained: dict[str, Any] = json.loads(result.read_text())
        return trained


def _shown(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table for people: losses, and validation loss against that without compression."""
    base = {row["ranks"]: row["validation_loss"] for row in found if row["codec"] == "raw"}
    rows = []
    for row in found:
        loss, raw = row["validation_loss"], base.get(row["ranks"])
        rows.append(
            {
                "ranks": row["ranks"],
                "variant": row["variant"],
                "codec": ", ".join(filter(None, (row["codec"], row["options"]))),
                "training loss": f"{row['train_loss']:.4f}",
                "validation loss": f"{loss:.4f}",
                "against uncompressed": "" if raw is None or row["codec"] == "raw" else f"{loss / raw - 1:+.2%}",
                "ranks agree": "yes" if row["ranks_agree"] else "NO",
            }
        )
    return rows


if __name__ == "__main__":
    driver.leave(main)
