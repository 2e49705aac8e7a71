"""Time and bytes of every collective with every codec, beside gloo's and MPI's own, on emulated networks.

    python -m benchmarks.collective [--rates none,100mbit,1gbit] [--worlds 2,4] [--hosts 2] [--out benchmarks/results]
    python -m benchmarks.collective --smoke
    python -m benchmarks.collective --links 1gbit,100mbit/50ms/0.0005/reno,100mbit/100ms/0.001/bbr --worlds 2 \
        --collectives none --functions all_reduce,all_gather,all_to_all --codecs raw,int8,int4 --connections 1,4

A size is that of the f32 tensor that each worker brings; KB and MB are 1024 and 1024 * 1024 bytes. Times are medians
over rounds of what one call takes, on the worker that is last; "times as fast" is the median of the rounds' ratios to
gloo's all_reduce of f32. "sent" is what the network device of one host has sent for a call, headers included (on
loopback: what all workers have sent), and "of the wire" the time that the link needs for that, as a share of the time
taken. algbw and busbw are those of nccl-tests: bytes of f32 by time, and that times 2 (n - 1) / n for an all-reduce of
n workers, (n - 1) / n for all-gather and all-to-all. Compressed collectives can exceed the link's rate in both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

from benchmarks import driver
from benchmarks.lab import Network, launch, why_not
from benchmarks.quiet import pressure

from .cell import Cell, Row, in_words
from .options import parse
from .picture import draw_shares
from .summary import summarize


def main() -> int:
    """Run the command line; return the exit status."""
    options = parse(__doc__)
    environment = driver.begin(options, max(options.worlds))
    no_namespaces = why_not(Network(hosts=1))
    if no_namespaces:
        print(f"no emulated networks, and loopback is shared with others: {no_namespaces}", file=sys.stderr)
    no_mpi = no_namespaces or why_no_mpi()
    if no_mpi:
        print(f"no rows of MPI: {no_mpi}", file=sys.stderr)
    results, lines, failed = [], [], []
    measured: list[tuple[Cell, list[Row]]] = []
    try:
        for cell in cells(options, emulated=no_namespaces is None, mpi=no_mpi is None):
            rows = run(cell, isolated=no_namespaces is None, timeout=options.timeout)
            if rows is None:
                failed.append(f"{cell.network}, {cell.world} workers")
                continue
            measured.append((cell, rows))
            lines += summarize(cell, rows)
            link: dict[str, object] = {"delay": cell.delay, "loss": cell.loss, "congestion": cell.congestion}
            link |= {"interfaces": cell.interfaces} if cell.interfaces else {}
            place = {"rate": cell.rate, **link, "hosts": cell.hosts, "world": cell.world, **pressure()}
            results += [{**place, **asdict(row)} for row in rows]
    except KeyboardInterrupt:
        failed.append("interrupted")
    if failed:
        print(f"not everything was measured: {'; '.join(failed)}", file=sys.stderr)
    if not results:
        return 1
    title = f"Collectives: {options.rounds} rounds, f32 on CPUs"
    limited = any(cell.lab().bits_per_second for cell, _ in measured)
    pictures = {options.theme: lambda: draw_shares(measured)} if options.functions and limited else {}
    driver.finish(options, options.theme, title, environment, results, lines, pictures=pictures)
    return 1 if failed else 0


def cells(options: argparse.Namespace, *, emulated: bool, mpi: bool) -> Iterator[Cell]:
    """Yield what the command line asks for and this machine can have: without emulated networks, loopback alone."""
    sizes, rounds, codecs, collectives = options.sizes, options.rounds, options.codecs, options.collectives
    for link in options.links:
        for world in options.worlds:
            hosts = options.hosts if link.limited else 1
            if emulated or not link.limited:
                yield Cell(
                    rate=link.rate,
                    hosts=hosts,
                    workers=world // hosts,
                    sizes=sizes,
                    rounds=rounds,
                    codecs=codecs,
                    collectives=collectives,
                    mpi=mpi,
                    turn_seconds=options.turn_seconds,
                    delay=link.delay,
                    loss=link.loss,
                    congestion=link.congestion,
                    interfaces=link.interfaces,
                    functions=options.functions,
                    connections=options.connections,
                    only=options.only,
                    most_seconds=options.most_seconds,
                )


def run(cell: Cell, *, isolated: bool, timeout: float) -> list[Row] | None:
    """Return what the cell's workers have measured; None if one of them failed, which stderr tells of.

    Args:
        cell: what is measured.
        isolated: the network is one of its own, as ``Network`` has it.
        timeout: seconds until the workers are ended.
    """
    worker = [sys.executable, "-m", f"{__package__}.worker", json.dumps(asdict(cell))]
    network = cell.lab(isolated)
    rows: list[Row] = []
    with launch(
        worker, network, workers=cell.workers, timeout=timeout, mpi=cell.mpi, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            rows += [Row(**row) for row in json.loads(line)]
            print(f"{cell.network}, {cell.world} workers: {in_words(rows[-1].size)} is measured", file=sys.stderr)
        if process.wait() == 0:
            return rows
    if {row.size for row in rows} == set(cell.sizes):
        print(f"{cell.network}, {cell.world} workers: all is measured, but a worker failed at its end", file=sys.stderr)
        return rows
    return None


def why_no_mpi() -> str | None:
    """Return why MPI cannot take part, in one line; None if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "the package mpi4py is missing (pip install mpi4py)"
    return why_not(Network(hosts=1), mpi=True)


if __name__ == "__main__":
    driver.leave(main)
