"""Weights into inference: relays, the trainer's stall, and vLLM.

    python -m benchmarks.serve relays --out benchmarks/results
    python -m benchmarks.serve stall --out benchmarks/results
    build/vllm/bin/python -m benchmarks.serve vllm --out benchmarks/results

``relays``: seconds until the last of several followers shows a version, with and without relays, each on a host of its
own, and the bytes that the trainer's host has sent. ``stall``: seconds that ``publisher.step()`` takes on each of four
FSDP2 ranks, which publish their own rows over TCP, or are gathered by rank 0 for files. ``vllm``: a Llama with random
weights trains in bf16 and is served by vLLM, whose greedy answers are compared with those of the trainer's model;
seconds that requests wait while a version is loaded, and its bytes by layout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fusionlayer as fl
from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from benchmarks.lab import Network, launch
from benchmarks.publish import kept, len_of

__all__ = ["main", "summarize"]

_PATIENCE = 300.0
_RANKS = 4
_SECRET = "0123456789abcdef"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("serve", __doc__)
    parser.add_argument("part", choices=("relays", "stall", "vllm"))
    parser.add_argument("--followers", type=comma_separated(int), default=(1, 4, 16), help="of relays (1,4,16)")
    parser.add_argument("--rate", default="100mbit", help="of links, for relays (100mbit)")
    parser.add_argument("--versions", type=count(), default=5, help="measured of each (5)")
    parser.add_argument("--megabytes", type=count(), default=20, help="of weights in bf16, for relays and stall (20)")
    parser.add_argument("--lrs", type=comma_separated(float), default=(1e-3, 1e-4, 1e-5), help="for vllm")
    parser.add_argument("--width", type=count(), default=256, help="of the model, for vllm (256)")
    parser.add_argument("--worker", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--relays", action="store_true", help=argparse.SUPPRESS)
    driver.add_options(parser, timed=True)
    options = parser.parse_args(arguments)
    if options.worker:
        torch.set_num_threads(1)
        {"relays": relay, "stall": stall}[options.part](options)
        return 0
    environment = driver.begin(options, 2)
    given = [*(arguments or sys.argv[1:])]
    rows = serve(options) if options.part == "vllm" else measure(options, given)
    title = {
        "relays": f"{options.megabytes} MB of weights, 1 % of them changed, to followers over {options.rate}",
        "stall": f"{options.megabytes} MB of weights of {_RANKS} FSDP2 ranks: publisher.step() on the slowest",
        "vllm": f"A Llama of width {options.width} in vLLM on CPUs, which follows a trainer in bf16",
    }[options.part]
    driver.finish(options, f"serve-{options.part}", title, environment, rows, summarize(options.part, rows))
    return 0


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run the workers of each case, and return what they have written."""
    rows: list[dict[str, Any]] = []
    cases: list[tuple[Network, int, list[str]]] = [(Network(1, isolated=False), _RANKS, [])]
    if options.part == "relays":
        hosts = [(n, more) for n in options.followers for more in ([], ["--relays"])]
        cases = [(Network(n + 1, options.rate), 1, more) for n, more in hosts]
    for network, workers, more in cases:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.serve", *arguments, "--worker", folder, *more]
            with launch(command, network, workers=workers, stdout=sys.stderr.fileno()) as process:
                if process.wait():
                    raise SystemExit("a worker has failed")
            rows += json.loads((Path(folder) / "rows").read_text())
    return rows


