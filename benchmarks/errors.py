"""What codecs lose of synthetic tensors: squared error over squared norm (vNMSE), beside the bits of an element.

    python -m benchmarks.errors --out benchmarks/results

One encoding and decoding of each tensor, without error feedback. Needs no quiet machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import fusionlayer as fl
from fusionlayer.codecs import Codec

from .report import Environment, table, write

__all__ = ["DATA", "CODECS", "error", "gaussian", "main", "skewed", "tensor_parallel"]

ELEMENTS = 1 << 20

CODECS: tuple[tuple[str, dict[str, object]], ...] = (
    ("bf16", {}),
    ("int8", {}),
    ("int8", {"hadamard": True}),
    ("int4", {}),
    ("taco", {}),
    ("taco", {"format": "e5m2"}),
    ("taco", {"format": "int8"}),
    ("taco", {"block_size": 32}),
    ("taco", {"block_size": 512}),
    ("taco", {"scales": "dual"}),
    ("taco", {"hadamard": False}),
    ("fp8_block", {}),
    ("fp8", {}),
    ("fp8", {"format": "e5m2"}),
    ("mxfp8", {}),
    ("mxfp8", {"format": "e5m2"}),
    ("mxfp8", {"scale": "bf16"}),
    ("mxfp6", {}),
    ("mxfp6", {"format": "e3m2"}),
    ("mxfp6", {"scale": "bf16"}),
    ("mxfp4", {}),
    ("mxfp4", {"scale": "bf16"}),
    ("thc", {}),
    ("thc", {"rounding": "nearest"}),
    ("thc", {"levels": "uniform"}),
    ("tahquant", {}),
    ("tahquant6", {}),
)


def gaussian(numel: int = ELEMENTS) -> Tensor:
    """Return (numel,) of N(0, 0.02^2), in bf16's precision."""
    return (torch.randn(numel, generator=torch.Generator().manual_seed(9)) * 0.02).bfloat16().float()


def tensor_parallel(numel: int = ELEMENTS, channels: int = 1024) -> Tensor:
    """Return (numel,) like what a row-parallel layer sums: most values near zero, few channels far out.

    Laplace, tokens and channels of log-normal size, 0.4 % of the channels 40 larger, in bf16's precision.
    """
    rng, tokens = torch.Generator().manual_seed(0), numel // channels
    sizes = torch.exp(0.7 * torch.randn(1, channels, generator=rng))
    sizes = sizes + 40 * (torch.rand(1, channels, generator=rng) < 0.004)
    magnitude = -torch.log(torch.rand(tokens, channels, generator=rng).clamp(min=1e-7))
    sign = torch.sign(torch.rand(tokens, channels, generator=rng) - 0.5)
    x = 2e-3 * torch.exp(0.6 * torch.randn(tokens, 1, generator=rng)) * sizes * sign * magnitude
    return x.reshape(-1).bfloat16().float()


def skewed(numel: int = ELEMENTS, run: int = 256) -> Tensor:
    """Return (numel,) like gradients: runs of 256 whose size wanders over orders of magnitude, in bf16's precision."""
    rng = torch.Generator().manual_seed(1)
    size, wander = [], 0.0
    for step in torch.randn(numel // run, generator=rng).tolist():
        wander = 0.97 * wander + (1 - 0.97**2) ** 0.5 * step
        size.append(1.2 * wander)
    x = 1e-3 * torch.exp(torch.tensor(size))[:, None] * torch.randn(numel // run, run, generator=rng)
    return x.reshape(-1).bfloat16().float()


DATA = {"gaussian": gaussian, "tensor-parallel": tensor_parallel, "skewed": skewed}


def error(codec: Codec, x: Tensor) -> float:
    """Return the squared error of ``x`` (n,), encoded and decoded once, over its squared norm."""
    lost = codec.decompress(codec.compress(x), x.shape).double() - x.double()
    return float(lost.square().sum() / x.double().square().sum())


def _rows(numel: int) -> list[dict[str, object]]:
    tensors = {name: make(numel) for name, make in DATA.items()}
    rows: list[dict[str, object]] = []
    for name, options in CODECS:
        codec = fl.codecs.get(name, **options)
        row: dict[str, object] = {
            "codec": name,
            "options": ", ".join(f"{key}={value}" for key, value in options.items()),
            "bits": round(8 * sum(section.plane.nbytes for section in codec.bare.wire(numel).sections) / numel, 3),
        }
        rows.append(row | {data: f"{error(codec, x):.2e}" for data, x in tensors.items()})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write its result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=ELEMENTS, help="elements of each tensor; a multiple of 1024")
    parser.add_argument("--out", type=Path, help="folder for result files; without it nothing is written")
    parser.add_argument("--hardware", help="name of the machine in the file names")
    args = parser.parse_args(arguments)
    if args.numel < 1024 or args.numel % 1024:
        parser.error(f"--numel {args.numel}: expected a multiple of 1024")
    rows, title = _rows(args.numel), f"Squared error over squared norm, {args.numel} elements"
    print(table(title, rows))
    if args.out:
        write(args.out, "errors", title, Environment.here(torch.device("cpu"), args.hardware), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
