"""What a job costs as its ranks become more: start-up, CPU time, requests to the store, descriptors and threads.

    python -m benchmarks.scale --worlds 2,4,8,16,32,64,128 --out benchmarks/results

Ranks are processes on this host's loopback, forked after torch was imported, and each world runs twice: DDP with gloo,
and ``DistributedOptimizer`` with int8 over gloo, on one small model in one bucket. "Start" is from the first line of a
rank to the wrapped optimizer, on the slowest rank; CPU seconds are those of a rank until its third step has ended, and
CPU milliseconds those of a later step less what the same step takes without other ranks. Segments are those that the
job's store has received on connections that are open after the last step, descriptors and threads those of rank 0.
CPU times and counts mean something on a busy machine, too. Ranks count as eight to a node.
"""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fusionlayer as fl
from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from fusionlayer.transport import c10d, local  # noqa: F401 - ranks need not import it then

__all__ = ["SIDES", "figures", "line", "main", "measure"]

SIDES = ("ddp", "fusionlayer")
_PORT = "MASTER_PORT"
_EACH_NODE = 8
_EARLY, _COUNTED = 3, 20
# Seconds that a world may take.
_DEADLINE = 1800.0
# Where the kernel's struct tcp_info has the number of segments received.
_SEGMENTS_AT = 140


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(100, 100) for _ in range(10)], nn.Linear(100, 100))


def _alone() -> float:
    """Return the CPU milliseconds of a step without other ranks."""
    model = _model()
    return _steps(model, torch.optim.SGD(model.parameters(), lr=0.01), _COUNTED)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Train; return the CPU milliseconds of a step."""
    x = torch.ones(2, 100)
    begun = time.process_time()
    for _ in range(number):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return (time.process_time() - begun) * 1e3 / number


def _begin_ddp() -> tuple[nn.Module, torch.optim.Optimizer]:
    dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(_model())
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01)


def _begin_fusionlayer() -> tuple[nn.Module, torch.optim.Optimizer]:
    fl.init()
    model = _model()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, fl.DistributedOptimizer(inner, model.named_parameters(), codec="int8")


BEGIN: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "ddp": _begin_ddp,
    "fusionlayer": _begin_fusionlayer,
}


def _segments(port: int) -> int:
    """Return how many segments this process has received on the connections that it has accepted at a port."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            end = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # no socket, or the folder itself
        with end:
            try:
                if end.getsockname()[1] == port and end.getpeername():
                    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("I", info, _SEGMENTS_AT)[0]
            except (OSError, TypeError, IndexError):
                continue  # it listens, or is of another family
    return total


def _be_rank(side: str, rank: int, size: int, port: int, report: Connection) -> None:
    here = min(_EACH_NODE, size)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", _PORT: str(port)}
    os.environ |= {"LOCAL_RANK": str(rank % here), "LOCAL_WORLD_SIZE": str(here), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"FUSIONLAYER_RANKS_PER_NODE": str(_EACH_NODE), "FUSIONLAYER_WATCH": "false"}
    torch.set_num_threads(1)
    alone = _alone()
    begun, cpu = time.monotonic(), time.process_time()
    model, optimizer = BEGIN[side]()
    started = time.monotonic() - begun
    _steps(model, optimizer, _EARLY)
    spent = time.process_time() - cpu
    each = _steps(model, optimizer, _COUNTED)
    dist.barrier()
    own = {"start": started, "cpu": spent, "step": max(each - alone, 0.0)}
    if rank == 0:
        own["segments"] = _segments(port)
        own["descriptors"] = len(os.listdir("/proc/self/fd"))
        own["threads"] = len(os.listdir("/proc/self/task"))
    report.send(own)
    dist.barrier()
    report.close()
    os._exit(0)  # what an exit costs is not measured here


def _import_all() -> None:
    """Import, and load, what a step needs, in a process that has no thread yet: ranks then do not.

    What exists then is hidden from Python's garbage collector, so that ranks do not copy all pages when it looks.
    """
    local.run(lambda _: _train_once(), 2)
    gc.freeze()


def _train_once() -> None:
    model = _model()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = fl.DistributedOptimizer(inner, model.named_parameters(), codec="int8")
    _steps(model, optimizer, 1)


def measure(side: str, size: int) -> dict[str, float]:
    """Return what a job of so many ranks costs with one of ``SIDES``.

    Raises:
        SystemExit: a rank has failed, or the deadline has passed.
    """
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    context = mp.get_context("fork")
    ends, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_be_rank, args=(side, rank, size, port, theirs), daemon=True)
        process.start()
        theirs.close()
        ends.append(mine)
        processes.append(process)
    found: dict[int, dict[str, float]] = {}
    until = time.monotonic() + _DEADLINE
    try:
        while len(found) < size:
            ready = wait([end for rank, end in enumerate(ends) if rank not in found], until - time.monotonic())
            if not ready:
                raise SystemExit(f"{side} with {size} ranks: no end within {_DEADLINE:g} s")
            for end in ready:
                rank = ends.index(end)  # type: ignore[arg-type]
                try:
                    found[rank] = end.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise SystemExit(f"{side} with {size} ranks: rank {rank} has failed") from None
    finally:
        for process in processes:
            process.join(10 if len(found) == size else 0)
            process.kill()
    return figures([found[rank] for rank in range(size)])


def figures(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the figures of a job, of those of its ranks."""
    means = {key: statistics.mean(each[key] for each in ranks) for key in ("cpu", "step")}
    counts = {key: ranks[0][key] for key in ("segments", "descriptors", "threads")}
    return {"start": max(each["start"] for each in ranks), **means, **counts}


def line(row: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table: of each figure fusionlayer's and, behind it, DDP's."""
    ours, theirs = row["fusionlayer"], row["ddp"]
    units = {"start": ".2f", "cpu": ".2f", "step": ".1f", "segments": ".0f", "descriptors": ".0f", "threads": ".0f"}
    names = {"start": "start s", "cpu": "CPU s until step 3", "step": "CPU ms a step", "segments": "store segments"}
    each = {names.get(key, key): f"{ours[key]:{form}} / {theirs[key]:{form}}" for key, form in units.items()}
    return {"ranks": str(row["ranks"]), **each}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("scale", __doc__)
    parser.add_argument("--worlds", type=comma_separated(count(2)), default=(2, 4, 8, 16, 32), help="(2,4,8,16,32)")
    driver.add_options(parser, timed=True)
    options = parser.parse_args(arguments)
    environment = driver.begin(options, 2)
    _import_all()
    rows = []
    for size in options.worlds:
        rows.append({"ranks": size, **{side: measure(side, size) for side in SIDES}})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    title = "Start-up and costs by number of ranks, fusionlayer / DDP"
    driver.finish(options, "scale", title, environment, rows, [line(row) for row in rows])
    return 0


if __name__ == "__main__":
    driver.leave(main)
