"""What long-lived ranks keep of the jobs that they have done: memory, descriptors, threads, files, keys of the store.

    python -m benchmarks.faults.soak --minutes 30 --out benchmarks/results

Jobs of all fronts follow each other in the same processes: each joins, trains a few steps and leaves; one of five has a
fault. The controller measures between jobs, from outside. A growth is the slope after warm-up, for 1000 jobs, with its
95 % interval.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import driver
from benchmarks.arguments import count

from .controller import Run, local_field
from .isolation import leave
from .job import Job, Phase
from .worker import EVERY, SOAK

__all__ = ["growth", "kept_by", "main"]

WARM_UP = 0.2
"""Share of the measurements that are left out at the beginning."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("faults.soak", __doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="(30)")
    parser.add_argument("--ranks", type=count(2), default=3, help="(3)")
    driver.add_options(parser, smoke=True)
    options = parser.parse_args(arguments)
    minutes = 0.2 if options.smoke else options.minutes
    environment = driver.begin(options)
    samples: list[dict[str, Any]] = []

    def measure(run: Run) -> None:
        end = time.monotonic() + 60 * minutes
        run.attacked = run.now
        for number in range(0, 10**9, EVERY):
            ranks = range(options.ranks)
            for rank in ranks:
                run.await_hold(rank, Phase("measured", number))
            samples.append({"jobs": number, **_measured(run)})
            done = time.monotonic() >= end and len(samples) >= 4
            for rank in ranks:
                run.release(rank, not done)
            if done:
                return

    job = Job(SOAK, options.ranks, steps=3, timeout=10.0, keeper="agent")
    with local_field() as field:
        run = field.run(job, measure)
    for rank, outcome in enumerate(run.outcomes):
        if outcome.kind != "finished" or outcome.status:
            raise SystemExit(
                f"rank {rank} has {outcome.kind} with status {outcome.status}: {outcome.text}\n{outcome.log}"
            )
    told = [outcome.facts.get("told", 0) for outcome in run.outcomes]
    title = f"What {options.ranks} ranks keep of {samples[-1]['jobs']} jobs, {told} of which have failed on the ranks"
    quantities = [key for key in samples[0] if key != "jobs"]
    shown = [growth(quantity, samples) for quantity in quantities]
    driver.finish(options, "faults-soak", title, environment, samples, shown)
    return 0


def _measured(run: Run) -> dict[str, float]:
    found: dict[str, float] = {}
    for rank, pid in sorted(run.pids.items()):
        found |= kept_by(pid, f"rank {rank}")
    found["temporary files"] = len(list(run.folder.rglob("*")))
    found["files in /dev/shm"] = sum("fusionlayer" in path.name for path in Path("/dev/shm").iterdir())
    assert run.store is not None
    found["keys of the store"] = run.store.num_keys()
    return found


def kept_by(pid: int, name: str) -> dict[str, float]:
    """Return the memory, descriptors and threads of a process, which is told by this name."""
    folder = Path(f"/proc/{pid}")
    status = dict(_fields(folder / "status"))
    return {
        f"memory of {name}, MB": int(status["VmRSS"].split()[0]) / 1024,
        f"descriptors of {name}": len(list((folder / "fd").iterdir())),
        f"threads of {name}": int(status["Threads"]),
    }


def _fields(path: Path) -> list[tuple[str, str]]:
    return [(name, rest.strip()) for name, _, rest in (line.partition(":") for line in path.read_text().splitlines())]


def growth(quantity: str, samples: Sequence[dict[str, Any]], of: str = "jobs") -> dict[str, str]:
    """Return the row of a quantity: its first and last value after warm-up, and its growth in 1000 jobs.

    ``of``: what is counted in place of jobs, a key of all samples.
    """
    kept = samples[int(WARM_UP * len(samples)) :]
    jobs = np.array([sample[of] for sample in kept], dtype=float)
    values = np.array([sample[quantity] for sample in kept], dtype=float)
    slopes = [_slope(jobs, values)]
    # Neighbours resemble each other, so blocks of them are drawn for the interval, not single measurements.
    generator, block = np.random.default_rng(0), max(1, len(kept) // 10)
    for _ in range(1000):
        starts = generator.integers(0, len(kept) - block + 1, size=-(-len(kept) // block))
        chosen = np.concatenate([np.arange(start, start + block) for start in starts])
        slopes.append(_slope(jobs[chosen], values[chosen]))
    low, high = np.quantile(slopes[1:], (0.025, 0.975))
    return {
        "quantity": quantity,
        "first": f"{values[0]:.4g}",
        "last": f"{values[-1]:.4g}",
        f"growth in 1000 {of}": f"{1000 * slopes[0]:+.3g} [{1000 * low:+.3g}..{1000 * high:+.3g}]",
    }


def _slope(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    spread = x - x.mean()
    return float((spread * y).sum() / max((spread**2).sum(), 1e-9))


if __name__ == "__main__":
    leave("benchmarks.faults.soak", main)
