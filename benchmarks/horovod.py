"""``fusionlayer.torch`` beside Horovod: the same calls on the same machine, in turns.

    python -m benchmarks.horovod --out benchmarks/results

Each side has processes of its own, which run the same code with ``hvd`` bound to one module or the other. In every
round each side takes a turn in every case, in an order that is shuffled anew; Horovod's processes, whose thread never
rests, are stopped outside their turns. Beside the time of a call stands the processor time of all ranks' threads in it,
which other work on the machine does not lengthen. Without Horovod its columns are left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusionlayer.launch import VARIABLES

from .arguments import comma_separated, count, one_of
from .lab.ports import hold_port
from .report import Environment, table, write
from .training.summary import interval
from .training.workloads import make_workload

__all__ = ["OURS", "PEER", "main", "meet", "place"]

OURS, AGAIN, PEER = "fusionlayer", "fusionlayer-again", "horovod"
Body = Callable[[], object]


def _small(hvd: Any) -> Body:
    x = torch.ones(1024)
    return lambda: hvd.allreduce(x, name="small")


def _many(hvd: Any) -> Body:
    xs = [torch.ones(1024) for _ in range(64)]

    def body() -> None:
        for handle in [hvd.allreduce_async(x, name=f"many.{i}") for i, x in enumerate(xs)]:
            hvd.synchronize(handle)

    return body


def _large(hvd: Any) -> Body:
    x = torch.ones(25 << 18)
    return lambda: hvd.allreduce(x, name="large")


def _ragged(hvd: Any) -> Body:
    calls = iter(range(1 << 60))

    def body() -> None:
        call = next(calls)
        rows = [1000 + (7 * call + 13 * i + 29 * hvd.rank()) % 100 for i in range(64)]
        begun = [hvd.allgather_async(torch.ones(n), name=f"ragged.{i}") for i, n in enumerate(rows)]
        for handle in begun:
            hvd.synchronize(handle)

    return body


def _resnet50_shapes() -> Iterator[tuple[int, ...]]:
    """Yield the shapes of ResNet-50's 161 parameters (He et al., CVPR 2016, table 1)."""
    yield from ((64, 3, 7, 7), (64,), (64,))
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                yield from (shape, shape[:1], shape[:1])
            if block == 0:
                yield from ((4 * width, inputs, 1, 1), (4 * width,), (4 * width,))
            inputs = 4 * width
    yield from ((1000, 2048), (1000,))


class _Gradients(nn.Module):
    """A model that has ResNet-50's gradients and next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in _resnet50_shapes()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum() * x.sum()


def _resnet50(hvd: Any) -> Body:
    model = _Gradients()
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    x = torch.ones(1)

    def body() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    return body


def _gpt(hvd: Any) -> Body:
    workload = make_workload("gpt", 0, hvd.rank())
    model = workload.model()
    optimizer = hvd.DistributedOptimizer(workload.optimizer(model), named_parameters=model.named_parameters())
    batch = workload.batch(0)

    def body() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    return body


CASES: dict[str, tuple[str, Callable[[Any], Body], int]] = {
    "small": ("allreduce of 4 KB", _small, 50),
    "many": ("64 x 4 KB, allreduce_async", _many, 10),
    "large": ("allreduce of 25 MB", _large, 4),
    "ragged": ("64 allgathers of other sizes each time", _ragged, 10),
    "resnet50": ("step with ResNet-50's 161 gradients, 102 MB", _resnet50, 2),
    "gpt": ("step of the GPT example, 10.9 million parameters", _gpt, 2),
}
"""Title, what to measure, and calls of a turn."""


class Turn(NamedTuple):
    """What a call takes.

    Attributes:
        seconds: the median of a turn, on the slowest rank.
        processor: seconds of all threads of all ranks, the mean of a turn.
    """

    seconds: float
    processor: float


class Side:
    """The processes of one side; they answer lines of JSON.

    Args:
        name: of the side.
        ranks: number of processes.
    """

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        self._server, common = meet(name, ranks)
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.horovod", "--worker", name],
                env={**os.environ, "OMP_NUM_THREADS": "1", **common, **place(name, rank, ranks)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for rank in range(ranks)
        ]
        self.version = self._hear()[0]
        self.rest()

    def turn(self, case: str) -> Turn:
        """Measure a case once."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(case + "\n")
        ranks = self._hear()
        self.rest()
        return Turn(max(statistics.median(walls) for walls, _ in ranks), sum(processor for _, processor in ranks))

    def rest(self) -> None:
        """Keep Horovod's threads from taking the other sides' time."""
        if self.name == PEER:
            for process in self._processes:
                process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()

    def _hear(self) -> list[Any]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"a process of {self.name} ended with status {process.wait()}")
            answers.append(json.loads(line))
        return answers


