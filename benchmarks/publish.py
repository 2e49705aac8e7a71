"""Seconds until followers serve new weights: ``fl.publish`` beside the whole state dict by ``torch.save``.

    python -m benchmarks.publish --out benchmarks/results

One trainer and two followers, each on a host of its own, all links of one rate. A GPT learns in f32 by AdamW and is
published in bf16. For each learning rate the model trains some steps, then after each further step its weights travel
twice: by ``torch.save`` over a socket to each follower at once, which loads them by ``torch.load``; then by
``publisher.step()``. Each time is from the call to the last follower's word that its model has the new weights. Bytes
are those of one update for one follower; that of the first version is whole. Steps of all learning rates follow each
other in one run.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusionlayer as fl
from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from benchmarks.lab import Network, launch
from fusionlayer.publishing import Snapshot
from fusionlayer.publishing.snapshot import copied
from fusionlayer.publishing.update import make

__all__ = ["main", "summarize"]

ROOT = Path(__file__).parents[1]
FOLLOWERS = 2
_PATIENCE = 120.0
_PLAIN, _VERSION, _END = b"P", b"V", b"E"
_FRONT = struct.Struct("<cQ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("publish", __doc__)
    parser.add_argument("--rates", type=comma_separated(str), default=("100mbit", "1gbit"), help="of links (both)")
    parser.add_argument("--lrs", type=comma_separated(float), default=(1e-3, 1e-4, 1e-5), help="(1e-3,1e-4,1e-5)")
    parser.add_argument("--versions", type=count(), default=5, help="measured for each learning rate (5)")
    parser.add_argument("--warmup", type=count(), default=10, help="steps before them (10)")
    parser.add_argument("--width", type=count(), default=384, help="of the model (384)")
    parser.add_argument("--layers", type=count(), default=6, help="of the model (6)")
    parser.add_argument("--worker", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    driver.add_options(parser, timed=True)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options)
        return 0
    environment = driver.begin(options, FOLLOWERS + 1)
    rows: list[dict[str, Any]] = []
    for rate in options.rates:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.publish", *(arguments or sys.argv[1:]), "--worker", folder]
            with launch(command, Network(FOLLOWERS + 1, rate), stdout=sys.stderr.fileno()) as process:
                if process.wait():
                    return 1
            rows += [{"rate": rate, **row} for row in json.loads((Path(folder) / "rows").read_text())]
    title = (
        f"Weights of a GPT of width {options.width} and {options.layers} layers in bf16, to {FOLLOWERS} followers: "
        "seconds until the last one has them, and bytes of a version"
    )
    driver.finish(options, "publish", title, environment, rows, summarize(rows))
    return 0


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each rate and learning rate: medians over versions, with the least and the largest ratio."""
    lines = []
    for rate, lr in dict.fromkeys((row["rate"], row["lr"]) for row in rows):
        found = [row for row in rows if (row["rate"], row["lr"]) == (rate, lr)]
        ratios = [row["plain_seconds"] / row["seconds"] for row in found]
        nbytes = statistics.median(row["nbytes"] for row in found)
        lines.append(
            {
                "link": rate,
                "learning rate": f"{lr:g}",
                "versions": len(found),
                "weights, MB": f"{found[0]['weight_bytes'] / 1e6:.2f}",
                "whole by zip, MB": f"{found[0]['whole_bytes'] / 1e6:.2f}",
                "a version, MB": f"{nbytes / 1e6:.3f}",
                "times fewer": f"{found[0]['weight_bytes'] / nbytes:.1f}",
                "step() returns, s": f"{statistics.median(row['step_seconds'] for row in found):.3f}",
                "published, s": f"{statistics.median(row['seconds'] for row in found):.3f}",
                "torch.save, s": f"{statistics.median(row['plain_seconds'] for row in found):.3f}",
                "times faster": f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
            }
        )
    return lines


