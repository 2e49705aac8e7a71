"""Train a small GPT with mixtures of experts, which are dealt out to ranks: tokens are sent to them compressed.

    torchrun --nproc-per-node 2 examples/train_moe.py --codec zip
    torchrun --nproc-per-node 4 examples/train_moe.py --codec int8 --gradient-codec zip
    torchrun --nproc-per-node 2 examples/train_moe.py --codec zip --dtype f32

With ``--codec zip`` every loss has the same bits as with ``--codec raw``, which sends tokens as they are: the digest
that is printed is of all losses and weights of all ranks. Nothing is downloaded.
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
from train_gpt import (
    VALIDATION_PIECES,
    Parser,
    Traffic,
    average,
    join_job,
    mistakes,
    option,
    positive,
    progress,
    warmup_and_cosine,
    writable,
)

import fusionlayer as fl

CODECS = ["auto", *fl.codecs.names()]  # auto: zip where that is measured to be faster
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def main() -> None:
    """Run the command line."""
    options = parse_options()
    with mistakes("train_moe"):
        result = train(options, join_job())
        if fl.rank() == 0:
            report(result, options.json)
    fl.shutdown()


def parse_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = Parser(__doc__)
    parser.add_argument("--codec", choices=CODECS, default="zip", help="of tokens (default zip)")
    parser.add_argument(
        "--codec-option", metavar="KEY=VALUE", type=option, action="append", default=[], help="may be repeated"
    )
    parser.add_argument("--gradient-codec", choices=CODECS, help="of tokens' gradients (default: as of tokens)")
    parser.add_argument(
        "--data-codec",
        choices=fl.codecs.names(),
        default="raw",
        help="of gradients of shared weights (default raw)",
    )
    parser.add_argument("--experts", type=positive, default=8, help="of each mixture, on all ranks (default 8)")
    parser.add_argument("--experts-per-token", type=positive, default=2, help="(default 2)")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balancing loss (default 0.01)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of computation and tokens (default bf16)")
    parser.add_argument("--steps", type=positive, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--batch-size", type=positive, default=8, help="pieces of text per rank (default 8)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak (default 0.004)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--width", type=positive, default=Config.width, help=f"of the model (default {Config.width})")
    parser.add_argument("--layers", type=positive, default=Config.layers, help=f"blocks (default {Config.layers})")
    parser.add_argument("--heads", type=positive, default=Config.heads, help=f"per block (default {Config.heads})")
    parser.add_argument("--context", type=positive, default=Config.context, help=f"tokens (default {Config.context})")
    parser.add_argument("--json", metavar="FILE", type=writable, help="write the results there, - for standard output")
    return parser.parse_model()


class Mixture(nn.Module):
    """A router and the experts that it chooses from, in the place of a block's perceptron.

    Attributes:
        load: (experts,) how many of this rank's tokens each expert got in the last forward.
        balance: of the last forward; 1 where all experts get as many tokens (Fedus et al., 2021, section 2.2).
    """

    load: Tensor
    balance: Tensor

    def __init__(self, config: Config, options: argparse.Namespace, seed: int, dispatcher: fl.moe.Dispatcher) -> None:
        super().__init__()
        self.count, self.chosen = options.experts, options.experts_per_token
        self.dtype = DTYPES[options.dtype]
        self.router = nn.Linear(config.width, self.count, bias=False)
        local = self.count // dispatcher.size
        numbers = range(dispatcher.rank * local, (dispatcher.rank + 1) * local)
        self.experts = fl.moe.Experts([make_expert(config, seed + number) for number in numbers], dispatcher)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, width) for the same."""
        with torch.autocast(x.device.type, enabled=False):
            probabilities = self.router(x.float()).softmax(-1)
        weights, indices = probabilities.topk(self.chosen)
        self.load = torch.bincount(indices.flatten(), minlength=self.count)
        share = self.load / indices.numel()
        self.balance = self.count * (share * probabilities.flatten(0, -2).mean(0)).sum()
        mixed: Tensor = self.experts(x.to(self.dtype), weights / weights.sum(-1, keepdim=True), indices)
        return mixed


