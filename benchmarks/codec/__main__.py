"""Speed of every codec, as a share of what copying memory reaches in the same run.

    python -m benchmarks.codec [--device cuda] [--numel 16777216] [--codecs int8 int4] [--out benchmarks/results]

Rows of the sparse verbs have in addition how many times faster they are than ``torch.topk`` on the same elements
(``--no-sparse`` leaves them out).

One thread. Each round runs every row once, so that all of them see the same load; a row's share is the median over
rounds of its rate divided by the copy's in that round. On CUDA a codec and type has rounds of its own. Rates are bytes
read plus bytes written. On the CPU time is the process's own CPU time, on CUDA the time between two events around ten
calls: as a graph, so that it is that of kernels and not of the host, unless a call has to wait for the device. Rows of
lossless codecs have the ratio of a Gaussian's bytes to theirs.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

import fusionlayer as fl
from benchmarks import driver
from benchmarks.codec.rows import Row, change_rows, codec_rows, dynamiq_rows, sparse_rows, two_level_rows
from fusionlayer.base import libraries
from fusionlayer.codecs import NativeCodec
from fusionlayer.process.clock import DeviceClock

Maker = Callable[[], Iterable["Row"]]
"""Makes the rows of a group: of a codec and type, or of what stands beside them."""


def _copy(target: Tensor, source: Tensor) -> Callable[[], object]:
    """Return the yardstick: libc's memcpy, or a copy from device memory to device memory."""
    if source.is_cuda:
        return partial(target.copy_, source)
    return partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), source.nbytes)


def measure(rows: list[Row], device: torch.device, rounds: int, until: float = math.inf) -> None:
    """Time every row once a round, after one that is not counted; after two, begin none when it is ``until``."""
    if device.type == "cuda":
        for row in rows:
            row.call = _repeated(row.call, row.waits)
    for n in driver.follow("benchmarks.codec", range(rounds + 1), "round {}".format):
        if n > 2 and time.monotonic() > until:
            break
        for row in rows:
            seconds = _cuda_seconds(row.call) if device.type == "cuda" else _cpu_seconds(row.call)
            if n:
                row.seconds.append(seconds)


def _cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


_CALLS = 10


def _repeated(call: Callable[[], object], waits: bool) -> Callable[[], object]:
    """Return what makes ``_CALLS`` calls on a GPU: a graph of them, unless they wait."""

    def calls() -> None:
        for _ in range(_CALLS):
            call()

    if waits:
        return calls
    calls()
    return DeviceClock(torch.device("cuda", torch.cuda.current_device())).replayed(calls)


def _cuda_seconds(calls: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    calls()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / _CALLS


def _groups(args: argparse.Namespace, x: Tensor) -> Iterator[tuple[str, Maker]]:
    """Yield each group's name and what makes its rows. On a GPU each is measured alone: it has not room for all."""
    for dtype in args.dtypes:
        values = x.to(getattr(torch, dtype))
        for name in args.codecs:
            yield f"{name}, {dtype}", partial(codec_rows, name, fl.codecs.get(name).bare, values)
            more = {"dynamiq": dynamiq_rows, "tlq_hs": two_level_rows, "delta": change_rows}
            if name in more:
                yield f"more of {name}, {dtype}", partial(more[name], values)
    if args.sparse:
        yield "sparse verbs", partial(sparse_rows, x)


def _all_of(groups: list[tuple[str, Maker]]) -> Iterator[Row]:
    for _, make in groups:
        yield from make()


def main() -> int:
    """Run the benchmark, print its table and write its result files; 1: on a GPU a group of rows could not be."""
    parser = driver.make_parser("codec", __doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--numel", type=int, default=16 << 20, help="elements; a multiple of 65536")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round after so many, but for two")
    parser.add_argument(
        "--codecs", nargs="*", help="names of codecs and presets; without it all, on a GPU those with kernels"
    )
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--isas", nargs="*", default=["auto"], help="instruction sets of the CPU to measure")
    parser.add_argument("--sparse", action=argparse.BooleanOptionalAction, default=True, help="rows of sparse verbs")
    driver.add_options(parser)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    if args.numel % 65536:
        parser.error(f"--numel {args.numel}: expected a multiple of 65536")
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: expected 2 or more, as rows have a spread")

    device = torch.device(args.device)
    torch.set_num_threads(1)
    libraries.set_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.numel, generator=generator).to(device)
    if args.codecs is None:  # what most sparsifiers and powersgd do beside kernels is not for one GPU's clock
        known = {name: fl.codecs.get(name).bare for name in fl.codecs.names()}
        args.codecs = [name for name, codec in known.items() if device.type == "cpu" or isinstance(codec, NativeCodec)]
    groups, results, failed = list(_groups(args, x)), [], False
    if device.type == "cpu":
        groups = [("all", partial(_all_of, groups))]
    for isa in args.isas if device.type == "cpu" else ["cuda"]:
        if device.type == "cpu":
            libraries.select_isa(isa)
            isa = libraries.isa()
        for number, (name, make) in enumerate(groups):
            target, now = torch.empty_like(x), time.monotonic()
            copy = Row("memcpy", "copy", "float32", 2 * x.nbytes, _copy(target, x))
            try:
                rows = [copy, *make()]
                measure(rows, device, args.rounds, now + (until - now) / (len(groups) - number))
            except (RuntimeError, fl.FusionLayerError) as error:
                if device.type == "cpu":
                    raise
                print(f"not measured: {name}: {error}", file=sys.stderr)
                failed = True
                continue
            topk = next((row for row in rows if row.name == "torch.topk"), None)
            beside = ("sparse", "torch.topk")
            results += [{"isa": isa, **row.result(copy, topk if row.name in beside else None)} for row in rows]
    environment = driver.begin(args, device=args.device)
    where = "one thread" if device.type == "cpu" else "one GPU"
    title = f"Codec speed: {args.numel} elements, {where}, {len(copy.seconds)} rounds"
    driver.finish(args, "codec" if device.type == "cpu" else "codec-gpu", title, environment, results)
    return int(failed)


if __name__ == "__main__":
    driver.leave(main)
