"""What Python does for one bucket: calls, the files they are in, and CPU time outside all waiting.

    python -m benchmarks.overhead --out benchmarks/results

A model of 1 or 20 small tensors, which make one bucket, trains under DistributedOptimizer. Its ranks are threads over
``LocalTransport`` or processes over gloo. Calls are those of functions in fusionlayer's files: "submit" on the thread
that runs backward, "lane" on the communication thread, "step" on the thread that calls ``step()``. They are counted,
so they are the same on every machine. What threads that stand in for processes do to meet (``transport/local.py``) is
left out, but for their comparison of calls. Times are CPU time of these threads less that of the same training without
fusionlayer; for gloo they hold the calls into the kernel that send and receive. Needs no quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusionlayer as fl
from benchmarks.arguments import comma_separated, count
from benchmarks.report import Environment, table, write
from fusionlayer.cli.spawn import run_on_ranks
from fusionlayer.transport import local

__all__ = ["CODECS", "TENSORS", "Meter", "count_calls", "line", "main", "measure"]

CODECS = ("raw", "int8")
TENSORS = (1, 20)
NUMEL = 512
"""Elements of a tensor."""
WARM_UP = 6
"""Steps before the first that counts: plans, layouts and memory are made in them."""
COUNTED = 5

_ROOT = str(Path(fl.__file__).parent) + "/"
_LEFT_OUT = _ROOT + "transport/local.py"
PHASES = ("submit", "lane", "step")


class Meter:
    """Counts calls of functions in fusionlayer's files, by phase, on every thread that starts while it is entered."""

    def __init__(self) -> None:
        self.counting = False
        self._here = threading.local()
        self._all: list[Counter[tuple[str, str]]] = []

    def __enter__(self) -> Meter:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)

    def within(self, phase: str | None) -> None:
        """Say what the calling thread does from now on; communication threads need not, they have one phase."""
        self._here.phase = phase

    def found(self) -> tuple[dict[str, int], set[str]]:
        """Return the number of calls by phase, and the files that they were in."""
        total = sum(self._all, Counter())
        calls = {phase: sum(n for (p, _), n in total.items() if p == phase) for phase in PHASES}
        return calls, {file.removeprefix(_ROOT) for _, file in total}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not self.counting or not file.startswith(_ROOT) or file == _LEFT_OUT:
            return
        if not hasattr(self._here, "counts"):
            self._here.counts = Counter()
            self._all.append(self._here.counts)
            if _is_lane(threading.current_thread()):
                self._here.phase = "lane"
        if getattr(self._here, "phase", None) is not None:
            self._here.counts[self._here.phase, file] += 1


def measure(
    codec: str, tensors: int, steps: int, barrier: Callable[[], object], meter: Meter, here: int
) -> dict[str, Any]:
    """Return calls, files and microseconds of one bucket by phase; all ranks call it together.

    Args:
        codec: of the gradients.
        tensors: of the bucket.
        steps: that are timed.
        barrier: waits for all ranks.
        meter: of the ranks of this process, new.
        here: how many ranks this process has.
    """
    found = count_calls(codec, tensors, barrier, meter, here)
    timed, alone = (_microseconds(*_model(name, tensors), steps, barrier, here) for name in (codec, None))
    return {**found, "microseconds": {phase: round(timed[phase] - alone[phase], 1) for phase in PHASES}}


def count_calls(codec: str, tensors: int, barrier: Callable[[], object], meter: Meter, here: int) -> dict[str, Any]:
    """Return the part of ``measure`` that is the same on every machine: calls by phase, and files."""
    with meter:
        model, optimizer = _model(codec, tensors)
        for _ in range(WARM_UP):
            _step(model, optimizer)
        barrier()
        meter.counting = True
        barrier()
        for _ in range(COUNTED):
            _step(model, optimizer, meter.within)
        barrier()
        meter.counting = False
        barrier()
    optimizer.close()
    calls, files = meter.found()
    return {
        "calls": {phase: round(calls[phase] / COUNTED / here, 1) for phase in PHASES},
        "files": sorted(files),
    }


def _microseconds(
    model: list[Tensor], optimizer: Any, steps: int, barrier: Callable[[], object], here: int
) -> dict[str, float]:
    """Return CPU time of a step by phase: the median of this thread's, and the mean of the communication threads'."""
    for _ in range(WARM_UP):
        _step(model, optimizer)
    barrier()
    before = _lane_seconds()
    barrier()
    times = [_step(model, optimizer) for _ in range(steps)]
    barrier()
    lane = (_lane_seconds() - before) / here / steps
    barrier()
    if hasattr(optimizer, "close"):
        optimizer.close()
    submit, step = (statistics.median(t[i + 1] - t[i] for t in times) / 1e3 for i in range(2))
    return {"submit": submit, "lane": 1e6 * lane, "step": step}


