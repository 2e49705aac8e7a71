"""Train a small GPT on the sources of Python's standard library with DeepSpeed, its traffic compressed by fusionlayer.

    torchrun --nproc-per-node 2 examples/train_deepspeed.py
    deepspeed --num_gpus 2 examples/train_deepspeed.py --deepspeed_config examples/ds_config.json
    torchrun --nproc-per-node 2 examples/train_deepspeed.py --deepspeed_config my_config.json --steps 500

What is compressed, and how, says the section "fusionlayer" of the configuration; without it this is DeepSpeed alone.
Without a GPU set DS_ACCELERATOR=cpu, and workers share the CPU's cores. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from gpt import GPT, Config, Corpus
from torch import Tensor
from train_gpt import Parser, mistakes, positive, writable
from wire import carrier, sent_bytes

import fusionlayer as fl

VALIDATION_PIECES = 256


def main() -> None:
    """Run the command line."""
    options = parse_options()
    if get_accelerator().device_name() == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size()))
    with mistakes("train_deepspeed"):
        result = train(options)
        if dist.get_rank() == 0:
            for key, value in result.items():
                print(f"{key:18}{value}")
            if options.json:
                Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    fl.shutdown()
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = Parser(__doc__)
    parser.add_argument("--deepspeed_config", default=str(Path(__file__).with_name("ds_config.json")))
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    parser.add_argument("--steps", type=positive, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--width", type=positive, default=Config.width, help=f"of the model (default {Config.width})")
    parser.add_argument("--layers", type=positive, default=Config.layers, help=f"blocks (default {Config.layers})")
    parser.add_argument("--context", type=positive, default=Config.context, help=f"tokens (default {Config.context})")
    parser.add_argument("--json", metavar="FILE", type=writable, help="write the results there")
    return parser.parse_args()


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train as ``options`` say; return what was measured."""
    torch.manual_seed(options.seed)
    model = GPT(Config(width=options.width, layers=options.layers, context=options.context))
    parameters = sum(parameter.numel() for parameter in model.parameters())

    # The one difference to DeepSpeed alone: fl.deepspeed.initialize in the place of deepspeed.initialize.
    engine, *_ = fl.deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())

    corpus = Corpus()
    data = torch.Generator().manual_seed(options.seed * dist.get_world_size() + dist.get_rank() + 1)
    device = network_device()
    before = count(device)
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(options.steps):
        start = time.perf_counter()
        tokens, targets = corpus.sample(engine.train_micro_batch_size_per_gpu(), options.context, data)
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{options.steps}  loss {losses[-1]:.4f}  {seconds[-1] * 1e3:.0f} ms", flush=True)
    sent = count(device) - before
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    engine.eval()
    with torch.no_grad():
        pieces = corpus.validate(VALIDATION_PIECES, options.context)
        validation = engine(*(piece[mine].to(engine.device) for piece in pieces))
    return {
        "zero_stage": engine.zero_optimization_stage(),
        "workers": dist.get_world_size(),
        "parameters": parameters,
        "steps": options.steps,
        "train_loss": average(torch.tensor(statistics.fmean(losses[-10:]), device=engine.device)),
        "validation_loss": average(validation),
        "step_seconds": statistics.median(seconds),
        "network_device": device,
        "bytes_per_step": sent / options.steps / local_size() if device else None,
        "deepspeed": deepspeed.__version__,
        "fusionlayer": fl.__version__,
    }


def local_size() -> int:
    """Return the number of workers of this host, as torchrun or the deepspeed launcher says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def average(value: Tensor) -> float:
    """Return the mean of ``value`` over workers."""
    total = value.detach().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def network_device() -> str | None:
    """Return the device that carries what workers send to each other, if one does."""
    local, size = local_size(), dist.get_world_size()
    if size == 1 or (local == size and "nccl" in dist.get_backend()):
        return None
    return carrier(local, size, os.environ.get("GLOO_SOCKET_IFNAME"))


def count(device: str | None) -> int:
    """Return how many bytes the device has sent, all workers having come here."""
    dist.barrier()
    return sent_bytes(device) if device else 0


if __name__ == "__main__":
    main()
