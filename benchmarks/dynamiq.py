"""DynamiQ's tables on this implementation: errors by method, by budget and by ingredient, and traffic of memory.

    python -m benchmarks.dynamiq --out benchmarks/results

Errors (tables 3, 4 and 6) are vNMSE of one all-reduce of 8 workers, in this process, without error feedback: of
synthetic gradients, and of those that the workers have in a training step of the example's GPT and of the ResNet, after
a hundred steps with exact sums. Traffic (table 2) is the bytes that the codec's calls read and write in an
all-reduce, by element. Every result is a function of the arguments alone. Needs no quiet machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import driver
from benchmarks.hops import METHODS, Method, error, gaussian, method_error, skewed
from benchmarks.training.workloads import make_workload
from fusionlayer import native

__all__ = ["BUDGETS", "LADDER", "main", "recorded", "traffic"]

WORKERS = 8
ELEMENTS = 1 << 18
MODELS = {"gpt-small": 100, "resnet": 100}
LADDER = ("nonuniform", "variable", "hierarchical", "correlated")
BUDGETS = (3, 4, 5, 6)
WORLDS = (2, 4, 8, 16)


def recorded(model: str, workers: int, steps: int) -> list[Tensor]:
    """Return each worker's gradient (n,) in bf16's precision after ``steps`` steps of data-parallel training."""
    workload = make_workload(model, 0, 0)
    net = workload.model()
    optimizer = workload.optimizer(net)
    gradients: list[Tensor] = []
    for step in range(steps + 1):
        gradients = []
        for workload.rank in range(workers):  # each has data of its own
            optimizer.zero_grad(set_to_none=True)
            net(*workload.batch(step)).backward()
            gradients.append(torch.cat([p.grad.view(-1) for p in net.parameters() if p.grad is not None]))
        mean, start = torch.stack(gradients).mean(0), 0
        for p in net.parameters():
            if p.grad is not None:
                p.grad.copy_(mean[start : start + p.numel()].view_as(p))
                start += p.numel()
        optimizer.step()
    return [gradient.bfloat16().float() for gradient in gradients]


def data(steps: dict[str, int], numel: int) -> dict[str, list[Tensor]]:
    """Return what each worker has, by name."""
    made = {"skewed": skewed(WORKERS, numel), "gaussian": gaussian(WORKERS, numel)}
    return made | {f"{model}, step {n}": recorded(model, WORKERS, n) for model, n in steps.items()}


def bits_of(method: Method, numel: int = ELEMENTS) -> float:
    """Return bits for each value of a message of ``numel``."""
    return round(8 * sum(section.plane.nbytes for section in method.make().wire(numel).sections) / numel, 3)


def errors(inputs: dict[str, list[Tensor]], methods: dict[str, Method]) -> Iterator[dict[str, Any]]:
    """Yield a row for each method, with a column for each kind of data and collective.

    What has a collective of its own stands in the columns of the ring.
    """
    for name, method in methods.items():
        row: dict[str, Any] = {"method": name, "bits": bits_of(method, ELEMENTS)}
        for kind, parts in inputs.items():
            for algorithm in ("ring", "butterfly") if method.algorithm is None else ("ring",):
                row[f"{kind}, {algorithm}"] = f"{method_error(method, algorithm, parts):.2e}"
        yield row


def ladder(inputs: dict[str, list[Tensor]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each ingredient that is added, at 4 bits in a ring."""
    for rung in range(len(LADDER) + 1):
        method = Method("dynamiq", {"bits": 4, **dict.fromkeys(LADDER[rung:], False)})
        row: dict[str, Any] = {"method": f"+ {LADDER[rung - 1]}" if rung else "even levels, 4 bits each"}
        row["bits"] = bits_of(method, ELEMENTS)
        yield row | {f"{kind}, ring": f"{error('ring', method.make(), parts):.2e}" for kind, parts in inputs.items()}


# ---- traffic --------------------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes that the codec core's calls read and write, as their arguments have them."""
    total = [0]

    def count(verb: Callable[..., Any], read: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            total[0] += read(*args, **kwargs)
            return verb(*args, **kwargs)

        return call

    def size(*tensors: Tensor | None) -> int:
        return sum(t.nbytes for t in tensors if t is not None)

    reads: dict[str, Callable[..., int]] = {
        "encode": lambda spec, offsets, x, residual, bodies: size(x, bodies),
        "decode": lambda spec, offsets, bodies, out: size(bodies, out),
        "decode_sum": lambda spec, offsets, bodies, out, *, add: size(bodies, out) + size(out) * add,
        "recode": lambda spec, offsets, bodies, x, residual, body: size(bodies, x, body),
        "dynamiq_stats": lambda x, residual=None: size(x),
    }
    with ExitStack() as patches:
        for name, read in reads.items():
            patches.enter_context(patch.object(native, name, count(getattr(native, name), read)))
        yield total


def traffic(method: Method, world: int, numel: int = ELEMENTS) -> float:
    """Return the bytes for each element that a rank's codec calls read and write in a ring."""
    inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    with counted() as total:
        error("ring", method.make(), inputs)
    return total[0] / world / numel


def traffic_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each method: bytes by element and world, and what is sent by element, w."""
    for name in ("bf16", "mxfp8", "dynamiq"):
        row: dict[str, Any] = {"method": name, "w": round(bits_of(METHODS[name], ELEMENTS) / 8, 3)}
        yield row | {str(world): round(traffic(METHODS[name], world), 2) for world in WORLDS}


# ---- command --------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write their result files."""
    parser = driver.make_parser("dynamiq", __doc__)
    parser.add_argument("--numel", type=int, default=ELEMENTS, help="elements of synthetic tensors; a multiple of 256")
    parser.add_argument("--steps", type=int, help="training steps before gradients are recorded; default 100")
    driver.add_options(parser)
    args = parser.parse_args(arguments)
    if args.numel < 256 or args.numel % 256:
        parser.error(f"--numel {args.numel}: expected a multiple of 256")
    torch.set_num_threads(1)
    inputs = data(MODELS if args.steps is None else dict.fromkeys(MODELS, args.steps), args.numel)
    budgets = {f"dynamiq, {bits} bits": Method("dynamiq", {"bits": bits}) for bits in BUDGETS if bits != 5}
    tables: dict[str, tuple[str, Callable[[], Iterator[dict[str, Any]]]]] = {
        "dynamiq-methods": ("vNMSE of an all-reduce, 8 workers", partial(errors, inputs, METHODS | budgets)),
        "dynamiq-ladder": ("vNMSE of a ring of 8 workers at 4 bits, by ingredient", partial(ladder, inputs)),
        "dynamiq-traffic": ("Bytes read and written for each element, by workers in a ring", traffic_rows),
    }
    for theme, (title, make) in tables.items():
        rows = list(make())
        driver.finish(args, theme, title, driver.begin(args), rows)
    return 0


if __name__ == "__main__":
    driver.leave(main)
