"""One of the workers that measure a profile: ``python -m benchmarks.simulate.worker JOB``; rank 0 prints JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import fusionlayer as fl
from fusionlayer import context

from .costs import measure_call, measure_codecs, measure_copy, measure_link
from .step import measure_step

__all__ = ["Job", "main"]


@dataclass(frozen=True)
class Job:
    """What is measured.

    Attributes:
        model: whose step, codecs and copies are measured, a name of ``benchmarks.training.workloads.MODELS``; or None.
        elements: sizes of what codecs are given.
        nbytes: sizes of transfers over the link between two workers; without any, the link is not measured.
        steps: of the model that count.
        repeats: calls for each size.
    """

    model: str | None
    elements: tuple[int, ...]
    nbytes: tuple[int, ...]
    steps: int
    repeats: int


def main() -> None:
    """Run the job in the command line."""
    job = Job(**json.loads(sys.argv[1]))
    fl.init(timeout=120)
    found: dict[str, Any] = {"call": measure_call(context.transport(), job.repeats)}
    if job.nbytes:
        found["link"] = measure_link(context.transport(), job.nbytes, job.repeats)
    if job.model is not None:
        found["model"] = measure_step(job.model, fl.rank(), max(2, job.steps // 4), job.steps)
        found["copy"] = measure_copy(job.elements, job.repeats)
        found["codecs"] = measure_codecs(job.elements, job.repeats)
    every: list[dict[str, Any]] = [{}] * fl.size()
    dist.all_gather_object(every, found)
    if fl.rank() == 0:
        print(json.dumps({**mean(every), "threads": torch.get_num_threads(), "workers": fl.size()}), flush=True)
    dist.barrier()
    fl.shutdown()


def mean(values: list[Any]) -> Any:
    """Return one structure for many of the same shape: the mean of their numbers, what is no number from the first."""
    first = values[0]
    if isinstance(first, dict):
        return {key: mean([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [mean(list(items)) for items in zip(*values, strict=True)]
    return sum(values) / len(values) if isinstance(first, float) else first


if __name__ == "__main__":
    main()