# ---- the processes of one run ---------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Be the trainer, or a follower."""
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT, Config

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Config(width=options.width, layers=options.layers, heads=options.width // 64, context=128, tied=False)
    model = GPT(config)
    if os.environ["RANK"] == "0":
        train(options, model)
    else:
        follow(options.worker, model.bfloat16())


def train(options: argparse.Namespace, model: Any) -> None:
    """Train, and bring what each measured step has made to all followers in both ways."""
    from gpt import Corpus

    corpus, generator = Corpus(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(*corpus.sample(4, 128, generator)).backward()
        optimizer.step()
        for name, x in model.state_dict().items():
            served[name].copy_(x)

    served = {name: x.bfloat16() for name, x in model.state_dict().items()}
    listener = socket.create_server((os.environ["MASTER_ADDR"], 0))
    rows = []
    with fl.publish(served, f"tcp://{os.environ['MASTER_ADDR']}:0") as publisher:
        draft = options.worker / "draft"
        draft.write_text(json.dumps([listener.getsockname()[:2], publisher.address]))
        draft.rename(options.worker / "places")
        ends = [listener.accept()[0] for _ in range(FOLLOWERS)]
        whole = len_of(kept(served), None)
        publish(publisher, ends)
        for lr in options.lrs:
            for group in optimizer.param_groups:
                group["lr"] = lr
            for _ in range(options.warmup):
                step()
            publish(publisher, ends)
            for _ in range(options.versions):
                before = kept(served)
                step()
                plain = send_whole(served, ends)
                returned, seconds = publish(publisher, ends)
                rows.append(
                    {
                        **{"lr": lr, "plain_seconds": plain, "seconds": seconds, "step_seconds": returned},
                        **{"nbytes": len_of(kept(served), before), "whole_bytes": whole},
                        "weight_bytes": sum(x.nbytes for x in served.values()),
                    }
                )
        for end in ends:
            end.sendall(_FRONT.pack(_END, 0))
    (options.worker / "rows").write_text(json.dumps(rows))


def kept(tensors: Mapping[str, Tensor]) -> Snapshot:
    """Return a copy of tensors as a version."""
    return Snapshot("0" * 16, 0, {name: copied(x) for name, x in tensors.items()})


def len_of(new: Snapshot, base: Snapshot | None) -> int:
    """Return the bytes of the update that a follower with ``base`` gets."""
    return make(new, base).nbytes


def publish(publisher: fl.Publisher, ends: Sequence[socket.socket]) -> tuple[float, float]:
    """Return the seconds until ``step`` has returned, and until the last follower has the version."""
    for end in ends:
        end.sendall(_FRONT.pack(_VERSION, 0))
    start = time.perf_counter()
    publisher.step()
    returned = time.perf_counter() - start
    hear(ends)
    return returned, time.perf_counter() - start


def send_whole(tensors: Mapping[str, Tensor], ends: Sequence[socket.socket]) -> float:
    """Return the seconds until the last follower has what ``torch.save`` makes of the tensors."""
    start = time.perf_counter()
    file = io.BytesIO()
    torch.save(dict(tensors), file)
    data = file.getbuffer()

    def send(end: socket.socket) -> None:
        end.sendall(_FRONT.pack(_PLAIN, len(data)))
        end.sendall(data)

    threads = [threading.Thread(target=send, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    hear(ends)
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def hear(ends: Sequence[socket.socket]) -> None:
    """Wait for a word of each follower."""
    for end in ends:
        end.settimeout(_PATIENCE)
        if end.recv(1) != b"!":
            raise SystemExit("a follower is gone")


def follow(folder: Path, model: Any) -> None:
    """Load what comes, in the way that the trainer announces, and say so."""
    end = time.monotonic() + _PATIENCE
    while not (folder / "places").exists() and time.monotonic() < end:
        time.sleep(0.05)
    (host, port), address = json.loads((folder / "places").read_text())
    with fl.subscribe(address, model) as follower, socket.create_connection((host, port), _PATIENCE) as trainer:
        heard = trainer.makefile("rb")
        while (front := _FRONT.unpack(heard.read(_FRONT.size)))[0] != _END:
            if front[0] == _PLAIN:
                model.load_state_dict(torch.load(io.BytesIO(heard.read(front[1]))))
            else:
                follower.wait(_PATIENCE)
            trainer.sendall(b"!")


if __name__ == "__main__":
    driver.leave(main)
