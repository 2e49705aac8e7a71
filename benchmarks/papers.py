"""What systems that bear a paper's name do by themselves, beside what they did before and what the paper says.

    python -m benchmarks.papers --out benchmarks/results

Errors are squared errors over squared norms of one sum (vNMSE), of workers that are threads of this process, without
error feedback. Every figure is a function of the arguments alone. Needs no quiet machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusionlayer as fl
from benchmarks import driver, dynamiq, errors, hops
from benchmarks.arguments import comma_separated, one_of
from fusionlayer.codecs import Codec, Part, PartsCodec
from fusionlayer.codecs._sparse import Sparsifier
from fusionlayer.collectives import halves
from fusionlayer.integrations.weights import NAMES, PRESETS, Weights
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.cost_model import AlphaBeta
from fusionlayer.planning.plans import make_plan
from fusionlayer.planning.prediction import predict_plan
from fusionlayer.planning.profile import Profile
from fusionlayer.planning.zipped_costs import expected_costs
from fusionlayer.transport import local

__all__ = ["TOPICS", "main", "plain_taco"]

WORKERS = 8
DENSITY = 0.01
PROFILE = Path(__file__).parents[1] / "profiles/gpt_amd-epyc-zen-5_2026-11-21.yaml"

Row = dict[str, Any]


def collectives(numel: int) -> list[Row]:
    """Return the errors of sums by the usual collective, and by the one that a codec takes by itself."""
    inputs = hops.skewed(WORKERS, numel)
    rows = []
    for name, published in (("dynamiq", "0.00067 in a butterfly (table 5)"), ("thc", ""), ("omnireduce", "")):
        own = fl.collectives.choose(fl.codecs.get(name), WORKERS)
        found = {how: hops.method_error(hops.Method(name), how, inputs) for how in ("two_shot", own)}
        rows.append(_row(f"{name}, {WORKERS} workers", "two_shot", found["two_shot"], own, found[own], published))
    return rows


def rounding(numel: int) -> list[Row]:
    """Return the errors of gradients on two nodes of four workers, with ``ulq`` and as the preset of ZeRO++ has it."""
    inputs = list(errors.gaussian(numel * WORKERS).view(WORKERS, -1))
    name = PRESETS["zero++"][1]
    before, now = (_lost_on_two_nodes(fl.codecs.get(each), inputs, scattered=False) for each in ("ulq", name))
    return [_row("zero++, gradients", "ulq", before, name, now, "")]


def _lost_on_two_nodes(codec: Codec, inputs: Sequence[Tensor], *, scattered: bool) -> float:
    """Return the vNMSE of a sum over two nodes: each worker gets its part, or if not ``scattered`` all of it."""
    exact = torch.stack(list(inputs)).double().sum(0)

    def worker(rank: int) -> Tensor:
        transport, x = local.current(), inputs[rank].clone()
        assert transport is not None
        if not scattered:
            fl.collectives.get("two_level")(x, codec.bare, transport, seed=1)
            return x.view(WORKERS, -1)[rank]
        rows = x.view(WORKERS, -1)
        own = torch.empty_like(rows[0])
        halves.reduce_scatter(rows, own, codec.bare, transport, seed=1)
        return own

    result = torch.cat(local.run(worker, WORKERS, ranks_per_node=WORKERS // 2))
    return float((result - exact).square().sum() / exact.square().sum())


def sdp4bit(numel: int) -> list[Row]:
    """Return what SDP4Bit's ways lose, and what its table 1 has for them: weights of themselves, gradients of sums.

    The weights' difference is that of a step of Adam at a learning rate of 1e-3 of weights of size 0.02.
    """
    weights = errors.gaussian(numel)
    step = 3e-4 * torch.randn(numel, generator=torch.Generator().manual_seed(3)).clamp(-3, 3)
    outlying = list(errors.tensor_parallel(numel * WORKERS).view(WORKERS, -1))
    published = {"qw": "2.573", "qwd": "2.293", "ulq": "", "tlq": "2.305", "tlq_hs": "2.295"}
    rows: list[Row] = []
    for name, loss in published.items():
        if name in NAMES:
            way = Weights.of(name)
            sent = step if way.differences else weights
            lost = errors.error(way.codec, sent) * float(sent.square().sum() / weights.square().sum())
        else:
            lost = _lost_on_two_nodes(fl.codecs.get(name), outlying, scattered=True)
        rows.append({"what": name, "vNMSE": float(f"{lost:.3g}"), "published loss, 2.294 uncompressed": loss})
    return rows


def counts(numel: int) -> list[Row]:
    """Return how many elements sparsifiers send, in shares of k, with guard rails and without."""
    rng = torch.Generator().manual_seed(17)
    normal = torch.randn(numel, generator=rng)
    values = {
        "normal": normal,
        "Laplace": normal.sign() * -torch.rand(numel, generator=rng).clamp_min(1e-12).log(),
        "Student-t(3)": normal / torch.randn(3, numel, generator=rng).square().mean(0).sqrt(),
    }
    published = {"gaussiank normal": "0.99", "gaussiank Laplace": "1.67", "redsync normal": "1 to 2"}

    def share(x: Tensor, name: str, **options: object) -> float:
        codec = fl.codecs.get(name, density=DENSITY, **options).bare
        assert isinstance(codec, Sparsifier)
        return codec.pairs(codec.compress(x), numel) / codec.target(numel)

    rows = []
    for name in ("gaussiank", "redsync", "redsync_trim"):
        for shape, x in values.items():
            before, now = share(x, name, guarded=True, slack=1.1), share(x, name)
            by_rule = "1.00" if name == "redsync_trim" else published.get(f"{name} {shape}", "")
            rows.append(_row(f"{name}, {shape}: of k", "guarded", before, "by rule", now, by_rule))
    return rows


def plain_taco(x: Tensor, *, rotated: bool, tau: float = 0.0, scaled: bool = False, block: int = 256) -> Tensor:
    """Return ``x`` (n,) as FP8 (E4M3) has it after the steps of TACO that are asked for, in torch's operations.

    Args:
        x: a multiple of ``block`` elements.
        rotated: by a Hadamard matrix.
        tau: each block is brought to this root mean square before; 0: to none.
        scaled: each block is brought to the range of the format afterwards.
        block: elements of a block.
    """
    matrix = torch.ones(1, 1)
    while rotated and len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    blocks = x.view(-1, block)
    alpha = tau / (blocks.square().mean(1, keepdim=True) + 1e-6).sqrt() if tau else torch.ones(1)
    values = blocks * alpha
    values = values @ matrix / block**0.5 if rotated else values
    scale = values.abs().amax(1, keepdim=True).clamp_min(1e-12) / 448 if scaled else torch.ones(1)
    values = (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    values = values @ matrix / block**0.5 if rotated else values
    return (values / alpha).view(-1)


def taco(numel: int) -> list[Row]:
    """Return TACO's ablation: the errors of FP8 in blocks of 256 with and without each of its steps."""
    variants: dict[str, Callable[[Tensor], Tensor]] = {
        "FP8, unscaled": partial(plain_taco, rotated=False),
        "Hadamard, unscaled": partial(plain_taco, rotated=True),
        "Hadamard and alpha, tau 448, no s": partial(plain_taco, rotated=True, tau=448.0),
        "Hadamard and alpha, tau 100, no s": partial(plain_taco, rotated=True, tau=100.0),
        "s alone": partial(plain_taco, rotated=False, scaled=True),
        "Hadamard and s": partial(plain_taco, rotated=True, scaled=True),
    }
    for scales in ("folded", "dual"):
        codec = fl.codecs.get("taco", scales=scales)
        variants[f"taco, {scales}"] = partial(_through, codec)
    rows = []
    for name, through in variants.items():
        row: Row = {"what": name}
        for data in ("gaussian", "tensor-parallel", "skewed"):
            x = errors.DATA[data](numel)
            row[data] = float(f"{float((through(x) - x).double().square().sum() / x.double().square().sum()):.3g}")
        rows.append(row)
    return rows


