"""One of the workers that measure a profile: ``python -m benchmarks.simulate.worker JOB``; rank 0 prints JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch

import fusionlayer as fl
from benchmarks.training.workloads import make_workload
from benchmarks.variants import codec_presets
from fusionlayer import context
from fusionlayer.planning.profiler import (
    average,
    measure_call,
    measure_codecs,
    measure_copy,
    measure_disturbance,
    measure_link,
    measure_step,
)

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
    found: dict[str, Any] = {
        "call": measure_call(context.transport(), job.repeats),
        "disturbance": measure_disturbance(context.transport(), job.repeats),
    }
    if job.nbytes:
        found["link"] = measure_link(context.transport(), job.nbytes, job.repeats)
    if job.model is not None:
        workload = make_workload(job.model, 0, fl.rank())
        model = workload.model()
        optimizer = workload.optimizer(model)
        found["model"] = measure_step(model, optimizer, workload.batch, max(2, job.steps // 4), job.steps)
        found["copy"] = measure_copy(job.elements, job.repeats)
        codecs = {name: fl.codecs.get(name) for name in codec_presets()}
        found["codecs"] = measure_codecs(codecs, job.elements, job.repeats)
    found = average(found, context.transport())
    if fl.rank() == 0:
        print(json.dumps({**found, "threads": torch.get_num_threads(), "workers": fl.size()}), flush=True)
    context.transport().barrier()
    fl.shutdown()


if __name__ == "__main__":
    main()
