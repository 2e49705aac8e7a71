"""What a sum costs between hosts whose links have unequal rates: by equal shares, and by shares that follow the rates.

    python -m benchmarks.unequal [--rates 100mbit,100mbit,100mbit,50mbit] [--codecs int8,raw] [--out FOLDER]

Each host has a worker. The workers measure the rates of their links, and find the shares from that. Then all operations
take turns: steps of an engine that sums buckets of equal size by two_shot, two of which are under way at once, and
gloo's all_reduce of all at once. "seconds" is the median of the times until the last worker had its result. "the rates
allow" is the least time that any shares need: a rank with share w sends and receives 1 + (n - 2) w messages of the
whole tensor, and 1514 bytes of a frame carry 1448. "over that" is how much longer the median is; behind it stand the
shortest and the longest round. Every result is compared over the ranks, to the last bit; and by shares it must be that
of equal shares.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusionlayer as fl
from benchmarks import driver, lab_driver
from benchmarks.arguments import comma_separated, count, one_of
from benchmarks.lab import Network
from fusionlayer import context
from fusionlayer.cli import drawing
from fusionlayer.codecs import Codec
from fusionlayer.plan import TensorInfo
from fusionlayer.planning.rates import least_time, measure_rates, shares_of
from fusionlayer.scheduler import LANES, Engine, planners
from fusionlayer.transport import Transport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["main", "picture", "table"]

GLOO, EQUAL, BY_SHARES = "gloo all_reduce", "equal shares", "shares by rates"
FRAME = 1514 / 1448
"""Bytes of a full frame on the wire for each byte that TCP carries in it."""


def main() -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("unequal", __doc__)
    parser.add_argument(
        "--rates",
        type=comma_separated(str),
        default=("100mbit", "100mbit", "100mbit", "50mbit"),
        help="of each host's link (default 100mbit,100mbit,100mbit,50mbit)",
    )
    parser.add_argument("--rtt", help="of a round trip, such as 2ms (default: that of this machine)")
    parser.add_argument(
        "--codecs",
        type=comma_separated(one_of(fl.codecs.names())),
        default=("int8", "int4", "raw"),
        help="default int8,int4,raw",
    )
    parser.add_argument("--megabytes", type=count(), default=16, help="of f32 in a step (default 16)")
    parser.add_argument(
        "--buckets", type=comma_separated(count()), default=(4, 8, 16), help="of a step, each tried (default 4,8,16)"
    )
    parser.add_argument("--rounds", type=count(), default=7, help="default 7")
    parser.add_argument("--theme", help="first part of the result files' names (default: unequal-TRANSPORT)")
    parser.add_argument("--transport", choices=("c10d", "sockets"), default="c10d", help="default c10d")
    options = lab_driver.parse(parser, _work)
    if options is None:
        return 0
    if options.smoke:
        options.megabytes, options.rounds = 1, 2

    def make() -> Network:
        delay = None if options.rtt is None else f"{float(options.rtt.removesuffix('ms')) / 2:g}ms"
        return Network(len(options.rates), rates=options.rates, delay=delay)

    network, environment = lab_driver.begin(parser, options, make)
    job = {name: getattr(options, name) for name in ("codecs", "rounds", "transport", "buckets")}
    job["numel"] = options.megabytes << 18
    found = lab_driver.run("benchmarks.unequal", job, network, 600)
    rates = [network.rate_of(host) or 0.0 for host in range(network.hosts)]
    rows = table(found["rows"], rates)
    measured = ", ".join(f"{rate / 1e6:.1f}" for rate in found["measured"])
    title = (
        f"Sums of {options.megabytes} MB of f32 between hosts with links of {', '.join(options.rates)}, transport "
        f"{options.transport}; measured {measured} Mbit/s, shares {found['shares']}"
    )
    setting = {"rates": options.rates, "numel": job["numel"], "rtt": options.rtt}
    results = [{**setting, **shown, **row} for row, shown in zip(found["rows"], rows, strict=True)]
    theme = options.theme or f"unequal-{options.transport}"
    driver.finish(options, theme, title, environment, results, rows, pictures={theme: lambda: picture(results)})
    return 0


def table(rows: Sequence[Mapping[str, Any]], rates: Sequence[float]) -> list[dict[str, Any]]:
    """Return a line for each row, with what links of ``rates``, in bits per second, allow."""
    lines = []
    for row in rows:
        allowed = 8 * FRAME * row["message"] * least_time(rates)
        seconds = statistics.median(row["seconds"])
        lines.append(
            {
                "operation": row["operation"],
                "codec": row["codec"],
                "buckets": row["buckets"],
                "seconds": round(seconds, 3),
                "the rates allow": round(allowed, 3),
                "over that": f"{seconds / allowed - 1:.1%}",
                "rounds": f"{min(row['seconds']) / allowed - 1:.1%} to {max(row['seconds']) / allowed - 1:.1%}",
                "bits equal": row["equal"],
            }
        )
    return lines


def picture(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return how much longer than the rates allow each sum takes, as bars."""
    shown = sorted(rows, key=lambda row: (row["codec"], row["operation"] == BY_SHARES, row["buckets"]))
    figure = drawing.figure(7.0, 1.0 + 0.24 * len(shown))
    axes = figure.subplots()
    over = [100 * (statistics.median(row["seconds"]) / row["the rates allow"] - 1) for row in shown]
    colours = [drawing.PALETTE[0] if row["operation"] == BY_SHARES else drawing.GREY for row in shown]
    axes.barh(range(len(shown)), over, color=colours)
    words = [f"{row['operation']} {row['codec']}, {row['buckets']} buckets" for row in shown]
    axes.set_yticks(range(len(shown)), [text.replace(" , 1 buckets", ", f32") for text in words])
    axes.axvline(10, color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="per cent longer than the rates allow", xlim=(0, None))
    axes.invert_yaxis()
    figure.suptitle("With shares by rates, a host at half rate costs little more than it must", x=0.01, ha="left")
    return figure