def _lane_seconds() -> float:
    """Return the CPU time that the communication threads of this process have taken."""
    idents = [each.ident for each in threading.enumerate() if _is_lane(each) and each.ident is not None]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)


def _is_lane(thread: threading.Thread) -> bool:
    return thread.name.startswith("fusionlayer") and not thread.name.endswith("heartbeat")


def _model(codec: str | None, tensors: int) -> tuple[list[Tensor], Any]:
    model = [torch.nn.Parameter(torch.randn(NUMEL)) for _ in range(tensors)]
    optimizer: Any = torch.optim.SGD(model, lr=1e-3)
    if codec is not None:
        names = [(f"layer {i}", parameter) for i, parameter in enumerate(model)]
        optimizer = fl.DistributedOptimizer(optimizer, names, codec=codec, planner="single")
    return model, optimizer


def _step(model: Sequence[Tensor], optimizer: Any, within: Callable[[str | None], None] = lambda _: None) -> list[int]:
    """Take a step; return the thread's CPU time before backward, after it and after the step, in nanoseconds."""
    loss = torch.stack([(parameter * parameter).sum() for parameter in model]).sum()
    times = [time.thread_time_ns()]
    within("submit")
    loss.backward()
    times.append(time.thread_time_ns())
    within("step")
    optimizer.step()
    within(None)
    times.append(time.thread_time_ns())
    optimizer.zero_grad()
    return times


def _on_threads(world: int, codec: str, tensors: int, steps: int) -> dict[str, Any]:
    meter, barrier = Meter(), threading.Barrier(world)

    def rank(_: int) -> dict[str, Any]:
        return measure(codec, tensors, steps, barrier.wait, meter, world)

    return local.run(rank, world)[0]


def _on_processes(world: int, steps: int) -> list[dict[str, Any]]:
    """Return the rows of all codecs and numbers of tensors."""
    this = ["-m", __spec__.name] if __spec__ else [__file__]
    with tempfile.TemporaryFile("w+") as output:
        run_on_ranks([*this, "--steps", str(steps), "--rank"], world, timeout=600, output=output)
        output.seek(0)
        rows: list[dict[str, Any]] = json.load(output)
        return rows


def _be_rank(steps: int) -> None:
    """Be one of the processes."""
    torch.set_num_threads(1)
    fl.init()
    rows = [
        {"codec": codec, "tensors": tensors, **measure(codec, tensors, steps, dist.barrier, Meter(), 1)}
        for codec in CODECS
        for tensors in TENSORS
    ]
    if fl.rank() == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    fl.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=count(), default=300, help="that are timed (300)")
    parser.add_argument("--worlds", type=comma_separated(int), default=(2, 4), help="numbers of ranks (2,4)")
    parser.add_argument("--out", type=Path, help="folder for result files; without it nothing is written")
    parser.add_argument("--hardware", help="name of the machine in the file names")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        _be_rank(options.steps)
        return 0
    rows = []
    for world in options.worlds:
        for codec in CODECS:
            for tensors in TENSORS:
                found = _on_threads(world, codec, tensors, options.steps)
                rows.append({"ranks": "threads", "world": world, "codec": codec, "tensors": tensors, **found})
        rows += [{"ranks": "gloo", "world": world, **row} for row in _on_processes(world, options.steps)]
    title = f"Calls of one bucket of tensors of {NUMEL} elements, and CPU time"
    shown = [line(row) for row in rows]
    environment = Environment.here(torch.device("cpu"), options.hardware)
    print(table(title, shown))
    print(environment)
    if options.out:
        print(f"wrote {write(options.out, 'overhead', title, environment, rows, shown)}", file=sys.stderr)
    return 0


def line(row: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table."""
    calls, spent = row["calls"], row["microseconds"]
    return {
        **{key: str(row[key]) for key in ("ranks", "world", "codec", "tensors")},
        **{f"{phase}, calls": f"{calls[phase]:g}" for phase in PHASES},
        "calls": f"{sum(calls.values()):g}",
        "files": str(len(row["files"])),
        **{f"{phase}, us": f"{spent[phase]:.0f}" for phase in PHASES},
    }


if __name__ == "__main__":
    sys.exit(main())
