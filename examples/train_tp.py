"""Train a small GPT whose layers are cut over ranks: tensor parallelism with compressed activations.

    torchrun --nproc-per-node 2 examples/train_tp.py --codec int8
    torchrun --nproc-per-node 2 examples/train_tp.py --codec int8 --sequence-parallel
    torchrun --nproc-per-node 4 examples/train_tp.py --codec int8 --data-parallel 2 --data-codec int4

``--codec raw`` sends activations as they are. Nothing is downloaded.
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
from gpt import GPT, Block, Config, Corpus
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from train_gpt import (
    VALIDATION_PIECES,
    Parser,
    Traffic,
    average,
    join_launched_job,
    mistakes,
    option,
    positive,
    progress,
    warmup_and_cosine,
    writable,
)

import fusionlayer as fl

# In a model that is tensor-parallel already, this import is the difference.
from fusionlayer.parallel.tensor_parallel import Channel, ColwiseParallel, RowwiseParallel, SequenceParallel


def main() -> None:
    """Run the command line."""
    options = parse_options()
    with mistakes("train_tp"):
        result = train(options, join_launched_job())
        if fl.rank() == 0:
            report(result, options.json)
    fl.shutdown()


def parse_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = Parser(__doc__)
    parser.add_argument("--codec", choices=fl.codecs.names(), default="int8", help="of activations (default int8)")
    parser.add_argument(
        "--codec-option", metavar="KEY=VALUE", type=option, action="append", default=[], help="may be repeated"
    )
    parser.add_argument("--piece-bytes", type=positive, help="bytes of an activation that are sent at a time")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut norms and residuals by tokens as well")
    parser.add_argument("--data-parallel", type=positive, default=1, help="replicas of the model (default 1)")
    parser.add_argument("--data-codec", choices=fl.codecs.names(), default="int8", help="of gradients (default int8)")
    parser.add_argument("--steps", type=positive, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--batch-size", type=positive, default=16, help="pieces of text per replica (default 16)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak (default 0.004)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--width", type=positive, default=Config.width, help=f"of the model (default {Config.width})")
    parser.add_argument("--layers", type=positive, default=Config.layers, help=f"blocks (default {Config.layers})")
    parser.add_argument("--heads", type=positive, default=Config.heads, help=f"per block (default {Config.heads})")
    parser.add_argument("--context", type=positive, default=Config.context, help=f"tokens (default {Config.context})")
    parser.add_argument("--json", metavar="FILE", type=writable, help="write the results there, - for standard output")
    return parser.parse_model()


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train as ``options`` say; return what was measured."""
    if fl.size() % options.data_parallel:
        raise fl.ConfigError(f"--data-parallel {options.data_parallel} does not divide {fl.size()} processes")
    shape = (options.data_parallel, fl.size() // options.data_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    replicas, parts = mesh["data"], mesh["tensor"]
    torch.manual_seed(options.seed)
    config = Config(options.width, options.layers, options.heads, options.context)
    corpus = Corpus()
    data = torch.Generator().manual_seed(options.seed * replicas.size() + replicas.get_local_rank() + 1)
    model = GPT(config).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    cut_blocks(model, parts, options)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, foreach=False)
    optimizer = fl.DistributedOptimizer(
        optimizer, model.named_parameters(), codec=options.data_codec, group=replicas.get_group()
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_and_cosine(step, options.steps))

    traffic = Traffic(device)
    losses: list[float] = []
    seconds: list[float] = []
    traffic.start()
    with progress(f"{replicas.size()} x {parts.size()} ranks, {options.codec}", options.steps) as advance:
        for _ in range(options.steps):
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
    sent = traffic.stop(options.steps)

    with torch.no_grad():
        tokens, targets = corpus.validate(VALIDATION_PIECES, config.context)
        mine = slice(replicas.get_local_rank(), None, replicas.size())
        validation = float(model(tokens[mine].to(device), targets[mine].to(device)))
    return {
        "codec": options.codec,
        "codec_options": dict(options.codec_option),
        "sequence_parallel": options.sequence_parallel,
        "data_codec": options.data_codec if replicas.size() > 1 else None,
        "mesh": shape,
        "device": device.type,
        "parameters": parameters,
        "steps": options.steps,
        "train_loss": average(statistics.fmean(losses[-10:]), device),
        "validation_loss": average(validation, device),
        "step_seconds": statistics.median(seconds),
        "bytes_per_step": sent,
        "ranks_agree": ranks_agree(model, mesh),
    }