class MixtureBlock(Block):
    """A block with a mixture of experts as its perceptron."""

    def __init__(self, config: Config, mixture: Mixture) -> None:
        super().__init__(config)
        del self.perceptron_in, self.perceptron_out
        self.mixture = mixture

    @torch.no_grad()
    def damp(self, factor: float) -> None:
        """Scale what the block adds at the start of training."""
        self.attention_out.weight *= factor
        for expert in self.mixture.experts.experts:
            expert[-1].weight *= factor

    def _transform(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mixture(x)
        return mixed


def make_expert(config: Config, seed: int) -> nn.Sequential:
    """Return a perceptron, the same for the same seed on whatever rank it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )


def make_model(config: Config, options: argparse.Namespace, dispatcher: fl.moe.Dispatcher) -> GPT:
    """Return a GPT in which every second block has a mixture of experts."""
    torch.manual_seed(options.seed)
    model = GPT(config)
    for layer in range(1, config.layers, 2):
        seed = (options.seed + 1) * 1_000_000 + layer * options.experts
        block = MixtureBlock(config, Mixture(config, options, seed, dispatcher))
        block.damp((2 * config.layers) ** -0.5)
        model.blocks[layer] = block
    return model


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train as ``options`` say; return what was measured."""
    if options.experts % fl.size() or options.experts < options.experts_per_token or options.layers < 2:
        raise fl.ConfigError(
            f"--experts {options.experts}, --experts-per-token {options.experts_per_token}, --layers {options.layers} "
            f"over {fl.size()} ranks; expected as many experts on each, enough for a token, and two layers at least"
        )
    config = Config(options.width, options.layers, options.heads, options.context)
    corpus = Corpus()
    data = torch.Generator().manual_seed(options.seed * fl.size() + fl.rank() + 1)
    dispatcher = fl.moe.Dispatcher(
        codec=options.codec, gradient_codec=options.gradient_codec, **dict(options.codec_option)
    )
    model = make_model(config, options, dispatcher).to(device)
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]

    # Experts are this rank's alone. Gradients of all other weights are averaged, the router's uncompressed.
    of_experts = [parameter for mixture in mixtures for parameter in mixture.experts.parameters()]
    shared = {name: parameter for name, parameter in model.named_parameters() if ".experts." not in name}
    mine = torch.optim.AdamW(of_experts, lr=options.learning_rate, foreach=False)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(shared.values(), lr=options.learning_rate, foreach=False)
    optimizer = fl.DistributedOptimizer(
        optimizer,
        shared.items(),
        policy=fl.CodecRules((fl.CodecRule("raw", match="*.router.*"), fl.CodecRule(options.data_codec))),
    )
    optimizers = [optimizer, mine]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: warmup_and_cosine(step, options.steps))
        for each in optimizers
    ]

    traffic = Traffic(device)
    losses: list[float] = []
    seconds: list[float] = []
    loads: list[Tensor] = []
    reduced = torch.autocast(device.type, DTYPES[options.dtype], enabled=options.dtype != "f32")
    traffic.start()
    with progress(f"{fl.size()} ranks, {options.experts} experts, {options.codec}", options.steps) as advance:
        for _ in range(options.steps):
            start = time.perf_counter()
            tokens, targets = corpus.sample(options.batch_size, config.context, data)
            with reduced:
                loss = model(tokens.to(device), targets.to(device))
            for each in optimizers:
                each.zero_grad()
            (loss + options.balance * torch.stack([mixture.balance for mixture in mixtures]).mean()).backward()
            for each, schedule in zip(optimizers, schedules, strict=True):
                each.step()
                schedule.step()
            loads.append(torch.stack([mixture.load for mixture in mixtures]))
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            advance(losses[-1], seconds[-1])
    sent = traffic.stop(options.steps)
    tokens_sent = dispatcher.bytes_sent / options.steps

    with torch.no_grad(), reduced:
        tokens, targets = corpus.validate(VALIDATION_PIECES, config.context)
        part = slice(fl.rank(), None, fl.size())
        validation = float(model(tokens[part].to(device), targets[part].to(device)))
    most = busiest(torch.stack(loads), fl.size())
    return {
        "codec": options.codec,
        "codec_options": dict(options.codec_option),
        "gradient_codec": options.gradient_codec or options.codec,
        "data_codec": options.data_codec,
        "dtype": options.dtype,
        "ranks": fl.size(),
        "experts": options.experts,
        "experts_per_token": options.experts_per_token,
        "device": device.type,
        "parameters": sum(p.numel() for p in shared.values()) + fl.size() * sum(p.numel() for p in of_experts),
        "steps": options.steps,
        "losses": losses,
        "train_loss": average(statistics.fmean(losses[-10:]), device),
        "validation_loss": average(validation, device),
        "step_seconds": statistics.median(seconds),
        "bytes_per_step": sent,
        "token_bytes_per_step": tokens_sent,
        "busiest_rank_mean": statistics.fmean(most),
        "busiest_rank_most": max(most),
        "digest": digest_of_all_ranks(losses, model),
    }


def busiest(loads: Tensor, size: int) -> list[float]:
    """Return how many times the mean the busiest rank gets, for each mixture in each step.

    Args:
        loads: (steps, mixtures, experts) of this rank.
        size: number of ranks.
    """
    of_ranks = fl.all_reduce(loads, op=fl.Sum).unflatten(2, (size, -1)).sum(3).double()
    most: list[float] = (of_ranks.amax(2) / of_ranks.mean(2)).flatten().tolist()
    return most


def digest_of_all_ranks(losses: list[float], model: nn.Module) -> str:
    """Return a digest of all losses and weights of all ranks, to compare runs with."""
    mine = hashlib.sha256(repr(losses).encode())
    for parameter in model.parameters():
        mine.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    every = [fl.broadcast_object(mine.hexdigest(), root_rank=rank) for rank in range(fl.size())]
    return hashlib.sha256("".join(every).encode()).hexdigest()


def report(result: dict[str, Any], path: str | None) -> None:
    """Print the results, and write them as JSON where the user wants them."""
    if path == "-":
        print(json.dumps(result), flush=True)
        return
    print(f"parameters        {result['parameters']:,}, experts of all ranks included")
    print(f"ranks             {result['ranks']} on {result['device']}, {result['experts']} experts, {result['dtype']}")
    print(f"training loss     {result['train_loss']:.4f}, mean of the last {min(10, result['steps'])} steps")
    print(f"validation loss   {result['validation_loss']:.4f}")
    print(f"median step       {result['step_seconds'] * 1e3:.1f} ms")
    if result["bytes_per_step"]:
        print(f"sent per step     {result['bytes_per_step'] / 1e6:.3f} MB by each rank, protocol included")
    print(f"tokens per step   {result['token_bytes_per_step'] / 1e6:.3f} MB by rank 0, gradients included")
    mean, most = result["busiest_rank_mean"], result["busiest_rank_most"]
    print(f"busiest rank      {mean:.2f} times the mean number of tokens, {most:.2f} times at most")
    if "auto" in (result["codec"], result["gradient_codec"]):
        print(fl.switcher())
    print(f"digest            {result['digest'][:16]} of losses and weights")
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