def _through(codec: Codec, x: Tensor) -> Tensor:
    return codec.decompress(codec.compress(x), x.shape)


def ladder(numel: int) -> list[Row]:
    """Return DynamiQ's table 6: the error of a ring at 4 bits as its ingredients are added, one after the other."""
    inputs = hops.skewed(WORKERS, numel)
    published = ["0.1207", "0.0664", "0.0130", "0.0092", "0.0059"]
    rows = []
    for rung, paper in enumerate(published):
        options = {"bits": 4, **dict.fromkeys(dynamiq.LADDER[rung:], False)}
        method = hops.Method("dynamiq", options)
        row: Row = {"what": f"+ {dynamiq.LADDER[rung - 1]}" if rung else "even levels, 4 bits each"}
        row["bits"] = dynamiq.bits_of(method, numel)
        row["vNMSE"] = float(f"{hops.error('ring', method.make(), inputs):.3g}")
        rows.append(row | {"published": paper})
    return rows


def plans(numel: int) -> list[Row]:
    """Return what SAFusion's schemes are predicted to wait, by the committed profile of a GPT; 8 workers, topk."""
    profile, codec = Profile.from_yaml(PROFILE), fl.codecs.get("topk").bare
    rows = []
    for rate in profile.links:
        row: Row = {"what": f"waiting at {rate}, ms"}
        for name in ("safusion_naive", "safusion_inter", "safusion_paper", "safusion"):
            if name in fl.planners.names():
                made = make_plan(profile, fl.planners.get(name), codec, Scenario(rate), WORKERS)
                row[name] = round(1e3 * predict_plan(profile, made, Scenario(rate)).waiting, 1)
        rows.append(row)
    return rows


