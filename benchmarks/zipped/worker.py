"""One worker: ``python -m benchmarks.zipped.worker CELL``, the cell as JSON; rank 0 writes a row of JSON per line.

All forms of a call take turns in every round, in an order that differs from round to round. A turn is a number of calls
in a row between two barriers; what counts is the worker that took longest.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusionlayer as fl
from fusionlayer import context
from fusionlayer.collectives import halves, zipped
from fusionlayer.collectives.switching import SAMPLES, TRUSTED, Switcher

__all__ = ["CALLS", "Cell", "main"]

CALLS = ("all_gather", "all_to_all", "reduce_scatter")
TURN_SECONDS = 0.1
TURN_CALLS = 16
LEARNING_CALLS = TRUSTED + 2 * SAMPLES + 1
"""Of a size, before the switcher is measured: more than it takes to choose."""


@dataclass(frozen=True)
class Cell:
    """What the same workers on the same network measure.

    Attributes:
        rate: of each host's link, as ``Network`` takes it.
        hosts: number of hosts, with one worker each.
        sizes: bytes that a worker sends in a native call; elements are bf16.
        rounds: how often each form has its turn.
        delays: seconds that the last rank comes late, for the comparison of designs; none: compare forms instead.
    """

    rate: str
    hosts: int
    sizes: tuple[int, ...]
    rounds: int
    delays: tuple[float, ...] = ()


def main() -> None:
    """Run the worker that the command line describes."""
    cell = Cell(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    fl.init()
    for row in skewed(cell) if cell.delays else compared(cell):
        if fl.rank() == 0:
            print(json.dumps(row), flush=True)
    dist.barrier()
    fl.shutdown()


def compared(cell: Cell) -> Iterator[dict[str, Any]]:
    """Yield a row for each collective and size: seconds of each form in each round, and what the switcher chose."""
    transport = context.transport()
    for call in CALLS:
        switcher = Switcher(transport)
        for size in cell.sizes:
            forms = _forms(call, size, switcher)
            for _ in range(LEARNING_CALLS):
                forms["switched"]()
            chosen = next(choice for choice in reversed(switcher.decisions) if choice.nbytes == size)
            seconds = _in_turns(forms, cell.rounds)
            yield {
                **asdict(cell),
                "call": call,
                "size": size,
                "seconds": seconds,
                "zips": chosen.zips,
                "factor": chosen.factor,
            }


def _forms(call: str, size: int, switcher: Switcher) -> dict[str, Callable[[], object]]:
    """Return the three forms of a collective in which each worker sends ``size`` bytes, all with the same results."""
    transport, codec, raw = context.transport(), fl.codecs.get("zip").bare, fl.codecs.get("raw").bare
    world, rank = fl.size(), fl.rank()
    part = size // 2 // (world - 1)
    generator = torch.Generator().manual_seed(rank)
    if call == "all_gather":
        x = torch.randn(part, generator=generator).bfloat16()
        outs = [x.new_empty(world * part) for _ in range(3)]
        forms: dict[str, Callable[[], object]] = {
            "native": lambda: transport.all_gather(x.view(torch.uint8), outs[0].view(world, -1).view(torch.uint8)),
            "zipped": lambda: zipped.all_gather(x, outs[1], codec, transport),
            "switched": lambda: switcher.all_gather(x, outs[2]),
        }
    elif call == "all_to_all":
        x = torch.randn(world * part, generator=generator).bfloat16()
        even = [part] * world
        outs = [torch.empty_like(x) for _ in range(3)]
        largest = part * (world - 1)
        forms = {
            "native": lambda: transport.all_to_all(
                x.view(world, -1).view(torch.uint8), outs[0].view(world, -1).view(torch.uint8)
            ),
            "zipped": lambda: zipped.all_to_all(x, outs[1], even, even, codec, transport),
            "switched": lambda: switcher.all_to_all(x, outs[2], even, even, largest=largest),
        }
    else:
        x = torch.randn(world * part, generator=generator).bfloat16()
        outs = [x.new_empty(part) for _ in range(3)]
        forms = {
            "native": lambda: halves.reduce_scatter(x.view(world, -1), outs[0], raw, transport),
            "zipped": lambda: zipped.reduce_scatter(x, outs[1], codec, transport),
            "switched": lambda: switcher.reduce_scatter(x, outs[2]),
        }
    for form in forms.values():
        form()
    if any(not torch.equal(out.view(torch.int16), outs[0].view(torch.int16)) for out in outs):
        raise SystemExit(f"{call} of {size} bytes: the forms differ in their bits")
    return forms


def skewed(cell: Cell) -> Iterator[dict[str, Any]]:
    """Yield a row for each split and delay: seconds from the common start until all are done, less the delay.

    ``even``: every worker has as much for each other. ``uneven``: those that are early have twice as much for each
    other as for, and from, the one that is late, as experts have where the late one has computed longer.
    """
    transport, codec = context.transport(), fl.codecs.get("zip").bare
    world, rank = fl.size(), fl.rank()
    late = world - 1
    (size,) = cell.sizes
    for split in ("even", "uneven"):

        def count(source: int, to: int, split: str = split) -> int:
            twice = split == "uneven" and late not in (source, to)
            return (size // 2 // (world - 1)) * (2 if twice else 1)

        sends, recvs = [count(rank, to) for to in range(world)], [count(source, rank) for source in range(world)]
        x = torch.randn(sum(sends), generator=torch.Generator().manual_seed(rank)).bfloat16()
        out = torch.empty(sum(recvs), dtype=torch.bfloat16)
        sources, targets = x.view(torch.uint8), out.view(torch.uint8)

        def native(
            sources: Tensor = sources, targets: Tensor = targets, sends: list[int] = sends, recvs: list[int] = recvs
        ) -> None:
            transport.exchange(sources.split([2 * n for n in sends]), targets.split([2 * n for n in recvs]))

        def zips(
            design: int, x: Tensor = x, out: Tensor = out, sends: list[int] = sends, recvs: list[int] = recvs
        ) -> None:
            zipped.all_to_all(x, out, sends, recvs, codec, transport, design=design)

        forms: dict[str, Callable[[], object]] = {
            "native": native,
            "design 1": lambda zips=zips: zips(1),
            "design 2": lambda zips=zips: zips(2),
        }
        for form in forms.values():
            form()
        for delay in cell.delays:

            def delayed(form: Callable[[], object], delay: float = delay) -> None:
                if rank == late:
                    time.sleep(delay)
                form()

            calls = {name: lambda form=form: delayed(form) for name, form in forms.items()}
            seconds = _in_turns(calls, cell.rounds, once=True)
            after = {name: [s - delay for s in values] for name, values in seconds.items()}
            yield {**asdict(cell), "split": split, "delay": delay, "seconds": after}


def _in_turns(forms: Mapping[str, Callable[[], object]], rounds: int, *, once: bool = False) -> dict[str, list[float]]:
    """Return seconds of a call of each form in each round, of the worker that took longest."""
    first = {name: _turn(form, 1) for name, form in forms.items()}
    calls = 1 if once else max(1, min(TURN_CALLS, int(TURN_SECONDS / min(first.values()))))
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds):
        for name in random.Random(number).sample(list(forms), len(forms)):
            seconds[name].append(_turn(forms[name], calls))
    return seconds


def _turn(form: Callable[[], object], calls: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        form()
    slowest = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    main()
