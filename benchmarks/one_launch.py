"""Speed of sums in one launch, as a share of what copying memory reaches in the same run, on one CUDA device.

    python -m benchmarks.one_launch [--numel 67108864] [--out benchmarks/results]

Every rank is a stream of this process, and has its part of the device: kernels of several processes would take turns.
Ranks reach each other's memory within the device, which shows what the kernel costs. With ``host`` that memory lies in
pinned memory of the host, so that all ranks send and receive over the one PCIe link of the device: that stands in for
GPUs that reach each other over PCIe. There each rank's share of its own crosses the link too, and so do flags.

A row's share of copy is of the bytes that ranks at least read and write. Beside ``host`` rows stands how often faster
they are than the bytes of a sum of bf16 at the rate that copies reach on the link, both ways at once.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import driver
from benchmarks.report import Environment
from fusionlayer import codecs, native
from fusionlayer.base import libraries
from fusionlayer.base.libraries import MAX_PEERS
from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs import NativeCodec
from fusionlayer.collectives._base import split_evenly

CODECS = ("int4", "int8", "tlq_hs", "mxfp8", "mxfp4", "taco")
CALLS = 5
PATIENCE = 20.0
"""Seconds after which launches that wait for each other are ended."""


class Ranks:
    """Ranks of one process that sum ``numel`` elements, each on a stream and in memory of its own."""

    def __init__(self, size: int, codec: NativeCodec, x: Tensor, *, host: bool, feedback: bool) -> None:
        chunk = split_evenly(x.numel(), size, codec.block)
        warps = native.most_warps(x.device) // size // 8 * 8
        nbytes = native.two_shot_bytes(codec.core_spec(x.numel(), x.dtype), chunk, size, warps)
        where: dict[str, Any] = {"pin_memory": True} if host else {"device": x.device}
        self._memory = [torch.zeros(nbytes, dtype=torch.uint8, **where) for _ in range(size)]
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        memory = (ctypes.c_void_p * MAX_PEERS)(*[each.data_ptr() for each in self._memory])
        self._streams = [torch.cuda.Stream() for _ in range(size)]
        self.out = [torch.empty_like(x) for _ in range(size)]
        self._residuals = [torch.zeros_like(x, dtype=torch.float32) if feedback else None for _ in range(size)]
        # What Python does for a launch is done before: it would take longer than a launch of many ranks.
        self._launches = []
        for rank, (stream, out, residual) in enumerate(zip(self._streams, self.out, self._residuals, strict=True)):
            spec = codec.core_spec(x.numel(), x.dtype, derive_seed(0, rank, 0))
            tensors = x.data_ptr(), out.data_ptr(), None if residual is None else residual.data_ptr()
            peers = libraries.Peers(rank, size, warps, nbytes, memory, self._stop.data_ptr())
            given = spec, derive_seed(0, rank, 1), chunk, *tensors, peers, stream.cuda_stream
            self._launches.append(partial(libraries.cuda().fl_two_shot, *given))

    def sum(self, calls: int) -> float:
        """Let all ranks sum ``calls`` times; return the seconds of a call."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for stream in self._streams:
            stream.wait_event(begin)
        for _ in range(calls):
            for launch in self._launches:
                if status := launch():
                    raise RuntimeError(f"fl_two_shot: status {status}")
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        until = time.monotonic() + PATIENCE
        while not end.query():
            if time.monotonic() > until:
                self._stop.fill_(1)
                raise RuntimeError(f"{len(self._streams)} launches still wait for each other after {PATIENCE:.0f} s")
        return float(begin.elapsed_time(end)) / 1000 / calls


def check(ranks: Ranks, x: Tensor, codec: NativeCodec) -> None:
    """Raise unless all ranks have the same sum, near that of equal tensors."""
    size = len(ranks.out)
    if not all(torch.equal(ranks.out[0], other) for other in ranks.out[1:]):
        raise RuntimeError(f"{codec}: {size} ranks have different sums")
    part, wanted = ranks.out[0][:65536].double(), size * x[:65536].double()
    error = float((part - wanted).norm() / wanted.norm())
    if not error < 0.25:
        raise RuntimeError(f"{codec}: the sum of {size} ranks is off by {error:.3f} of its norm")