def summarize(part: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line of medians for each case."""
    keys = {"relays": ("followers", "relays"), "stall": ("way",), "vllm": ("learning rate",)}[part]
    lines = []
    for case in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        found = [row for row in rows if tuple(row[key] for key in keys) == case]
        line = dict(zip(keys, case, strict=True), versions=len(found))
        for name in found[0].keys() - {*keys}:
            line[name] = f"{statistics.median(row[name] for row in found):.4g}"
        lines.append({key: line[key] for key in [*keys, "versions", *[name for name in found[0] if name not in keys]]})
    return lines


# ---- relays ---------------------------------------------------------------------------------------------------------


def relay(options: argparse.Namespace) -> None:
    """Be the trainer, or a follower on a host of its own."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = options.worker / "place"
    if rank:
        until(place.exists)
        serving = "tcp://0.0.0.0:0" if options.relays else None
        with fl.subscribe(place.read_text(), secret=_SECRET, relay=serving, name=f"{rank}", timeout=60) as follower:
            for version in range(options.versions + 1):
                while follower.version is None or follower.version < version:
                    follower.wait(_PATIENCE)
                (options.worker / f"{version}.{rank}").touch()
            until((options.worker / "rows").exists)
        return
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(options.megabytes * 500_000, generator=generator).bfloat16()}
    with fl.publish(weights, f"tcp://{os.environ['MASTER_ADDR']}:0", secret=_SECRET, timeout=60) as publisher:
        draft = options.worker / "draft"
        draft.write_text(publisher.address)
        draft.rename(place)
        until(lambda: publisher.followers == world - 1)
        rows = []
        for version in range(options.versions + 1):
            if version:
                moved = torch.randint(weights["w"].numel(), (weights["w"].numel() // 100,), generator=generator)
                weights["w"][moved] *= 1.01
            sent, start = sent_bytes(), time.monotonic()
            publisher.step()
            until(lambda: all((options.worker / f"{version}.{each}").exists() for each in range(1, world)))  # noqa: B023
            seconds = time.monotonic() - start
            if version:  # the first one is whole
                case = {"followers": world - 1, "relays": "yes" if options.relays else "no"}
                rows.append({**case, "last after, s": seconds, "trainer sent, MB": (sent_bytes() - sent) / 1e6})
        draft.write_text(json.dumps(rows))
        draft.rename(options.worker / "rows")


def sent_bytes() -> int:
    """Return what the interfaces of this host have sent, loopback left out."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if not line.strip().startswith("lo:"))


def until(condition: Any) -> None:
    """Return when something has come about."""
    end = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("another worker is gone")
        time.sleep(0.005)


# ---- the trainer's stall --------------------------------------------------------------------------------------------


def stall(options: argparse.Namespace) -> None:
    """Publish an FSDP2 model in both ways, and time ``step`` on each rank."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    width, layers = 512, max(1, options.megabytes * 1_000_000 // (512 * 512 * 2))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).bfloat16()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    rows = []
    for way, address in (
        ("gathered by rank 0", f"file://{options.worker}/versions"),
        ("own rows", "tcp://127.0.0.1:0"),
    ):
        with fl.publish(model, address) as publisher:
            for version in range(options.versions + 1):
                dist.barrier()
                start = time.perf_counter()
                publisher.step()
                seconds = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                publisher.flush(_PATIENCE)
                if version:
                    rows.append({"way": way, "step(), s": float(seconds)})
    if dist.get_rank() == 0:
        (options.worker / "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def serve(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train, publish and answer; return a row for each version."""
    from fusionlayer.frameworks import vllm
    from tests.integrations import test_vllm

    model = test_vllm.llama(options.width, layers=4).bfloat16().float()
    served = {name: x.detach().bfloat16() for name, x in model.state_dict().items()}
    twin = test_vllm.llama(options.width, layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, fl.publish(served, "tcp://127.0.0.1:0") as publisher:
        llm = test_vllm.serve(model, Path(folder))
        llm.init_weight_transfer_engine({"init_info": {"address": publisher.address}})
        for lr in options.lrs:
            optimizer.param_groups[0]["lr"] = lr
            for each in range(options.versions + 1):
                loss = model(torch.randint(256, (4, 32)), labels=torch.randint(256, (4, 32))).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                before = kept(served)
                for name, x in model.state_dict().items():
                    served[name].copy_(x)
                new = kept(served)
                version = publisher.step()
                publisher.flush(_PATIENCE)
                start = time.perf_counter()
                if vllm.poll(llm) != version:
                    raise SystemExit(f"vLLM has not loaded version {version}")
                pause = time.perf_counter() - start
                twin.load_state_dict({name: x.float() for name, x in served.items()})
                answers, expected = test_vllm.answers_of(llm), test_vllm.greedy(twin)
                pairs = [pair for a, b in zip(answers, expected, strict=True) for pair in zip(a, b, strict=True)]
                changed = sum(int((x != before.tensors[name]).sum()) for name, x in new.tensors.items())
                if each:
                    rows.append(
                        {
                            **{
                                "learning rate": f"{lr:g}",
                                "tokens": len(pairs),
                                "equal": sum(a == b for a, b in pairs),
                            },
                            **{"poll(), ms": 1000 * pause, "ours, kB": len_of(new, before) / 1e3},
                            "indices and values, kB": changed * 6 / 1e3,  # of vLLM's sparse_nccl: int32 and bf16
                            "whole, kB": sum(x.nbytes for x in served.values()) / 1e3,
                        }
                    )
    return rows


if __name__ == "__main__":
    driver.leave(main)
