"""What a step of training changes in bf16 weights, and the bytes of it as codec ``delta`` sends it.

    python -m benchmarks.changes --out benchmarks/results

GPTs of the examples learn by AdamW in f32, and their weights travel in bf16, as FSDP2 sends them in mixed precision:
each block a message, and what is outside of blocks one more. The training goes on from each learning rate to the next;
at each some steps come first that are not counted. The bound is the order-0 entropy of the differences of a step, as
integers in the order of the values, one distribution for the whole model. Needs no quiet machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from examples.gpt import GPT, Config, Corpus
from fusionlayer.codecs.delta import Delta

__all__ = ["MODELS", "entropy", "main", "message", "steps", "summarize"]

MODELS = {
    "0.8 M, that of the FSDP2 example": Config(),
    "10.9 M": Config(width=384, layers=6, heads=6, context=128, tied=False),
}
_CODEC = Delta(header=False)
Step = tuple[float, list[Tensor], list[Tensor]]


def steps(config: Config, rates: Sequence[float], warmup: int, counted: int) -> Iterator[Step]:
    """Yield for each counted step its learning rate and the parts' weights before and after it, in bf16."""
    torch.manual_seed(0)
    model, corpus, generator = GPT(config), Corpus(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    inside = [list(block.parameters()) for block in model.blocks]
    rest = {*model.parameters()}.difference(*inside)
    parts = [*inside, [p for p in model.parameters() if p in rest]]
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        for number in range(warmup + counted):
            before = [_joined(part) for part in parts]
            optimizer.zero_grad()
            model(*corpus.sample(8, config.context, generator)).backward()
            optimizer.step()
            if number >= warmup:
                yield rate, before, [_joined(part) for part in parts]


def _joined(part: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in part]).bfloat16()


def message(x: Tensor, base: Tensor) -> int:
    """Return the bytes of what makes ``x`` (n,) of ``base``, heads included; the result is checked."""
    payload = torch.zeros(_CODEC.wire(x.numel(), x.dtype).capacity, dtype=torch.uint8)
    _CODEC.encode_change(x, base, payload)
    out = torch.empty_like(x)
    _CODEC.apply_change(payload, base, out)
    if not torch.equal(out.view(torch.int16), x.view(torch.int16)):
        raise SystemExit("a change has lost bits")
    return _CODEC.used_bytes(payload, x.numel(), x.dtype)


def entropy(x: Tensor, base: Tensor) -> float:
    """Return the bits of an element of the differences of two bf16 tensors (n,), as independent of one another."""
    counts = torch.unique(_ordered(x) - _ordered(base), return_counts=True)[1].double() / x.numel()
    return float(-(counts * counts.log2()).sum())


def _ordered(x: Tensor) -> Tensor:
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, bits ^ 0x7FFF, bits)


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each model and learning rate: medians over steps."""
    lines = []
    for model, rate in dict.fromkeys((row["model"], row["lr"]) for row in rows):
        found = [row for row in rows if (row["model"], row["lr"]) == (model, rate)]
        middle = {key: statistics.median(row[key] for row in found) for key in ("changed", "bits", "entropy")}
        lines.append(
            {
                "GPT": model,
                "learning rate": f"{rate:g}",
                "steps": len(found),
                "changed, %": f"{100 * middle['changed']:.2f}",
                "entropy, bits": f"{middle['entropy']:.4f}",
                "sent, bits": f"{middle['bits']:.4f}",
                "of the entropy": f"{statistics.median(row['bits'] / row['entropy'] for row in found):.3f}",
                "times fewer than bf16": f"{16 / middle['bits']:.1f}",
                "least": f"{min(16 / row['bits'] for row in found):.1f}",
            }
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write its result files."""
    parser = driver.make_parser("changes", __doc__)
    rates = (1e-3, 1e-4, 1e-5, 1e-6)
    parser.add_argument("--lrs", type=comma_separated(float), default=rates, help="in turn (1e-3,1e-4,1e-5,1e-6)")
    parser.add_argument("--warmup", type=count(), default=50, help="steps at each that are not counted (50)")
    parser.add_argument("--steps", type=count(), default=10, help="at each that are (10)")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="(all)")
    driver.add_options(parser)
    args = parser.parse_args(arguments)
    environment = driver.begin(args)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in args.models:
        for rate, before, after in steps(MODELS[name], args.lrs, args.warmup, args.steps):
            nbytes = sum(message(x, base) for x, base in zip(after, before, strict=True))
            x, base = torch.cat(after), torch.cat(before)
            changed = float((x.view(torch.int16) != base.view(torch.int16)).float().mean())
            bits = 8 * nbytes / x.numel()
            rows.append({"model": name, "lr": rate, "changed": changed, "bits": bits, "entropy": entropy(x, base)})
    driver.finish(args, "changes", "Changes of bf16 weights in a step of AdamW", environment, rows, summarize(rows))
    return 0


if __name__ == "__main__":
    driver.leave(main)
