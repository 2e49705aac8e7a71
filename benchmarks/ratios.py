"""What lossless codecs make of tensors: ratios of ``zip`` and ``rans`` on synthetic data and on a GPT that was trained.

    python -m benchmarks.ratios --out benchmarks/results

A ratio is bytes of the elements by bytes of the message, its heads included. The bound is that of any code that leaves
all but exponents as they are: the entropy of the exponents, one distribution for the tensor. The GPT is that of the
examples, on real text, with AdamW; its tensors are taken after the last step and rounded to bf16, as they travel in
mixed precision. In f16 the symbols of ``rans`` have two bits of the mantissa, too. The other tables are ZipCCL's table
1 and equation 5. Needs no quiet machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

import fusionlayer as fl
from benchmarks import driver
from benchmarks.arguments import count
from benchmarks.errors import skewed, tensor_parallel
from benchmarks.report import table
from examples.gpt import GPT, Config, Corpus
from fusionlayer.codecs import Codec
from fusionlayer.codecs.zip import Zip, window_base

__all__ = ["bound", "coverage", "main", "ratio", "trained"]

ELEMENTS = 1 << 20
STEPS = 300
SIGMAS = (1.0, 0.02, 0.7, math.sqrt(2), 3e-5)
PUBLISHED = (29.9, 57.2, 75.7, 85.5, 90.4, 95.0, 97.5)
CODECS: dict[str, Callable[[], Codec]] = {
    "zip": Zip,
    "zip, window": lambda: Zip(exponents="window"),
    "zip, table": lambda: Zip(exponents="table"),
    "rans": lambda: fl.codecs.get("rans"),
}
_EXPONENT_BITS = {torch.float32: 8, torch.bfloat16: 8, torch.float16: 5}


def gaussian(numel: int, sigma: float = 1.0) -> Tensor:
    """Return (numel,) f32 of N(0, sigma^2)."""
    return sigma * torch.randn(numel, generator=torch.Generator().manual_seed(9))


def synthetic(numel: int = ELEMENTS) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors (numel,)."""
    for dtype in _EXPONENT_BITS:
        yield f"Gaussian, sigma 1, {_name(dtype)}", gaussian(numel).to(dtype)
    yield "Gaussian, sigma 0.02", gaussian(numel, 0.02).bfloat16()
    yield "ReLU of a Gaussian", gaussian(numel).relu().bfloat16()
    yield "GELU of a Gaussian", nn.functional.gelu(gaussian(numel)).bfloat16()
    yield "Laplace", torch.distributions.Laplace(0.0, 1.0).icdf(0.5 + 0.499999 * torch.erf(gaussian(numel))).bfloat16()
    yield "skewed gradients", skewed(numel).bfloat16()
    yield "tensor-parallel activations", tensor_parallel(numel).bfloat16()
    yield "1 of 100 not zero", (gaussian(numel) * (gaussian(2 * numel)[numel:] > 2.326)).bfloat16()
    yield "every bit pattern", torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)


def trained(steps: int = STEPS) -> Iterator[tuple[str, Tensor]]:
    """Yield names and flat bf16 tensors of the examples' GPT after so many steps on the text that they train on."""
    torch.manual_seed(0)
    config, corpus, generator = Config(), Corpus(), torch.Generator().manual_seed(1)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = corpus.sample(8, config.context, generator)
        seen = _inputs(model) if step == steps - 1 else None
        model(tokens, targets).backward()
        if seen is None:
            optimizer.step()
    parameters = list(model.parameters())
    yield "GPT, weights", _joined(p.detach() for p in parameters if p.dim() > 1)
    yield "GPT, gradients", _joined(p.grad for p in parameters if p.grad is not None)
    yield "GPT, gradients of its embeddings", _joined([model.places.weight.grad, model.tokens.weight.grad])
    assert seen is not None
    for kind, found in seen.items():
        yield f"GPT, {kind}", _joined(found)


