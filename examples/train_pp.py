"""Train a small GPT whose blocks are dealt out to ranks: a pipeline with compressed activations and gradients.

    torchrun --nproc-per-node 2 examples/train_pp.py --codec int8
    torchrun --nproc-per-node 2 examples/train_pp.py --codec int4 --gradient-codec int8 --warmup-steps 20
    torchrun --nproc-per-node 2 examples/train_pp.py --codec int8 --schedule interleaved

``--codec raw`` sends everything as it is. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Config, Corpus
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional
from train_gpt import (
    VALIDATION_PIECES,
    Parser,
    Traffic,
    join_launched_job,
    mistakes,
    option,
    positive,
    progress,
    warmup_and_cosine,
    writable,
)

import fusionlayer as fl

# In a model that is pipelined already, this import is the difference.
from fusionlayer.parallel.pipeline import PipelineStage

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


def main() -> None:
    """Run the command line."""
    options = parse_options()
    with mistakes("train_pp"):
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
    parser.add_argument("--gradient-codec", choices=fl.codecs.names(), help="of gradients (default: as activations)")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps that send uncompressed tensors (default 0)")
    parser.add_argument("--schedule", choices=STAGES_PER_RANK, default="1f1b", help="(default 1f1b)")
    parser.add_argument("--microbatches", type=positive, default=4, help="per step (default 4)")
    parser.add_argument("--steps", type=positive, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--batch-size", type=positive, default=16, help="pieces of text per step (default 16)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak (default 0.004)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--width", type=positive, default=Config.width, help=f"of the model (default {Config.width})")
    parser.add_argument("--layers", type=positive, default=Config.layers, help=f"blocks (default {Config.layers})")
    parser.add_argument("--heads", type=positive, default=Config.heads, help=f"per block (default {Config.heads})")
    parser.add_argument("--context", type=positive, default=Config.context, help=f"tokens (default {Config.context})")
    parser.add_argument("--json", metavar="FILE", type=writable, help="write the results there, - for standard output")
    options = parser.parse_model()
    for count, name in ((options.batch_size, "--batch-size"), (VALIDATION_PIECES, "validation pieces")):
        if count % options.microbatches:
            parser.error(f"--microbatches {options.microbatches} does not divide {name} {count}; choose another")
    return options


class Part(nn.Module):
    """The blocks of one stage; the first has the embeddings, the last the output layer."""

    def __init__(self, gpt: GPT, index: int, count: int) -> None:
        super().__init__()
        blocks = len(gpt.blocks)
        self.blocks = gpt.blocks[index * blocks // count : (index + 1) * blocks // count]
        self.embeddings = nn.ModuleList([gpt.tokens, gpt.places] if index == 0 else [])
        self.output = nn.Sequential(*([gpt.norm, gpt.head] if index == count - 1 else []))

    def forward(self, x: Tensor) -> Tensor:
        """Return activations (batch, tokens, width), or logits, for the same, or for tokens (batch, tokens)."""
        if self.embeddings:
            tokens, places = self.embeddings
            x = tokens(x) + places(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.output(self.blocks(x))
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train as ``options`` say; return what was measured."""
    per_rank = STAGES_PER_RANK[options.schedule]
    count = per_rank * fl.size()
    if options.layers < count:
        raise fl.ConfigError(f"--layers {options.layers} are too few for {count} stages")
    torch.manual_seed(options.seed)
    config = Config(options.width, options.layers, options.heads, options.context, tied=False)
    corpus = Corpus()
    data = torch.Generator().manual_seed(options.seed + 1)
    gpt = GPT(config)
    stages = [
        PipelineStage(
            Part(gpt, index, count).to(device),
            index,
            count,
            device,
            codec=options.codec,
            gradient_codec=options.gradient_codec,
            warmup_steps=options.warmup_steps,
            codec_options=dict(options.codec_option),
        )
        for index in range(fl.rank(), count, fl.size())
    ]
    schedule: Any
    if options.schedule == "interleaved":
        schedule = ScheduleInterleaved1F1B([*stages], options.microbatches, loss_fn=cross_entropy)
    else:
        single = ScheduleGPipe if options.schedule == "gpipe" else Schedule1F1B
        schedule = single(stages[0], options.microbatches, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(
        [parameter for stage in stages for parameter in stage.submod.parameters()], lr=options.learning_rate
    )
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_and_cosine(step, options.steps))

    def run(call: Any, tokens: Tensor, targets: Tensor) -> float:
        """Send a batch through all stages; return its loss, which the last rank sends to the others."""
        losses: list[Tensor] = []
        inputs = [tokens.to(device)] if stages[0].is_first else []
        ending = {"target": targets.to(device), "losses": losses} if stages[-1].is_last else {}
        call(*inputs, **ending)
        mine = statistics.fmean(loss.item() for loss in losses) if losses else 0.0
        return fl.broadcast_object(mine, root_rank=fl.size() - 1)

    traffic = Traffic(device)
    losses: list[float] = []
    seconds: list[float] = []
    traffic.start()
    with progress(f"{count} stages, {options.schedule}, {options.codec}", options.steps) as advance:
        for _ in range(options.steps):
            start = time.perf_counter()
            tokens, targets = corpus.sample(options.batch_size, config.context, data)
            optimizer.zero_grad()
            losses.append(run(schedule.step, tokens, targets))
            optimizer.step()
            rates.step()
            seconds.append(time.perf_counter() - start)
            advance(losses[-1], seconds[-1])
    sent = traffic.stop(options.steps)

    # Buffers of a pipeline have the size of a training batch.
    tokens, targets = corpus.validate(VALIDATION_PIECES, config.context)
    batches = zip(tokens.split(options.batch_size), targets.split(options.batch_size), strict=True)
    whole = [(x, y) for x, y in batches if len(x) == options.batch_size]
    with torch.no_grad():
        validation = statistics.fmean(run(schedule.eval, x, y) for x, y in whole)
    return {
        "codec": options.codec,
        "codec_options": dict(options.codec_option),
        "gradient_codec": options.gradient_codec or options.codec,
        "warmup_steps": options.warmup_steps,
        "schedule": options.schedule,
        "stages": count,
        "device": device.type,
        "parameters": sum(parameter.numel() for parameter in gpt.parameters()),
        "steps": options.steps,
        "train_loss": statistics.fmean(losses[-10:]),
        "validation_loss": validation,
        "step_seconds": statistics.median(seconds),
        "bytes_per_step": sent,
    }


def report(result: dict[str, Any], path: str | None) -> None:
    """Print the results, and write them as JSON where the user wants them."""
    if path == "-":
        print(json.dumps(result), flush=True)
        return
    print(f"parameters        {result['parameters']:,}")
    print(f"pipeline          {result['stages']} stages, {result['schedule']}, on {result['device']}")
    print(f"training loss     {result['train_loss']:.4f}, mean of the last {min(10, result['steps'])} steps")
    print(f"validation loss   {result['validation_loss']:.4f}")
    print(f"median step       {result['step_seconds'] * 1e3:.1f} ms")
    if result["bytes_per_step"]:
        print(f"sent per step     {result['bytes_per_step'] / 1e6:.3f} MB by each rank, protocol included")
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
