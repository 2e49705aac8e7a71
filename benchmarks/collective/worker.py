"""One worker of a cell: ``python -m benchmarks.collective.worker CELL``, the cell as JSON; rank 0 writes rows as JSON.

All operations take turns in every round, in an order that differs from round to round, so that all of them see the
same load. A turn is a number of calls in a row, each on data that no call has touched before, between two barriers.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

import fusionlayer as fl
from examples.wire import carrier, sent_bytes
from fusionlayer import context

from .cell import Cell, Row
from .operations import Operation, operations

__all__ = ["main", "measure"]

TURN_CALLS = 32
TURN_BYTES = 64 << 20
"""A turn has at most so many calls, on tensors of so many bytes together."""


def main() -> None:
    """Run the worker that the command line describes."""
    cell = Cell(**json.loads(sys.argv[1]))
    fl.init()
    for size in cell.sizes:
        rows = [asdict(row) for row in measure(cell, size)]
        if fl.rank() == 0:
            print(json.dumps(rows), flush=True)
    dist.barrier()
    fl.shutdown()


def measure(cell: Cell, size: int) -> list[Row]:
    """Return a row for every operation on tensors of ``size`` bytes; on all workers, and the same on all of them."""
    source = torch.randn(size // 4, generator=torch.Generator().manual_seed(fl.rank()))
    tensors = [torch.empty_like(source) for _ in range(max(1, min(TURN_CALLS, TURN_BYTES // size)))]
    device = carrier(fl.local_size(), fl.size(), os.environ.get("GLOO_SOCKET_IFNAME"))
    turns = list(_start(cell, source, tensors, device))
    for number in range(cell.rounds):
        for operation, row in random.Random(number).sample(turns, len(turns)):
            seconds, sent, cpu_seconds = turn(operation, source, tensors[: row.calls], device)
            row.seconds.append(seconds)
            row.sent.append(sent)
            row.cpu_seconds.append(cpu_seconds)
    return [row for _, row in turns]


def _start(
    cell: Cell, source: Tensor, tensors: Sequence[Tensor], device: str | None
) -> Iterator[tuple[Operation, Row]]:
    """Yield each operation that works, warmed up, with a row that knows how many calls make a turn."""
    for operation in operations(cell, context.transport(), source.numel()):
        try:
            seconds, _, _ = turn(operation, source, tensors[:1], device)
        except fl.ConfigError:  # the collective does not take this codec, on any rank
            continue
        if seconds < cell.turn_seconds:  # what only first calls take may be most of that
            seconds, _, _ = turn(operation, source, tensors[:1], device)
        calls = max(1, min(len(tensors), int(cell.turn_seconds / seconds)))
        yield operation, Row(operation.name, operation.codec, source.nbytes, operation.bus_factor, calls)


def turn(
    operation: Operation, source: Tensor, tensors: Sequence[Tensor], device: str | None
) -> tuple[float, float, float]:
    """Return seconds, bytes sent by a host, and CPU seconds of a call, each the largest of all workers.

    Args:
        operation: is called once for each of ``tensors``.
        source: what the tensors are filled with before.
        tensors: what the operation works on, and changes.
        device: the network device whose bytes count; None: they cannot be counted.
    """
    for tensor in tensors:
        tensor.copy_(source)
    dist.barrier()
    sent = _sent(device)
    cpu_seconds, seconds = time.process_time(), time.perf_counter()
    for tensor in tensors:
        operation.call(tensor)
    seconds, cpu_seconds = time.perf_counter() - seconds, time.process_time() - cpu_seconds
    dist.barrier()
    mine = torch.tensor([seconds, _sent(device) - sent, cpu_seconds], dtype=torch.float64) / len(tensors)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    largest = mine.tolist()
    return largest[0], largest[1], largest[2]


def _sent(device: str | None) -> int:
    return sent_bytes(device) if device else 0


if __name__ == "__main__":
    main()