def oktopk(numel: int) -> list[Row]:
    """Return what the rank that sends most sends in most sums of Ok-Topk, in k (P - 1) / P words, and calls of a sum.

    Where the sums that pass lie in one region, and where they lie in all. Before, regions and threshold were found in
    every sum, and every rank sent its sums that passed to all.
    """
    sums, k = 64, int(numel * DENSITY)
    even = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(WORKERS)]
    one_place = torch.zeros(WORKERS, numel)
    for rank, x in enumerate(one_place):
        for j in range(WORKERS):  # each selects as much in every region, and the large values lie in the first one
            x[j * numel // WORKERS + torch.arange(k // WORKERS) * WORKERS + rank] = 1.0 if j else 10.0

    def cost(inputs: Sequence[Tensor], **options: float) -> tuple[float, float]:
        def worker(rank: int) -> tuple[float, int]:
            transport = local.current()
            codec = fl.codecs.get("oktopk", density=DENSITY, **options).bare
            assert transport is not None and isinstance(codec, PartsCodec)
            whole = codec.for_parts([Part("", (numel,))])
            sent = []
            for step in range(sums):
                before, x = transport.bytes_sent, inputs[rank].clone()
                fl.collectives.get("oktopk")(x, whole, transport, seed=step)
                sent.append(transport.bytes_sent - before)
            return statistics.median(sent), transport.sequence

        found = local.run(worker, WORKERS)
        return max(sent for sent, _ in found) / (4 * k * (WORKERS - 1) / WORKERS), found[0][1] / sums

    rows = []
    for name, inputs in (("sums in one region", list(one_place)), ("sums in all regions", even)):
        was, now = cost(inputs, reuse=1, tau=1, balance=WORKERS), cost(inputs)
        shown = "4 to 6" if inputs is even else "at most 6"
        rows.append(_row(f"{name}: k (P - 1) / P words", "each sum anew", was[0], "oktopk", now[0], shown))
        rows.append(_row(f"{name}: calls of a sum", "each sum anew", was[1], "oktopk", now[1], ""))
    return rows


def qsdp(numel: int) -> list[Row]:
    """Return the errors of QSDP's weights and gradients; before, both were shifted, by the largest magnitude."""
    normal = errors.gaussian(numel)
    values = {"normal": normal, "of a norm, around 1": 1 + normal / 50}

    def by_largest(x: Tensor, bits: int) -> Tensor:
        groups = x.view(-1, 1024)
        step = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1.5)
        shift = (torch.rand(len(groups), 1, generator=torch.Generator().manual_seed(bits)) - 0.5) * step
        return (((groups - shift) / step).round() * step + shift).view(-1)

    def lost(found: Tensor, x: Tensor) -> float:
        return float((found - x).double().square().sum() / x.double().square().sum())

    rows = []
    for what, name, shapes in (("weights", "qsdp", list(values)), ("gradients", "qsdp_gradients", ["normal"])):
        for shape in shapes:
            for bits in (8, 4):
                x, codec = values[shape], fl.codecs.get(name, bits=bits)
                was, now = lost(by_largest(x, bits), x), lost(_through(codec, x), x)
                rows.append(_row(f"{what}, {shape}, {bits} bits", "by largest", was, name, now, ""))
    return rows


