"""Train a small GPT with FSDP2, whose weights and gradients are sent in four bits, or as torch sends them.

    torchrun --nproc-per-node 2 examples/train_fsdp.py
    torchrun --nproc-per-node 4 examples/train_fsdp.py --nodes 2
    torchrun --nproc-per-node 2 examples/train_fsdp.py --weights qw --gradients tlq_hs
    torchrun --nproc-per-node 2 examples/train_fsdp.py --weights none --gradients none

Blocks compute in bf16, sums of gradients are f32. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Config, Corpus
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from train_gpt import (
    Parser,
    Traffic,
    average,
    join_launched_job,
    mistakes,
    positive,
    progress,
    validate,
    warmup_and_cosine,
    writable,
)

import fusionlayer as fl

TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def main() -> None:
    """Run the command line."""
    options = parse_options()
    with mistakes("train_fsdp"):
        result = train(options, join_launched_job())
        if fl.rank() == 0:
            report(result, options.json)
    fl.shutdown()


def parse_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--weights", default="sdp4bit", help="what is sent: qwd, qw, qwz, a codec, none, or sdp4bit (default) or zero++"
    )
    parser.add_argument("--gradients", default="auto", help="codec, or none (default: by --weights)")
    parser.add_argument("--nodes", type=positive, help="ranks of each node (default: found)")
    parser.add_argument("--dtype", choices=list(TYPES), default="bf16", help="that blocks compute in (default bf16)")
    parser.add_argument("--steps", type=positive, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--batch-size", type=positive, default=8, help="pieces of text per worker and step (default 8)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak (default 0.004)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--width", type=positive, default=Config.width, help=f"of the model (default {Config.width})")
    parser.add_argument("--layers", type=positive, default=Config.layers, help=f"blocks (default {Config.layers})")
    parser.add_argument("--heads", type=positive, default=Config.heads, help=f"per block (default {Config.heads})")
    parser.add_argument("--context", type=positive, default=Config.context, help=f"tokens (default {Config.context})")
    parser.add_argument("--validate-every", type=positive, help="steps between two looks at the validation loss")
    parser.add_argument("--json", metavar="FILE", type=writable, help="write the results there, - for standard output")
    return parser.parse_model()


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train as ``options`` say; return what was measured, losses averaged over workers."""
    torch.manual_seed(options.seed)
    config = Config(options.width, options.layers, options.heads, options.context)
    corpus = Corpus()
    data = torch.Generator().manual_seed(options.seed * fl.size() + fl.rank() + 1)
    model = GPT(config).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh(device.type, (fl.size(),))
    policy = MixedPrecisionPolicy(TYPES[options.dtype], reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)

    # In a model that is sharded already, this is the difference.
    weights, gradients = (None if name == "none" else name for name in (options.weights, options.gradients))
    compression = fl.fsdp.compress(model, weights, gradients, nodes=options.nodes)

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_and_cosine(step, options.steps))
    traffic = Traffic(device)
    losses: list[float] = []
    seconds: list[float] = []
    validation: list[tuple[int, float]] = []
    traffic.start()
    with progress(f"FSDP2, weights {options.weights}", options.steps) as advance:
        for step in range(options.steps):
            start = time.perf_counter()
            tokens, targets = corpus.sample(options.batch_size, config.context, data)
            loss = model(tokens.to(device), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            advance(losses[-1], seconds[-1])
            if options.validate_every and (step + 1) % options.validate_every == 0:
                validation.append((step + 1, average(validate(model, corpus, config.context, device), device)))
    sent = traffic.stop(options.steps)

    return {
        "weights": compression.weights,
        "gradients": compression.gradients,
        "workers": fl.size(),
        "device": device.type,
        "parameters": parameters,
        "steps": options.steps,
        "train_loss": average(statistics.fmean(losses[-10:]), device),
        "validation_loss": average(validate(model, corpus, config.context, device), device),
        "validation_losses": validation,
        "step_seconds": statistics.median(seconds),
        "bytes_per_step": sent,
        "payload_per_step": compression.bytes_sent / options.steps,
        "replica_bytes": compression.replica_bytes,
        "replicas_identical": replicas_identical(model, device),
    }


@torch.no_grad()
def replicas_identical(model: nn.Module, device: torch.device) -> bool:
    """Return whether all workers compute with the same bits of all weights."""
    digest = hashlib.sha256()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for parameter in module.parameters(recurse=True):
                if not hasattr(parameter, "full_tensor"):  # those that are unsharded
                    digest.update(parameter.detach().to("cpu", torch.float32, copy=True).numpy().tobytes())
            module.reshard()
    mine = digest.digest()
    return average(float(mine == fl.broadcast_object(mine)), device) == 1.0


def report(result: dict[str, Any], path: str | None) -> None:
    """Print the results, and write them as JSON where the user wants them."""
    if path == "-":
        print(json.dumps(result), flush=True)
        return
    print(f"parameters        {result['parameters']:,}")
    print(f"workers           {result['workers']} on {result['device']}")
    print(f"weights           {result['weights'] or 'as torch sends them'}")
    print(f"gradients         {result['gradients'] or 'as torch sends them'}")
    print(f"training loss     {result['train_loss']:.4f}, mean of the last {min(10, result['steps'])} steps")
    print(f"validation loss   {result['validation_loss']:.4f}")
    print(f"median step       {result['step_seconds'] * 1e3:.1f} ms")
    if result["bytes_per_step"]:
        print(f"sent per step     {result['bytes_per_step'] / 1e6:.3f} MB by each worker, protocol included")
    if result["replica_bytes"]:
        print(f"copies of weights {result['replica_bytes'] / 1e6:.3f} MB on each worker")
    print(f"replicas          {'identical' if result['replicas_identical'] else 'DIFFERENT'}")
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
