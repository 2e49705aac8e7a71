"""Images per second with synthetic data, in a script for Horovod: with --horovod it runs on Horovod itself.

    torchrun --nproc-per-node 2 examples/hvd_synthetic_benchmark.py
    horovodrun -np 2 python examples/hvd_synthetic_benchmark.py --horovod

The model is a residual network of bottleneck blocks, as ResNet-50 is, in a size that a CPU can train.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import timeit
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

try:
    hvd: Any = importlib.import_module("horovod.torch" if "--horovod" in sys.argv else "fusionlayer.torch")
except ModuleNotFoundError as error:
    sys.exit(f"hvd_synthetic_benchmark: {error.name} is not installed; install it, or leave --horovod out")


def parse_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--horovod", action="store_true", help="import horovod.torch instead of fusionlayer.torch")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as f16")
    parser.add_argument("--use-adasum", action="store_true", help="add gradients by Adasum")
    parser.add_argument("--blocks", type=int, nargs="+", default=[3, 4, 6, 3], help="per stage (default ResNet-50's)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage; ResNet-50 has 64")
    parser.add_argument("--image-size", type=int, default=64, help="pixels (default 64)")
    parser.add_argument("--batch-size", type=int, default=8, help="images per worker (default 8)")
    parser.add_argument("--num-warmup-batches", type=int, default=3, help="not timed (default 3)")
    parser.add_argument("--num-batches-per-iter", type=int, default=5, help="timed together (default 5)")
    parser.add_argument("--num-iters", type=int, default=5, help="(default 5)")
    options = parser.parse_args()
    for name in ("width", "image_size", "batch_size", "num_batches_per_iter", "num_iters"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}; expected a whole number above 0")
    return options


class Bottleneck(nn.Module):
    """Three convolutions next to a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 4 width, h / stride, w / stride) of (n, channels, h, w)."""
        return F.relu(self.body(x) + self.shortcut(x))


def make_model(blocks: list[int], width: int) -> nn.Sequential:
    """Return a residual network with so many blocks per stage, for 1000 classes."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, number in enumerate(blocks):
        for block in range(number):
            layers.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
            channels = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def main() -> None:
    """Time some batches, and print the mean rate, and that of all workers together."""
    options = parse_options()
    hvd.init()
    torch.manual_seed(hvd.rank())
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(hvd.local_rank())
    else:
        torch.set_num_threads(1)
    device = torch.device("cuda" if cuda else "cpu")

    model = make_model(options.blocks, options.width).to(device)
    scale = 1 if options.use_adasum else hvd.size()
    optimizer: Any = optim.SGD(model.parameters(), lr=0.01 * scale)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    data = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    target = torch.randint(1000, (options.batch_size,), device=device)
    losses: list[float] = []

    def benchmark_step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    def log(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    log(f"{parameters / 1e6:.2f} M parameters, batch size {options.batch_size}, {hvd.size()} workers on {device.type}")
    timeit.timeit(benchmark_step, number=options.num_warmup_batches)
    rates = []
    for x in range(options.num_iters):
        seconds = timeit.timeit(benchmark_step, number=options.num_batches_per_iter)
        rates.append(options.batch_size * options.num_batches_per_iter / seconds)
        log(f"iteration {x}  {rates[-1]:.1f} images/s per worker  loss {losses[-1]:.6f}")
    mean, spread = np.mean(rates), 1.96 * np.std(rates)
    log(f"{mean:.1f} +- {spread:.1f} images/s per worker")
    log(f"{hvd.size() * mean:.1f} +- {hvd.size() * spread:.1f} images/s in all")
    hvd.shutdown()


if __name__ == "__main__":
    main()