def _work(job: Mapping[str, Any]) -> None:
    """Measure as one of the workers; rank 0 prints what was found as JSON."""
    fl.init(transport=job["transport"])
    transport = context.transport()
    measured = measure_rates(transport)
    shares = shares_of(measured) or (1,) * transport.size
    source = torch.randn(job["numel"], generator=torch.Generator().manual_seed(fl.rank()))
    calls: list[tuple[dict[str, Any], Callable[[Tensor], object]]] = []
    engines: list[Engine] = []
    for name in job["codecs"]:
        codec = fl.codecs.get(name).bare
        row = {"codec": name, "message": codec.wire(source.numel()).capacity}
        for buckets, (operation, given) in product(job["buckets"], ((EQUAL, ()), (BY_SHARES, shares))):
            engine = _engine(codec, transport, job["numel"], buckets, given)
            engines.append(engine)
            calls.append(({"operation": operation, **row, "buckets": buckets}, partial(_step, engine)))
    calls.append(({"operation": GLOO, "codec": "", "message": source.nbytes, "buckets": 1}, dist.all_reduce))
    of_equal: dict[tuple[str, int], bytes] = {}
    for row, call in calls:  # the first call of each opens windows, and is compared
        _, result = _turn(call, source)
        digest = hashlib.sha256(result.numpy().tobytes()).digest()
        told = torch.empty(fl.size(), len(digest), dtype=torch.uint8)
        transport.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), told)
        row["equal"] = (
            bool((told == told[0]).all()) and of_equal.setdefault((row["codec"], row["buckets"]), digest) == digest
        )
        row["seconds"] = []
    for number in range(job["rounds"]):
        for row, call in random.Random(number).sample(calls, len(calls)):
            seconds, _ = _turn(call, source)
            row["seconds"].append(seconds)
    if fl.rank() == 0:
        rows = [row for row, _ in calls]
        print(json.dumps({"measured": measured, "shares": shares, "rows": rows}), flush=True)
    dist.barrier()
    for engine in engines:
        engine.close()
    fl.shutdown()


def _engine(codec: Codec, transport: Transport, numel: int, buckets: int, shares: tuple[int, ...]) -> Engine:
    """Return an engine for so many tensors of ``numel`` elements together, each a bucket of its own."""
    lengths = [numel // buckets + (number < numel % buckets) for number in range(buckets)]
    return Engine(
        [TensorInfo(str(number), length, "float32", 4) for number, length in enumerate(lengths)],
        transport.duplicate(),
        codec=codec,
        algorithm="two_shot",
        planner=planners.get("wfbp"),
        device=torch.device("cpu"),
        error_feedback=False,
        lanes=LANES,
        shares=shares,
    )


def _step(engine: Engine, tensor: Tensor) -> None:
    for number, part in enumerate(tensor.tensor_split(len(engine.due))):
        engine.submit(str(number), part)
    engine.synchronize()


def _turn(call: Callable[[Tensor], object], source: Tensor) -> tuple[float, Tensor]:
    """Return the seconds until the last worker had its result, and the result."""
    tensor = source.clone()
    dist.barrier()
    start = time.perf_counter()
    call(tensor)
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), tensor


if __name__ == "__main__":
    driver.leave(main)