def cut_blocks(model: GPT, mesh: DeviceMesh, options: argparse.Namespace) -> None:
    """Cut the layers of all blocks over ``mesh``: attention by heads, perceptrons by their hidden width."""
    if options.heads % mesh.size() or options.context % mesh.size():
        raise fl.ConfigError(
            f"{mesh.size()} tensor-parallel ranks do not divide --heads {options.heads} and --context "
            f"{options.context}; choose others"
        )
    how: dict[str, Any] = {
        "codec": options.codec,
        "codec_options": dict(options.codec_option),
        "piece_bytes": options.piece_bytes,
    }
    layers: dict[str, ParallelStyle]
    if options.sequence_parallel:
        layers = {
            "attention_norm": SequenceParallel(**how),
            "attention_in": ColwiseParallel(input_layouts=Shard(1), **how),
            "attention_out": RowwiseParallel(output_layouts=Shard(1), **how),
            "perceptron_norm": SequenceParallel(**how),
            "perceptron_in": ColwiseParallel(input_layouts=Shard(1), **how),
            "perceptron_out": RowwiseParallel(output_layouts=Shard(1), **how),
        }
        channel = Channel(mesh, options.codec, piece_bytes=options.piece_bytes, **dict(options.codec_option))
        model.blocks.register_forward_pre_hook(lambda _, inputs: channel.split(inputs[0], 1))
        model.blocks.register_forward_hook(lambda _, inputs, output: channel.join(output, 1))
    else:
        layers = {
            "attention_in": ColwiseParallel(**how),
            "attention_out": RowwiseParallel(**how),
            "perceptron_in": ColwiseParallel(**how),
            "perceptron_out": RowwiseParallel(**how),
        }
    for block in model.blocks:
        assert isinstance(block, Block)
        keep_heads_whole(block, mesh.size())
        parallelize_module(block, mesh, layers)


@torch.no_grad()
def keep_heads_whole(block: Block, parts: int) -> None:
    """Reorder the rows of query, key and value so that each of ``parts`` equal pieces has all three of its heads."""
    for parameter in block.attention_in.parameters():
        heads = parameter.unflatten(0, (3, parts, -1))
        parameter.copy_(heads.transpose(0, 1).flatten(0, 2))
    block.heads //= parts


def ranks_agree(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Return whether ranks have the same bits wherever they should: of whole parameters all, of parts the replicas."""
    parts, whole = hashlib.sha256(), hashlib.sha256()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements):
            parts.update(_bytes(parameter.to_local()))
        else:
            whole.update(_bytes(parameter.to_local() if isinstance(parameter, DTensor) else parameter))
    mine = (mesh["tensor"].get_local_rank(), parts.digest(), whole.digest())
    every = [fl.broadcast_object(mine, root_rank=rank) for rank in range(fl.size())]
    return len({digest for _, _, digest in every}) == 1 and len({entry[:2] for entry in every}) == mesh["tensor"].size()


def _bytes(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().numpy().tobytes()


def report(result: dict[str, Any], path: str | None) -> None:
    """Print the results, and write them as JSON where the user wants them."""
    if path == "-":
        print(json.dumps(result), flush=True)
        return
    replicas, parts = result["mesh"]
    print(f"parameters        {result['parameters']:,}")
    print(f"mesh              {replicas} replicas of {parts} tensor-parallel ranks on {result['device']}")
    print(f"training loss     {result['train_loss']:.4f}, mean of the last {min(10, result['steps'])} steps")
    print(f"validation loss   {result['validation_loss']:.4f}")
    print(f"median step       {result['step_seconds'] * 1e3:.1f} ms")
    if result["bytes_per_step"]:
        print(f"sent per step     {result['bytes_per_step'] / 1e6:.3f} MB by each rank, protocol included")
    print(f"ranks             {'agree' if result['ranks_agree'] else 'DIFFER'} to the last bit")
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
