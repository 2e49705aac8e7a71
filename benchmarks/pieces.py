"""What it gives to send an activation in pieces: the all-reduce of tensor parallelism, by codec and piece size.

    python -m benchmarks.lab run --hosts 2 --rate 1gbit -- python -m benchmarks.pieces
    torchrun --nproc-per-node 2 -m benchmarks.pieces --codecs taco --mib 16

All variants take turns within each round, in one set of processes. A variant's time is that of the slowest rank; what
is shown is the median over rounds of its ratio to ``whole`` of the same codec, with quartiles, and of gloo's f32
all-reduce to it. Rank 0 prints the table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusionlayer as fl
from benchmarks.arguments import comma_separated, count, one_of
from benchmarks.report import table

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, on every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--codecs", type=comma_separated(one_of(fl.codecs.names())), default=("bf16", "taco"), help="(bf16,taco)"
    )
    parser.add_argument("--mib", type=comma_separated(count()), default=(4, 16), help="of the tensor, in f32 (4,16)")
    parser.add_argument(
        "--pieces", type=comma_separated(count(2)), default=(2, 4, 8, 16), help="number of pieces (2,4,8,16)"
    )
    parser.add_argument("--rounds", type=count(), default=10, help="(10)")
    options = parser.parse_args(arguments)
    fl.init()
    torch.set_num_threads(1)
    rows = [row for mib in options.mib for row in measure(mib << 20, options)]
    if fl.rank() == 0:
        print(table(f"All-reduce in pieces, {fl.size()} ranks", rows))
    fl.shutdown()


def measure(nbytes: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one size."""
    x = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(fl.rank()))
    copy = x.clone()
    variants: dict[tuple[str, int], Callable[[], object]] = {("gloo", 1): partial(_dense, x, copy)}
    for codec in options.codecs:
        for pieces in (1, *options.pieces):
            channel = fl.tensor_parallel.Channel(codec=codec, piece_bytes=-(-nbytes // pieces))
            variants[codec, pieces] = partial(channel.reduce, x)
    seconds: dict[tuple[str, int], list[float]] = {variant: [] for variant in variants}
    for turn in range(options.rounds + 1):
        for variant, run in variants.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if turn:  # the first is for warming up
                seconds[variant].append(slowest.item())
    return [_row(nbytes, codec, pieces, seconds) for codec, pieces in variants if codec != "gloo"]


def _dense(x: Tensor, copy: Tensor) -> None:
    copy.copy_(x)
    dist.all_reduce(copy)


def _row(nbytes: int, codec: str, pieces: int, seconds: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    mine = seconds[codec, pieces]
    to_whole = [a / b for a, b in zip(mine, seconds[codec, 1], strict=True)]
    to_gloo = [b / a for a, b in zip(mine, seconds["gloo", 1], strict=True)]
    low, middle, high = statistics.quantiles(to_whole, n=4) if len(to_whole) > 1 else to_whole * 3
    return {
        "MiB": nbytes >> 20,
        "codec": codec,
        "pieces": pieces,
        "MiB each": round(nbytes / pieces / (1 << 20), 2),
        "ms": f"{statistics.median(mine) * 1e3:.1f}",
        "of the time of whole": "" if pieces == 1 else f"{middle:.2f} ({low:.2f} to {high:.2f})",
        "faster than gloo f32": f"{statistics.median(to_gloo):.2f}x",
    }


if __name__ == "__main__":
    main(sys.argv[1:])
