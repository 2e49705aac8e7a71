"""What requantising partial sums costs: vNMSE of an all-reduce against the number of workers (DynamiQ, figures 10, 11).

    python -m benchmarks.hops --out benchmarks/results

``thc`` and ``omnireduce`` have collectives of their own, and the same line in every panel. Of codecs that adapt to what
they have summed, some sums of the same values come first. The workers are threads of this process and send what
processes would. vNMSE is the squared error of the sum over the squared norm of the exact sum, of one all-reduce without
error feedback. Every result is a function of the arguments alone. Needs no quiet machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import fusionlayer as fl
from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from fusionlayer.cli import drawing
from fusionlayer.codecs import Codec
from fusionlayer.codecs.omnireduce import OmniReduce
from fusionlayer.transport import local

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DATA", "METHODS", "Method", "error", "gaussian", "main", "method_error", "picture", "skewed"]

ELEMENTS = 1 << 18
WORLDS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ALGORITHMS = ("ring", "butterfly", "two_shot")
SUMS = 24
"""All-reduces before the one that counts, for codecs that adapt to what they have seen."""


@dataclass(frozen=True)
class Method:
    """A codec with its options, and the collective that it needs in place of any other."""

    codec: str
    options: dict[str, Any] = field(default_factory=dict)
    algorithm: str | None = None

    def make(self) -> Codec:
        """Return the codec, which has seen nothing yet."""
        return fl.codecs.get(self.codec, **self.options).bare


METHODS = {
    "bf16": Method("bf16"),
    "int8": Method("int8"),
    "int4": Method("int4"),
    "mxfp8": Method("mxfp8"),
    "mxfp8 agreed": Method("mxfp8", {"scale": "auto"}),
    "mxfp6": Method("mxfp6", {"format": "e3m2"}),
    "mxfp4": Method("mxfp4"),
    "taco": Method("taco"),
    "thc": Method("thc", {}, "integer_sum"),
    "omnireduce": Method("omnireduce", {}, "omnireduce"),
    "dynamiq": Method("dynamiq"),
}
SHOWN = ("int4", "mxfp4", "mxfp8", "taco", "dynamiq", "int8")
"""The methods that the picture names, all others are grey; six lines can be told apart."""
RUN, GROUP = 256, 16


def gaussian(workers: int, numel: int = ELEMENTS) -> list[Tensor]:
    """Return each worker's (numel,) of N(0, 0.02^2), independent of the others', in bf16's precision."""
    rng = torch.Generator().manual_seed(9)
    return [(0.02 * torch.randn(numel, generator=rng)).bfloat16().float() for _ in range(workers)]