def copy_rate(x: Tensor, rounds: int) -> float:
    """Return the bytes that copying ``x`` within the device reads and writes in a second."""
    target = torch.empty_like(x)
    return 2 * x.nbytes / median(lambda: timed([lambda: target.copy_(x)]), rounds)


def link_rate(x: Tensor, rounds: int) -> float:
    """Return the bytes a second that cross the device's link each way, while as many cross it the other way."""
    there, back = (torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for _ in range(2))
    target = torch.empty_like(x)
    pair = [lambda: there.copy_(x, non_blocking=True), lambda: target.copy_(back, non_blocking=True)]
    return x.nbytes / median(lambda: timed(pair), rounds)


def timed(works: Sequence[Callable[[], object]], calls: int = CALLS) -> float:
    """Return the seconds that ``works`` take beside each other, each on a stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for work in works:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_event(begin)
            for _ in range(calls):
                work()
            last = torch.cuda.current_stream().record_event()
        torch.cuda.current_stream().wait_event(last)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / calls


def median(measure: Callable[[], float], rounds: int) -> float:
    """Return the median of ``rounds`` measurements, after one that is not counted."""
    return statistics.median([measure() for _ in range(rounds + 1)][1:])


def rows(args: argparse.Namespace, x: Tensor) -> Iterator[dict[str, object]]:
    """Yield a row for each number of ranks, codec and place of the memory."""
    copy, link = copy_rate(x, args.rounds), link_rate(x[: args.host_numel], args.rounds)
    print(f"copy {copy / 1e9:.0f} GB/s, link {link / 1e9:.1f} GB/s each way", file=sys.stderr)
    for dtype in (torch.float32, torch.bfloat16):
        for size in args.ranks:
            for host in (False, True):
                values = x[: args.host_numel if host else args.numel // size].to(dtype)
                for name in args.codecs:
                    for feedback in (False, True):
                        if feedback and (host or name not in ("int4", "int8") or dtype != torch.float32):
                            continue
                        codec = codecs.get(name).bare
                        assert isinstance(codec, NativeCodec)
                        ranks = Ranks(size, codec, values, host=host, feedback=feedback)
                        ranks.sum(1)
                        if not feedback:
                            check(ranks, values, codec)
                        seconds = median(lambda ranks=ranks: ranks.sum(CALLS), args.rounds)  # type: ignore[misc]
                        message = codec.wire(values.numel(), dtype).capacity
                        moved = size * (2 * values.nbytes + 4 * message + 2 * 4 * values.numel() * feedback)
                        dense = 2 * (size - 1) * 2 * values.numel() / link
                        yield {
                            "codec": name + " + feedback" * feedback,
                            "dtype": str(dtype).removeprefix("torch."),
                            "ranks": size,
                            "memory": "host" if host else "device",
                            "elements": values.numel(),
                            "us": round(seconds * 1e6, 1),
                            "of copy": "" if host else round(moved / seconds / copy, 3),
                            "link GB/s": round(2 * size * message / seconds / 1e9, 1) if host else "",
                            "of link": round(2 * size * message / seconds / link, 3) if host else "",
                            "times bf16": round(dense / seconds, 2) if host else "",
                        }


def main() -> int:
    """Run the benchmark, print its table and write its result files."""
    # Streams that share a queue could wait for each other for ever.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    parser = driver.make_parser("one_launch", __doc__)
    parser.add_argument("--numel", type=int, default=1 << 26, help="elements of all ranks together")
    parser.add_argument("--host-numel", type=int, default=1 << 23, help="elements of a rank whose memory is the host's")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--codecs", nargs="*", default=CODECS)
    driver.add_options(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.one_launch: needs a CUDA device, which torch does not see", file=sys.stderr)
        return 69
    x = torch.randn(args.numel, generator=torch.Generator().manual_seed(0)).cuda()
    table = list(rows(args, x))
    title = "Sums in one launch: ranks are streams of one device"
    driver.finish(args, "one-launch", title, Environment.here(x.device, args.hardware), table)
    return 0


if __name__ == "__main__":
    driver.leave(main)
