"""Train a small GPT in three dimensions: tensor, pipeline and data parallelism, each with its codec.

    torchrun --nproc-per-node 8 examples/train_gpt_3d.py --tensor-codec taco --pipeline-codec int8 --data-codec int4
    torchrun --nproc-per-node 8 examples/train_gpt_3d.py --tensor-codec raw --pipeline-codec raw --data-codec raw

Ranks make a cube of ``--shape`` DATA,PIPELINE,TENSOR. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Config, Corpus
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from train_gpt import (
    Parser,
    Traffic,
    average,
    join_launched_job,
    mistakes,
    positive,
    progress,
    warmup_and_cosine,
    writable,
)
from train_pp import Part, cross_entropy
from train_tp import cut_blocks

import fusionlayer as fl


def main() -> None:
    """Run the command line."""
    options = parse_options()
    with mistakes("train_gpt_3d"):
        result = train(options, join_launched_job())
        if fl.rank() == 0:
            print(f"mesh              {' x '.join(map(str, result['shape']))} ranks: data, pipeline, tensor")
            print(f"training loss     {result['train_loss']:.4f}, mean of the last {min(10, result['steps'])} steps")
            print(f"median step       {result['step_seconds'] * 1e3:.1f} ms")
            if result["bytes_per_step"]:
                print(f"sent per step     {result['bytes_per_step'] / 1e6:.3f} MB by each rank, protocol included")
            if options.json:
                Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    fl.shutdown()


def parse_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = Parser(__doc__)
    known = fl.codecs.names()
    parser.add_argument("--tensor-codec", choices=known, default="taco", help="inside layers (default taco)")
    parser.add_argument("--pipeline-codec", choices=known, default="int8", help="between stages (default int8)")
    parser.add_argument("--data-codec", choices=known, default="int8", help="of gradients (default int8)")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps of an uncompressed pipeline (default 0)")
    parser.add_argument("--shape", type=cube, default=(2, 2, 2), help="DATA,PIPELINE,TENSOR ranks (default 2,2,2)")
    parser.add_argument("--microbatches", type=positive, default=4, help="per step (default 4)")
    parser.add_argument("--steps", type=positive, default=100, help="optimizer steps (default 100)")
    parser.add_argument("--batch-size", type=positive, default=8, help="pieces of text per replica (default 8)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak (default 0.004)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--width", type=positive, default=Config.width, help=f"of the model (default {Config.width})")
    parser.add_argument("--layers", type=positive, default=Config.layers, help=f"blocks (default {Config.layers})")
    parser.add_argument("--heads", type=positive, default=Config.heads, help=f"per block (default {Config.heads})")
    parser.add_argument("--context", type=positive, default=Config.context, help=f"tokens (default {Config.context})")
    parser.add_argument("--json", metavar="FILE", type=writable, help="write the results there")
    options = parser.parse_model()
    if options.batch_size % options.microbatches:
        parser.error(f"--microbatches {options.microbatches} does not divide --batch-size {options.batch_size}")
    return options


def cube(text: str) -> tuple[int, ...]:
    """Return the three numbers of ranks."""
    shape = tuple(positive(part) for part in text.split(","))
    if len(shape) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}; expected three numbers, such as 2,2,2")
    return shape


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train as ``options`` say; return what was measured."""
    if math.prod(options.shape) != fl.size():
        raise fl.ConfigError(f"--shape {options.shape} has {math.prod(options.shape)} ranks; there are {fl.size()}")
    mesh = init_device_mesh(device.type, options.shape, mesh_dim_names=("data", "pipeline", "tensor"))
    replica, place = mesh["data"].get_local_rank(), mesh["pipeline"].get_local_rank()
    replicas, stages = mesh["data"].size(), mesh["pipeline"].size()
    if options.layers < stages:
        raise fl.ConfigError(f"--layers {options.layers} are too few for {stages} stages")
    torch.manual_seed(options.seed)
    config = Config(options.width, options.layers, options.heads, options.context, tied=False)
    corpus = Corpus()
    data = torch.Generator().manual_seed(options.seed * replicas + replica + 1)

    gpt = GPT(config).to(device)
    layers = {"codec": options.tensor_codec, "codec_option": [], "piece_bytes": None, "sequence_parallel": False}
    cut_blocks(gpt, mesh["tensor"], argparse.Namespace(heads=config.heads, context=config.context, **layers))
    stage = fl.pipeline.PipelineStage(
        Part(gpt, place, stages),
        place,
        stages,
        device,
        **edge_codecs(options.pipeline_codec, config.width),
        warmup_steps=options.warmup_steps,
        group=mesh["pipeline"].get_group(),
    )
    # Gradients leave when the last microbatch has added to them: the loss is divided before, instead of them after.
    schedule = Schedule1F1B(
        stage,
        options.microbatches,
        loss_fn=lambda logits, targets: cross_entropy(logits, targets) / options.microbatches,
        scale_grads=False,
    )
    optimizer: torch.optim.Optimizer = fl.DistributedOptimizer(
        torch.optim.AdamW(stage.submod.parameters(), lr=options.learning_rate, foreach=False),
        stage.submod.named_parameters(),
        codec=options.data_codec,
        backward_passes_per_step=options.microbatches,
        group=mesh["data"].get_group(),
    )
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_and_cosine(step, options.steps))

    traffic = Traffic(device)
    losses: list[float] = []
    seconds: list[float] = []
    traffic.start()
    with progress(f"{options.tensor_codec}, {options.pipeline_codec}, {options.data_codec}", options.steps) as advance:
        for _ in range(options.steps):
            start = time.perf_counter()
            tokens, targets = corpus.sample(options.batch_size, config.context, data)
            optimizer.zero_grad()
            parts: list[Tensor] = []
            inputs = [tokens.to(device)] if stage.is_first else []
            ending = {"target": targets.to(device), "losses": parts} if stage.is_last else {}
            schedule.step(*inputs, **ending)
            optimizer.step()
            rates.step()
            losses.append(stages * average(sum(loss.item() for loss in parts), device))
            seconds.append(time.perf_counter() - start)
            advance(losses[-1], seconds[-1])
    return {
        "shape": options.shape,
        "tensor_codec": options.tensor_codec,
        "pipeline_codec": options.pipeline_codec,
        "data_codec": options.data_codec,
        "warmup_steps": options.warmup_steps,
        "steps": options.steps,
        "train_loss": statistics.fmean(losses[-10:]),
        "step_seconds": statistics.median(seconds),
        "bytes_per_step": traffic.stop(options.steps),
    }


def edge_codecs(name: str, width: int) -> dict[str, Any]:
    """Return the codecs between stages; TAH-Quant has one for gradients too, and takes tokens as wide as the model."""
    if name != "tahquant":
        return {"codec": name}
    activations, gradients = (fl.codecs.get(each, channels=width) for each in ("tahquant", "tahquant6"))
    return {"codec": activations, "gradient_codec": gradients}


if __name__ == "__main__":
    main()