def skewed(workers: int, numel: int = ELEMENTS) -> list[Tensor]:
    """Return each worker's (numel,) like gradients of a trained model, in bf16's precision.

    Values have tails (Student's t, 6 degrees). Their size wanders over runs of 256, jitters over groups of 16, and is
    orders of magnitude smaller in three tenths of the runs, which lie together. Half of the variance is common to all
    workers, and each run has a small mean of its own.
    """
    rng = torch.Generator().manual_seed(2)
    runs = numel // RUN
    cold = _wandering(runs, 0.995, rng)
    threshold = cold.quantile(0.3)
    size = 1.2 * _wandering(runs, 0.97, rng)
    size -= torch.where(cold < threshold, 3.5 + threshold - cold, 0.0)
    jitter = 0.35 * torch.randn(numel // GROUP, generator=rng)
    scale = 1e-3 * torch.exp(size.repeat_interleave(RUN) + jitter.repeat_interleave(GROUP))
    mean = 0.05e-3 * (torch.exp(size) * torch.randn(runs, generator=rng)).repeat_interleave(RUN)
    common = _heavy_tailed(numel, rng)
    every = []
    for _ in range(workers):
        own = _heavy_tailed(numel, rng)
        every.append((scale * 0.5**0.5 * (common + own) + mean).bfloat16().float())
    return every


def _wandering(numel: int, memory: float, rng: torch.Generator) -> Tensor:
    """Return (numel,) of variance 1 of which each is ``memory`` of the one before."""
    values, value = [], 0.0
    for step in torch.randn(numel, generator=rng, dtype=torch.float64).tolist():
        value = memory * value + (1 - memory**2) ** 0.5 * step
        values.append(value)
    return torch.tensor(values)


def _heavy_tailed(numel: int, rng: torch.Generator, freedom: int = 6) -> Tensor:
    """Return (numel,) of Student's t distribution."""
    squares = torch.randn(freedom, numel, generator=rng).square().sum(0)
    return torch.randn(numel, generator=rng) / (squares / freedom).sqrt()


DATA: dict[str, Callable[[int, int], list[Tensor]]] = {"gaussian": gaussian, "skewed": skewed}


def error(algorithm: str, codec: Codec | Sequence[Codec], inputs: Sequence[Tensor]) -> float:
    """Return vNMSE of the sum of each worker's (n,) f32 by a collective; ``codec`` of all, or one for each."""
    reduce = fl.collectives.get(algorithm)
    each = [codec] * len(inputs) if isinstance(codec, Codec) else codec

    def worker(rank: int) -> Tensor | None:
        transport = local.current()
        assert transport is not None
        x = inputs[rank].clone()
        reduce(x, each[rank].bare, transport, seed=1)
        return x if rank == 0 else None  # all have the same bits

    result = local.run(worker, len(inputs))[0]
    assert result is not None
    exact = torch.zeros_like(result, dtype=torch.float64)
    for x in inputs:
        exact += x
    return float((result - exact).square().sum() / exact.square().sum())


def method_error(method: Method, algorithm: str, inputs: Sequence[Tensor]) -> float:
    """Return ``error`` of a method by ``algorithm``, or by its own, once it has adapted itself to these inputs."""
    algorithm = method.algorithm or algorithm
    each = [method.make() for _ in inputs]  # what they keep of sums is each worker's own
    if method.codec == "omnireduce":
        for _ in range(SUMS):
            adapt(each, inputs)
    elif method.options.get("scale") == "auto":
        for _ in range(SUMS // 8):
            error(algorithm, each, inputs)
    return error(algorithm, each, inputs)


def adapt(each: Sequence[Codec], inputs: Sequence[Tensor]) -> None:
    """Do to the shares of these codecs what a sum of ``inputs`` does to them."""
    first, *others = (codec for codec in each if isinstance(codec, OmniReduce))
    wanted = first.travelling(inputs[0].numel())
    count = first.share.select(wanted, len(inputs))
    union = torch.cat([first.select(x, count) for x in inputs]).unique()
    first.share.adapt(wanted, len(union))
    for codec in others:
        codec.share.value = first.share.value


def measure(numel: int, worlds: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each kind of data, collective, codec and number of workers."""
    rows: list[dict[str, Any]] = []
    for data, make in DATA.items():
        inputs = make(max(worlds), numel)
        for algorithm in ALGORITHMS:
            for name, method in METHODS.items():
                codec = method.make()
                bits = 8 * sum(section.plane.nbytes for section in codec.bare.wire(numel).sections) / numel
                row = {"data": data, "algorithm": algorithm, "codec": name, "bits": round(bits, 3)}
                if method.algorithm and algorithm != ALGORITHMS[0]:
                    continue
                row["algorithm"] = method.algorithm or algorithm
                rows += [
                    row | {"workers": world, "vNMSE": float(f"{method_error(method, algorithm, inputs[:world]):.4g}")}
                    for world in worlds
                ]
    return rows


def by_workers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with a column for each number of workers."""
    shown: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["data"], row["algorithm"], row["codec"]
        line = shown.setdefault(key, {name: row[name] for name in ("data", "algorithm", "codec", "bits")})
        line[str(row["workers"])] = f"{row['vNMSE']:.2e}"
    return list(shown.values())


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """Return vNMSE against the number of workers: a panel for each kind of data and collective, a line for a codec."""
    figure = drawing.figure(10, 5.6)
    panels = figure.subplots(len(DATA), len(ALGORITHMS), sharex=True, sharey=True)
    worlds = sorted({row["workers"] for row in rows})
    for line, data in zip(panels, DATA, strict=True):
        for axes, algorithm in zip(line, ALGORITHMS, strict=True):
            for name in sorted(METHODS, key=(*SHOWN, *METHODS).index, reverse=True):
                way = METHODS[name].algorithm or algorithm
                mine = [r for r in rows if (r["data"], r["algorithm"], r["codec"]) == (data, way, name)]
                x, y = [r["workers"] for r in mine], [r["vNMSE"] for r in mine]
                if name in SHOWN:
                    label = f"{name}, {mine[0]['bits']:g} bits"
                    axes.plot(x, y, color=drawing.PALETTE[SHOWN.index(name)], label=label)
                else:
                    axes.plot(x, y, color=drawing.GREY, linewidth=0.7)
            axes.set(title=f"{algorithm}, {data}", xscale="log", yscale="log")
            axes.grid(axis="y")
            axes.set_xticks([world for world in worlds if world & (world - 1) == 0])
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        line[0].set_ylabel("squared error of the sum\nover its squared norm")
        drawing.name_lines(line[-1])
    for axes in panels[-1]:
        axes.set_xlabel("workers")
    title = "Error of an all-reduce by number of workers (grey: other methods)"
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write its result files and its picture."""
    parser = driver.make_parser("hops", __doc__)
    parser.add_argument("--numel", type=int, default=ELEMENTS, help="elements of each tensor; a multiple of 256")
    parser.add_argument("--worlds", type=comma_separated(count(2)), default=WORLDS, help="numbers of workers")
    driver.add_options(parser)
    args = parser.parse_args(arguments)
    if args.numel < RUN or args.numel % RUN:
        parser.error(f"--numel {args.numel}: expected a multiple of {RUN}")
    rows = measure(args.numel, args.worlds)
    title = f"vNMSE of an all-reduce by number of workers, {args.numel} elements"
    shown = by_workers(rows)
    driver.finish(args, "hops", title, driver.begin(args), rows, shown, pictures={"hops": lambda: picture(rows)})
    return 0


if __name__ == "__main__":
    driver.leave(main)