def meet(side: str, ranks: int) -> tuple[Any, dict[str, str]]:
    """Return what keeps the meeting of a side's processes on this host, and the variables that tell them of it."""
    if side != PEER:
        held = hold_port()
        return held, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
    from horovod.runner.common.util.hosts import (  # type: ignore[import-not-found]
        get_host_assignments,
        parse_hosts,
    )
    from horovod.runner.http.http_server import RendezvousServer  # type: ignore[import-not-found]

    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks))
    return server, {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }


def place(side: str, rank: int, ranks: int) -> dict[str, str]:
    """Return the variables that tell a process of a side its rank, as the side's launcher writes them."""
    names = VARIABLES["horovodrun" if side == PEER else "torchrun"]
    values = (rank, ranks, rank, ranks)
    return {"GLOO_SOCKET_IFNAME": "lo", **{name: str(v) for name, v in zip(names, values, strict=True)}}


def _work(side: str) -> None:
    """Be one process of a side: for each case that is named, do a turn and tell how long each call took."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Horovod prints is no answer
    torch.set_num_threads(1)
    hvd = importlib.import_module("horovod.torch" if side == PEER else "fusionlayer.torch")
    hvd.init()
    answers.write(json.dumps(str(getattr(importlib.import_module(side.split("-")[0]), "__version__", ""))) + "\n")
    bodies: dict[str, Body] = {}
    meet = torch.zeros(1)
    for line in sys.stdin:
        _, make, calls = CASES[line.strip()]
        fresh = line.strip() not in bodies
        body = bodies[line.strip()] = bodies.get(line.strip()) or make(hvd)
        for _ in range(3 if fresh else 1):
            body()
        seconds, processor = [], 0.0
        for _ in range(calls):
            hvd.allreduce(meet, name="meet")
            before, start = time.process_time(), time.perf_counter()
            body()
            seconds.append(time.perf_counter() - start)
            processor += time.process_time() - before
        answers.write(json.dumps((seconds, processor / calls)) + "\n")
    hvd.shutdown()


def _measure(cases: tuple[str, ...], ranks: int, rounds: int) -> tuple[list[dict[str, Any]], str]:
    names = [OURS, AGAIN]
    try:
        importlib.import_module("horovod.torch")
        names.append(PEER)
    except ImportError as error:
        print(f"Horovod is left out: {error}", file=sys.stderr)
    sides = [Side(name, ranks) for name in names]
    note = ", ".join(f"{side.name} {side.version}" for side in sides)
    found: dict[str, dict[str, list[Turn]]] = {case: {name: [] for name in names} for case in cases}
    order = random.Random(0)
    for number in range(rounds + 1):
        for case in cases:
            for side in order.sample(sides, len(sides)):
                turn = side.turn(case)
                if number:  # the first round is for what is made only once
                    found[case][side.name].append(turn)
    for side in sides:
        side.close()
    return [_row(case, ranks, found[case]) for case in cases], note


def _row(case: str, ranks: int, found: dict[str, list[Turn]]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": CASES[case][0], "ranks": ranks, "rounds": len(found[OURS])}
    for name in (OURS, PEER):
        if name in found:
            row[f"{name}, ms"] = f"{1000 * statistics.median(turn.seconds for turn in found[name]):.2f}"
            row[f"{name}, CPU ms"] = f"{1000 * statistics.median(turn.processor for turn in found[name]):.2f}"
    for title, name in (("times as fast as Horovod", PEER), ("again, null row", AGAIN)):
        if name in found:
            ratios = [theirs.seconds / ours.seconds for theirs, ours in zip(found[name], found[OURS], strict=True)]
            low, high = interval(ratios)
            row[title] = f"{statistics.median(ratios):.2f}"
            row["95 %" if name == PEER else "its 95 %"] = f"{low:.2f} to {high:.2f}"
    row["turns"] = {name: [turn.seconds for turn in turns] for name, turns in found.items()}
    row["processor"] = {name: [turn.processor for turn in turns] for name, turns in found.items()}
    return row


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, and write the result files if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.horovod", description=__doc__)
    parser.add_argument("--ranks", type=count(), default=2, help="processes of each side")
    parser.add_argument("--rounds", type=count(), default=9)
    parser.add_argument("--cases", type=comma_separated(one_of(list(CASES))), default=tuple(CASES))
    parser.add_argument("--out", type=Path, help="folder for the result files")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        _work(given.worker)
        return
    rows, note = _measure(given.cases, given.ranks, given.rounds)
    shown = [{key: value for key, value in row.items() if key not in ("turns", "processor")} for row in rows]
    title = f"fusionlayer.torch beside Horovod ({note})"
    print(table(title, shown))
    if given.out:
        environment = Environment.here(torch.device("cpu"))
        print(write(given.out, "horovod", title, environment, rows, shown))


if __name__ == "__main__":
    main()
