"""One worker of a cell: ``python -m benchmarks.collective.worker CELL``, the cell as JSON; rank 0 writes rows as JSON.

All operations take turns in every round, in an order that differs from round to round, so that all of them see the
same load. A turn is a number of calls in a row, each on data that no call has touched before, between two barriers.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

import fusionlayer as fl
from examples.wire import carrier, sent_bytes
from fusionlayer import context
from fusionlayer.transport import Transport
from fusionlayer.transport.c10d import C10dTransport

from .cell import Cell, Row
from .operations import Operation, functions, operations, transports

__all__ = ["main", "measure"]

TURN_CALLS = 32
TURN_BYTES = 64 << 20
"""A turn has at most so many calls, on tensors of so many bytes together."""


def main() -> None:
    """Run the worker that the command line describes."""
    cell = Cell(**json.loads(sys.argv[1]))
    fl.init()
    gloo = context.transport()
    over = transports(cell, gloo) if isinstance(gloo, C10dTransport) else {}
    for size in cell.sizes:
        rows = [asdict(row) for row in measure(cell, size, over)]
        if fl.rank() == 0:
            print(json.dumps(rows), flush=True)
    dist.barrier()
    for transport in over.values():
        if transport is not gloo:
            transport.finish()
    fl.shutdown()


def measure(cell: Cell, size: int, over: Mapping[str, Transport] = MappingProxyType({})) -> list[Row]:
    """Return a row for every operation on tensors of ``size`` bytes; on all workers, and the same on all of them."""
    source = torch.randn(size // 4, generator=torch.Generator().manual_seed(fl.rank()))
    tensors = [torch.empty_like(source) for _ in range(max(1, min(TURN_CALLS, TURN_BYTES // size)))]
    device = carrier(fl.local_size(), fl.size(), os.environ.get("GLOO_SOCKET_IFNAME"))
    devices = cell.lab().devices if cell.interfaces else (device,) if device else ()
    known = [
        *operations(cell, context.transport(), source.numel()),
        *functions(cell, over, source.numel()),
    ]
    known = [operation for operation in known if re.search(cell.only, f"{operation.name} {operation.codec}")]
    turns = list(_start(cell, known, source, tensors, devices))
    for number in range(cell.rounds):
        for operation, row, rounds in random.Random(number).sample(turns, len(turns)):
            if number >= rounds:
                continue
            seconds, sent, cpu_seconds = turn(operation, source, tensors[: row.calls], devices)
            row.seconds.append(seconds)
            row.sent.append(sent)
            row.cpu_seconds.append(cpu_seconds)
    return [row for _, row, _ in turns]


def _start(
    cell: Cell, known: Sequence[Operation], source: Tensor, tensors: Sequence[Tensor], devices: Sequence[str]
) -> Iterator[tuple[Operation, Row, int]]:
    """Yield each operation that works, warmed up, with a row that knows how many calls make a turn, and its rounds."""
    for operation in known:
        try:
            first = turn(operation, source, tensors[:1], devices)
        except fl.ConfigError:  # the collective does not take this codec, on any rank
            continue
        seconds = first[0]
        if seconds < cell.turn_seconds:  # what only first calls take may be most of that
            seconds, _, _ = turn(operation, source, tensors[:1], devices)
        calls = max(1, min(len(tensors), int(cell.turn_seconds / seconds)))
        row = Row(operation.name, operation.codec, source.nbytes, operation.bus_factor, calls)
        row.against = operation.against
        if seconds > cell.most_seconds:
            row.seconds, row.sent, row.cpu_seconds = ([figure] for figure in first)
            yield operation, row, 0
        else:
            yield operation, row, max(1, int(min(cell.rounds, cell.most_seconds / (calls * seconds))))


def turn(
    operation: Operation, source: Tensor, tensors: Sequence[Tensor], devices: Sequence[str]
) -> tuple[float, float, float]:
    """Return seconds, bytes sent by a host, and CPU seconds of a call, each the largest of all workers.

    Args:
        operation: is called once for each of ``tensors``.
        source: what the tensors are filled with before.
        tensors: what the operation works on, and changes.
        devices: the network devices whose bytes count; none: they cannot be counted.
    """
    for tensor in tensors:
        tensor.copy_(source)
    dist.barrier()
    sent = _sent(devices)
    cpu_seconds, seconds = time.process_time(), time.perf_counter()
    for tensor in tensors:
        operation.call(tensor)
    seconds, cpu_seconds = time.perf_counter() - seconds, time.process_time() - cpu_seconds
    dist.barrier()
    mine = torch.tensor([seconds, _sent(devices) - sent, cpu_seconds], dtype=torch.float64) / len(tensors)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    largest = mine.tolist()
    return largest[0], largest[1], largest[2]


def _sent(devices: Sequence[str]) -> int:
    return sum(map(sent_bytes, devices))


if __name__ == "__main__":
    main()