def _inputs(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return lists that the next forward fills with what goes into the model's linear layers, by the kind of it."""
    kinds = {
        "attention_in": "normalized activations",
        "perceptron_in": "normalized activations",
        "attention_out": "attention's outputs",
        "perceptron_out": "activations after GELU",
    }
    seen: dict[str, list[Tensor]] = {kind: [] for kind in kinds.values()}
    for name, module in model.named_modules():
        kind = kinds.get(name.rpartition(".")[2])
        if kind is not None:
            module.register_forward_pre_hook(lambda _, inputs, kind=kind: seen[kind].append(inputs[0].detach()))
    return seen


def _joined(tensors: object) -> Tensor:
    return torch.cat([x.flatten() for x in tensors]).bfloat16()  # type: ignore[attr-defined]


def ratio(codec: Codec, x: Tensor) -> float:
    """Return bytes of ``x`` (n,) by bytes of its message."""
    payload = codec.bare.compress(x)
    if not torch.equal(_bits(codec.bare.decompress(payload, x.shape, x.dtype)), _bits(x)):
        raise SystemExit(f"{codec} has lost bits of a tensor")
    return x.nbytes / codec.bare.used_bytes(payload, x.numel(), x.dtype)


def bound(x: Tensor) -> float:
    """Return the ratio at which exponents take their entropy and all other bits are as they are."""
    counts = torch.bincount(_exponents(x))
    shares = counts[counts > 0] / x.numel()
    bits = 8 * x.element_size()
    return float(bits / (bits - _EXPONENT_BITS[x.dtype] - (shares * shares.log2()).sum()))


def coverage(x: Tensor) -> list[float]:
    """Return the percentages of ``x`` (n,) that have one of its 1, 2, .. 7 most frequent exponents."""
    counts = torch.bincount(_exponents(x), minlength=7).sort(descending=True).values[:7]
    return [float(share) for share in 100 * counts.cumsum(0) / x.numel()]


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype is torch.float32 else torch.int16)


def _exponents(x: Tensor) -> Tensor:
    bits = _EXPONENT_BITS[x.dtype]
    return _bits(x).to(torch.int64) >> (8 * x.element_size() - 1 - bits) & (1 << bits) - 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write their result files."""
    parser = driver.make_parser("ratios", __doc__)
    parser.add_argument("--numel", type=count(1 << 16), default=ELEMENTS, help="elements of each synthetic tensor")
    parser.add_argument("--steps", type=count(), default=STEPS, help="of the GPT's training")
    driver.add_options(parser)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # so that the training is the same on every machine
    rows = []
    for source in (synthetic(args.numel), trained(args.steps)):
        for name, x in source:
            row: dict[str, object] = {"tensor": name, "elements": x.numel(), "top 7, %": f"{coverage(x)[-1]:.1f}"}
            row |= {codec: f"{ratio(make(), x):.3f}" for codec, make in CODECS.items()}
            rows.append(row | {"bound": f"{bound(x):.3f}"})
    found = coverage(gaussian(8 << 20).bfloat16())
    covered: list[dict[str, object]] = [
        {"top k": str(k + 1), "published, %": PUBLISHED[k], "found, %": f"{found[k]:.2f}"} for k in range(7)
    ]
    bases: list[dict[str, object]] = [
        {
            "sigma": f"{sigma:.4g}",
            "log2(sigma) - 5.3607": f"{math.log2(sigma) - 5.3607:.3f}",
            "lowest exponent": window_base(sigma) - 127,
            "biased": window_base(sigma),
        }
        for sigma in SIGMAS
    ]
    title = f"Ratios of lossless codecs; the GPT after {args.steps} steps"
    more = table("Exponents of N(0, 1) in bf16", covered), table("Windows of seven exponents", bases)
    driver.finish(args, "ratios", title, driver.begin(args), rows, more=more)
    return 0


if __name__ == "__main__":
    driver.leave(main)
