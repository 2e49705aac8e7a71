"""How many tensors a sparsifier loses when it comes after fusion: SAFusion, section 2.4 and figure 3.

    python -m benchmarks.missing --models gpt,resnet --out benchmarks/results

Trains each model on one worker, and at every step asks what top-k, without and with error feedback, would have sent: of
each tensor by itself (ahead of fusion), and of buffers of ever more tensors (behind). A tensor is missing when none of
its elements is among those sent. Fusion degree 0 % is a buffer for each tensor, 100 % one buffer for all. Needs no
quiet machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import driver
from benchmarks.arguments import comma_separated, count, one_of
from benchmarks.training.workloads import MODELS, make_workload
from fusionlayer.cli import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["main", "missing_rates"]

DEGREES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
WARM_UP = 5


class Behind:
    """Top-k over buffers of equally many tensors.

    Args:
        sizes: elements of each tensor, in the order of backward.
        degree: part of all tensors that a buffer holds; 0: one tensor.
        density: part of a buffer's elements that is sent.
        feedback: what is not sent is added to the next gradient.
    """

    def __init__(self, sizes: Sequence[int], degree: float, density: float, feedback: bool) -> None:
        self._per_buffer = max(1, round(degree * len(sizes)))
        self._sizes = sizes
        self._density = density
        self._feedback = feedback
        self._residual = torch.zeros(sum(sizes))

    def step(self, gradient: Tensor) -> int:
        """Return how many tensors are missing of what is sent of ``gradient`` (all elements,), flat."""
        wanted = self._residual.add_(gradient) if self._feedback else gradient.clone()
        missing = begin = 0
        for first in range(0, len(self._sizes), self._per_buffer):
            sizes = self._sizes[first : first + self._per_buffer]
            buffer = wanted[begin : begin + sum(sizes)]
            kept = buffer.abs().topk(max(1, int(self._density * buffer.numel())), sorted=False).indices
            ends = torch.tensor(sizes).cumsum(0)
            missing += len(sizes) - torch.bucketize(kept, ends, right=True).unique().numel()
            buffer[kept] = 0
            begin += buffer.numel()
        return missing


def missing_rates(model: str, density: float, steps: int) -> list[dict[str, Any]]:
    """Return rows: the part of all tensors missing in the mean step, by fusion degree, without and with feedback."""
    workload = make_workload(model, seed=0, rank=0)
    module = workload.model()
    optimizer = workload.optimizer(module)
    parameters = list(module.parameters())[::-1]
    sizes = [p.numel() for p in parameters]
    cases = [(degree, feedback) for feedback in (False, True) for degree in DEGREES]
    behind = [Behind(sizes, degree, density, feedback) for degree, feedback in cases]
    lost = [0] * len(cases)
    for step in range(WARM_UP + steps):
        inputs, targets = workload.batch(step)
        optimizer.zero_grad()
        module(inputs, targets).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        for i, buffers in enumerate(behind):
            lost[i] += buffers.step(gradient) * (step >= WARM_UP)
        optimizer.step()
    return [
        {"model": model, "feedback": feedback, "degree": degree, "missing": round(total / steps / len(parameters), 4)}
        for (degree, feedback), total in zip(cases, lost, strict=True)
    ]


def picture(rows: Sequence[dict[str, Any]], density: float) -> Figure:
    """Return the missing rate against the fusion degree, a line for each model."""
    figure = drawing.figure(7.5, 3.2)
    axes = figure.subplots()
    for i, (model, feedback) in enumerate(dict.fromkeys((row["model"], row["feedback"]) for row in rows)):
        mine = [row for row in rows if (row["model"], row["feedback"]) == (model, feedback)]
        x, y = ([100 * row[key] for row in mine] for key in ("degree", "missing"))
        label = f"{model}{', with feedback' if feedback else ''}"
        axes.plot(
            x, y, color=drawing.PALETTE[i], marker="os^Dv"[i % 5], linestyle=":" if feedback else "-", label=label
        )
    axes.plot([0, 100], [0, 0], color=drawing.GREY, label="ahead of fusion")
    axes.set(
        xlabel="tensors that a buffer holds, % of all",
        ylabel="tensors of which nothing\nis sent, % of all",
        ylim=(-3, 100),
    )
    title = f"Tensors of which top-k behind fusion sends nothing, density {density:g}"
    figure.suptitle(title, x=0.01, ha="left")
    drawing.name_lines(axes)
    return figure


def main() -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("missing", __doc__)
    models = comma_separated(one_of(list(MODELS)))
    parser.add_argument("--models", type=models, default=("gpt", "resnet"), help="default gpt,resnet")
    parser.add_argument("--density", type=float, default=0.01, help="part of the elements that is sent (default 0.01)")
    parser.add_argument("--steps", type=count(), default=40, help="steps that are counted (default 40)")
    driver.add_options(parser)
    options = parser.parse_args()
    if not 0 < options.density <= 1:
        parser.error(f"--density {options.density}; expected a number above 0, at most 1")
    rows: list[dict[str, Any]] = []
    for model in driver.follow("benchmarks.missing", options.models):
        rows += missing_rates(model, options.density, options.steps)
    title = f"Missing tensors, top-k of density {options.density:g}, mean of {options.steps} steps"
    pictures = {"missing": lambda: picture(rows, options.density)}
    driver.finish(options, "missing", title, driver.begin(options), rows, pictures=pictures)
    return 0


if __name__ == "__main__":
    driver.leave(main)
