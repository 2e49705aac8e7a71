"""Losses with and without error feedback of FSDP2's reduce-scatter: ``python -m benchmarks.shard_feedback``.

One process computes the gradients of all workers in turn and codes them as ``fl.fsdp.compress`` does: each worker codes
a row for each owner of a shard, module by module, and the owner sums the decoded rows in f32. Weights are not coded.
Feedback adds to each row what the worker's last message for that owner lost.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import Environment, table, write
from benchmarks.scoreboard.worker import warm_up_then_cosine
from benchmarks.training.workloads import MODELS, make_workload
from fusionlayer import codecs
from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs import Codec

__all__ = ["main"]

CODECS: dict[str, Codec] = {
    "int4": codecs.get("int4").bare,
    "int4, stochastic": codecs.get("int", bits=4, rounding="stochastic").bare,
    "int2": codecs.get("int2").bare,
}


class ReduceScatter:
    """The reduce-scatter of one module's gradients, for all workers at once."""

    def __init__(self, parameters: Sequence[Tensor], workers: int, codec: Codec, feedback: bool) -> None:
        self._parameters, self._workers, self._codec = parameters, workers, codec
        numel = sum(p.numel() for p in parameters)
        self._row = -(-numel // (workers * codec.block)) * codec.block
        self._rows = torch.zeros(workers, workers * self._row)
        self._owed = [torch.zeros_like(row) for row in self._rows] if feedback else [None] * workers
        self._calls = 0

    def put(self, worker: int) -> None:
        """Take the gradients of a worker."""
        flat = torch.cat([p.grad.flatten() for p in self._parameters if p.grad is not None])
        self._rows[worker, : flat.numel()] = flat / self._workers

    def finish(self, number: int) -> None:
        """Give all parameters the sum of what the workers sent."""
        capacity = self._codec.wire(self._row, torch.float32).capacity
        sent = torch.empty(self._workers, self._workers, capacity, dtype=torch.uint8)
        for worker, (row, owed) in enumerate(zip(self._rows, self._owed, strict=True)):
            seed = derive_seed(self._calls, number, worker)
            self._codec.encode_chunks(row, sent[worker], self._row, seed=seed, residual=owed)
        total = torch.empty(self._workers, self._row)
        for owner, shard in enumerate(total):
            self._codec.decode_sum(sent[:, owner].contiguous(), shard, dtype=torch.float32)
        flat = total.flatten()[: sum(p.numel() for p in self._parameters)]
        for p, part in zip(self._parameters, flat.split([p.numel() for p in self._parameters]), strict=True):
            p.grad = part.view_as(p).clone()
        self._calls += 1


def final_loss(name: str, workers: int, seed: int, steps: int, rate: float, codec: Codec, feedback: bool) -> float:
    """Return the loss on the held-out data after training."""
    torch.manual_seed(seed)
    loads = [make_workload(name, seed, rank) for rank in range(workers)]
    model = loads[0].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, steps))
    rest = set(model.parameters())
    parts: list[nn.Module] = [*getattr(model, "blocks", ()), model]
    sums = []
    for part in parts:
        own = [p for p in part.parameters() if p in rest]
        rest.difference_update(own)
        sums.append(ReduceScatter(own, workers, codec, feedback))
    for step in range(steps):
        for rank, load in enumerate(loads):
            optimizer.zero_grad()
            model(*load.batch(step)).backward()
            for each in sums:
                each.put(rank)
        for number, each in enumerate(sums):
            each.finish(number)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(model(*loads[0].held_out()))


def main(argv: Sequence[str] | None = None) -> None:
    """Train with each codec, and write the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt-small")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=0.004)
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=[*CODECS])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for workers in args.workers:
        plain: list[float] = []
        kinds = [("raw", codecs.get("raw").bare, False)]
        kinds += [(name, CODECS[name], feedback) for name in args.codecs for feedback in (False, True)]
        for name, codec, feedback in kinds:
            given = (args.steps, args.learning_rate, codec, feedback)
            losses = [final_loss(args.model, workers, seed, *given) for seed in args.seeds]
            plain = plain or losses
            above = [loss / best - 1 for loss, best in zip(losses, plain, strict=True)]
            row = {
                "workers": workers,
                "codec": name,
                "error feedback": "yes" if feedback else "no",
                "final loss": f"{mean(losses):.3f} ± {stdev(losses) if len(losses) > 1 else 0:.3f}",
                "above f32": f"{mean(above):+.2%}",
                "by seed": f"{min(above):+.2%} to {max(above):+.2%}",
            }
            rows.append({**row, "losses": losses})
            print(row, flush=True)
    shown = [{key: value for key, value in row.items() if key != "losses"} for row in rows]
    title = (
        f"Error feedback of FSDP2's reduce-scatter: {MODELS[args.model].words}, batches of "
        f"{MODELS[args.model].batch_size}, {args.steps} steps of AdamW, learning rate {args.learning_rate}, "
        f"{len(args.seeds)} seeds"
    )
    print(table(title, shown))
    write(args.out, "shard-feedback", title, Environment.here(torch.device("cpu")), rows, shown)


if __name__ == "__main__":
    main()
