"""All benchmarks of this machine, one after the other: results and pictures in one folder.

    python -m benchmarks.suite --out benchmarks/results
    python -m benchmarks.suite --smoke --out build/bench-smoke

Two cores that have nothing else to do take about half an hour; ``--smoke`` runs a little of everything in a minute,
whatever else the machine does, and its figures mean nothing. Benchmarks that need long runs of their own
(``benchmarks.scoreboard``) or a GPU are not among them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import driver
from benchmarks.quiet import refuse_if_busy

__all__ = ["commands", "main"]

TRAINING = (
    (  # overlap for some only: each method is a copy of the model in each worker
        *("--model", "gpt", "--hosts", "2", "--rates", "100mbit,1gbit", "--rounds", "6"),
        *(
            "--methods",
            "peers,raw,bf16,int8,int4,mxfp4,topk,dgc,sidco,dgc+wfbp,dgc+safusion,dgc+behind+single,"
            "auto,auto+fidelity=aggressive,raw+overlap,int8+overlap,int4+overlap,dgc+safusion+overlap",
        ),
    ),
    (
        *("--model", "gpt", "--hosts", "2", "--workers", "2", "--rates", "100mbit", "--rounds", "5"),
        *(
            "--methods",
            "ddp-tuned,ddp-powersgd,powersgd,int8,int4,dgc,dgc+wfbp,dgc+safusion_naive,dgc+safusion,auto+fidelity=aggressive,"
            "int8+overlap,int4+overlap",
        ),
    ),
    (  # Horovod's thread never rests: with four workers on two cores its rows would time the scheduler
        *("--model", "resnet", "--hosts", "4", "--rates", "100mbit,1gbit", "--rounds", "6"),
        *(
            "--methods",
            "ddp-tuned,ddp-fp16,ddp-bf16,ddp-powersgd,powersgd,raw,bf16,int8,int4,topk,dgc,dgc+safusion,int8+overlap,int4+overlap",
        ),
    ),
)
SMOKE_METHODS = "ddp-powersgd,int4,int4+overlap"
SMOKE_TRAINING = ("--model", "gpt-small", "--hosts", "2", "--methods", SMOKE_METHODS, "--rounds", "2")


def commands(smoke: bool, busy_ok: bool, out: Path) -> Iterator[tuple[str, ...]]:
    """Yield module and arguments of each part, the pictures last."""
    common = (*(("--busy-ok",) if busy_ok or smoke else ()), "--out", str(out))
    if smoke:
        yield ("benchmarks.training", *SMOKE_TRAINING, *common)
        yield ("benchmarks.collective", "--smoke", *common)
    else:
        for arguments in TRAINING:
            yield ("benchmarks.training", *arguments, *common)
        yield ("benchmarks.codec", "--out", str(out))
        yield ("benchmarks.collective", "--rounds", "3", "--codecs", "raw,bf16,int8,int4,topk", *common)
    results = sorted(map(str, out.glob("training*.json")))
    yield ("benchmarks.plots", *results, "--out", str(out / "plots"))


def main() -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("suite", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of results; pictures go into plots/ there")
    parser.add_argument("--smoke", action="store_true", help="a little of everything, only to see that it works")
    parser.add_argument("--busy-ok", action="store_true", help="measure while other work goes on; it is in the result")
    options = parser.parse_args()
    refuse_if_busy(options.busy_ok or options.smoke, 2)
    failed = []
    for part in commands(options.smoke, options.busy_ok, options.out):
        words = " ".join(part)
        print(f"==== {words}", file=sys.stderr, flush=True)
        start = time.monotonic()
        status = subprocess.run([sys.executable, "-m", *part], cwd=Path(__file__).parents[1]).returncode
        print(f"==== {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if status:
            failed.append(f"{words} (status {status})")
    for words in failed:
        print(f"failed: {words}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    driver.leave(main)
