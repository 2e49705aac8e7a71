"""What codecs lose: squared error over squared norm (vNMSE), beside the bits of an element.

    python -m benchmarks.errors --out benchmarks/results

Of synthetic tensors, and of what the small GPT of the examples would send after some hundred steps of training on
Python's standard library: the activations that a rank of two adds up behind layers cut by rows, their counterparts in
backward at layers cut by columns, and the gradients of its parameters. One encoding and decoding of each tensor,
without error feedback. Needs no quiet machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

import fusionlayer as fl
from benchmarks import driver
from examples.gpt import GPT, Block, Config, Corpus
from fusionlayer.codecs import Codec
from fusionlayer.codecs.tahquant import TAHQuant

__all__ = ["DATA", "CODECS", "error", "gaussian", "main", "recorded", "skewed", "tensor_parallel"]

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
    ("qsdp", {}),
    ("qsdp", {"bits": 4}),
    ("onebit", {}),
    ("powersgd", {}),
    ("powersgd", {"rank": 32}),
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


def recorded(steps: int, batch: int = 16) -> dict[str, Tensor]:
    """Return what the example GPT, trained for ``steps`` steps, sends in one more, by kind; flat f32 each.

    "gpt activations" are partial sums of rank 0 of two behind the layers cut by rows, "gpt input gradients" those of
    backward at the layers cut by columns, block after block; "gpt gradients" are those of all parameters.
    """
    torch.manual_seed(0)
    config, corpus, data = Config(), Corpus(), torch.Generator().manual_seed(1)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    activations: list[Tensor] = []
    gradients: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        model(*corpus.sample(batch, config.context, data)).backward()

    for number in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (number + 1) / 50)
        step()
        optimizer.step()

    def behind_rows(layer: torch.nn.Linear, inputs: tuple[Tensor, ...]) -> None:
        half = layer.in_features // 2
        activations.append(functional.linear(inputs[0][..., :half], layer.weight[:, :half]).detach().flatten())

    def at_columns(parts: int) -> Callable[[torch.nn.Linear, object, tuple[Tensor, ...]], None]:
        def hook(layer: torch.nn.Linear, _: object, given: tuple[Tensor, ...]) -> None:
            mine = given[0].unflatten(-1, (parts, 2, -1))[..., 0, :].flatten(-2)
            weight = layer.weight.unflatten(0, (parts, 2, -1))[:, 0].flatten(0, 1)
            gradients.append((mine @ weight).detach().flatten())

        return hook

    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention_out.register_forward_pre_hook(behind_rows)
        block.perceptron_out.register_forward_pre_hook(behind_rows)
        block.attention_in.register_full_backward_hook(at_columns(3))
        block.perceptron_in.register_full_backward_hook(at_columns(1))
    step()
    return {
        "gpt activations": torch.cat(activations),
        "gpt input gradients": torch.cat(gradients),
        "gpt gradients": torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
    }


DATA = {"gaussian": gaussian, "tensor-parallel": tensor_parallel, "skewed": skewed}


def error(codec: Codec, x: Tensor) -> float:
    """Return the squared error of ``x`` (n,), encoded and decoded once, over its squared norm."""
    return _loss(codec.decompress(codec.compress(x), x.shape), x)


def _loss(decoded: Tensor, x: Tensor) -> float:
    return float((decoded.double() - x.double()).square().sum() / x.double().square().sum())


def _int8_per_tensor(x: Tensor) -> Tensor:
    """Return ``x`` (n,) rounded to 255 multiples of one step, which codecs with a scale for each block improve on."""
    step = x.abs().max() / 127
    return (x / step).round() * step


def _as_wide(codec: Codec, data: str) -> Codec:
    """Return the codec for tokens that are as wide as those of the data."""
    return replace(codec, channels=Config.width) if data.startswith("gpt") and isinstance(codec, TAHQuant) else codec


def _rows(numel: int, steps: int) -> list[dict[str, object]]:
    tensors = {name: make(numel) for name, make in DATA.items()} | (recorded(steps) if steps else {})
    rows: list[dict[str, object]] = []
    for name, options in CODECS:
        codec = fl.codecs.get(name, **options)
        row: dict[str, object] = {
            "codec": name,
            "options": ", ".join(f"{key}={value}" for key, value in options.items()),
            "bits": round(8 * sum(section.plane.nbytes for section in codec.bare.wire(numel).sections) / numel, 3),
        }
        lost = {data: f"{error(_as_wide(codec, data), x):.2e}" for data, x in tensors.items()}
        rows.append(row | lost)
    plain: dict[str, object] = {"codec": "int8 in torch", "options": "one scale per tensor", "bits": 8.0}
    rows.append(plain | {data: f"{_loss(_int8_per_tensor(x), x):.2e}" for data, x in tensors.items()})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write its result files."""
    parser = driver.make_parser("errors", __doc__)
    parser.add_argument("--numel", type=int, default=ELEMENTS, help="elements of each tensor; a multiple of 1024")
    parser.add_argument("--steps", type=int, default=400, help="of training before tensors are recorded; 0: none are")
    driver.add_options(parser)
    args = parser.parse_args(arguments)
    if args.numel < 1024 or args.numel % 1024:
        parser.error(f"--numel {args.numel}: expected a multiple of 1024")
    if args.steps < 0:
        parser.error(f"--steps {args.steps}: expected at least 0")
    torch.set_num_threads(1)  # results do not depend on the number of cores
    rows, title = _rows(args.numel, args.steps), f"Squared error over squared norm, {args.numel} elements"
    title += f"; a GPT after {args.steps} steps" if args.steps else ""
    driver.finish(args, "errors", title, driver.begin(args), rows)
    return 0


if __name__ == "__main__":
    driver.leave(main)