def switcher(numel: int) -> list[Row]:
    """Return from which size on a zipped reduce-scatter pays, by equations 6 and 7.

    Links are those of a profile; e is what ``zip`` leaves of normal values in bf16; encoding and decoding are taken to
    need 0.5 ns for a byte.

    Before, it had to beat rows that go straight to their owners. A library's ring takes a latency for each of its hops.
    """
    x, codec = errors.gaussian(numel).bfloat16(), fl.codecs.get("zip").bare
    left = codec.used_bytes(codec.compress(x), numel, x.dtype) / x.nbytes
    profile, others, rows = Profile.from_yaml(PROFILE), WORKERS - 1, []
    for rate in profile.links:
        costs = expected_costs(profile, Scenario(rate), WORKERS, "raw")["reduce_scatter"]
        costs = replace(costs, factor=left, codec=5e-10)
        hops_of_ring = AlphaBeta(others * costs.native.alpha, costs.native.beta)
        ring = replace(costs, native=hops_of_ring)
        for s in (1.0, 0.5):
            was, now = (each.zips_from(s) / 1e3 for each in (costs, ring))
            rows.append(_row(f"{rate}, s = {s:g}: zipped from, kB", "rows", was, "ring", now, ""))
    return rows


def _row(what: str, before: str, was: float, now: str, found: float, published: str) -> Row:
    """Return a row; ``before`` and ``now`` name the two ways whose figures are ``was`` and ``found``."""
    was, found = float(f"{was:.3g}"), float(f"{found:.3g}")
    return {"what": what, "before": before, "figure before": was, "now": now, "figure": found, "published": published}


TOPICS: dict[str, tuple[str, Callable[[int], list[Row]]]] = {
    "collectives": ("Codecs with a collective of their own: vNMSE of a sum of skewed values", collectives),
    "rounding": ("ZeRO++'s gradients on two nodes of four workers: vNMSE of a sum of normal values", rounding),
    "sdp4bit": ("SDP4Bit's weights; its gradients with outliers, two nodes of four workers: vNMSE", sdp4bit),
    "counts": (f"Elements that a threshold sends at density {DENSITY:g}", counts),
    "taco": ("TACO's steps, with E4M3 and blocks of 256: vNMSE", taco),
    "ladder": ("DynamiQ's table 6: vNMSE of a ring of 8 workers at 4 bits on skewed values, by ingredient", ladder),
    "oktopk": (
        f"Ok-Topk over {WORKERS} workers at density {DENSITY:g}: what the busiest rank sends",
        oktopk,
    ),
    "qsdp": ("QSDP's weights and gradients: vNMSE", qsdp),
    "switcher": (f"ZipCCL's switcher by the profile of a GPT, {WORKERS} workers", switcher),
    "plans": ("SAFusion's schemes by the profile of a GPT: predicted waiting of 8 workers with topk", plans),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write their result files."""
    parser = driver.make_parser("papers", __doc__)
    parser.add_argument(
        "--topics",
        type=comma_separated(one_of(list(TOPICS))),
        default=tuple(TOPICS),
        help=f"of {', '.join(TOPICS)} (all)",
    )
    parser.add_argument("--numel", type=int, default=1 << 18, help="elements of each tensor; a multiple of 4096")
    driver.add_options(parser)
    args = parser.parse_args(arguments)
    if args.numel < 4096 or args.numel % 4096:
        parser.error(f"--numel {args.numel}: expected a multiple of 4096")
    torch.set_num_threads(1)  # results do not depend on the number of cores
    environment = driver.begin(args)
    for topic in args.topics:
        title, measure = TOPICS[topic]
        driver.finish(args, f"papers-{topic}", title, environment, measure(args.numel))
    return 0


if __name__ == "__main__":
    driver.leave(main)
