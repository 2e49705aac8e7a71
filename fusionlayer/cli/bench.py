"""``fusionlayer bench collectives``: how long collectives take, by size, codec and algorithm, on the job's ranks."""

from __future__ import annotations

import argparse
import statistics
import struct
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import codecs, collectives, context, functional, launch
from ..base.errors import ConfigError
from ..transport import Transport
from .arguments import check_file
from .outputs import keep, tell
from .parsers.bench import DEFAULT, DTYPES
from .progress import ProgressLine
from .resolve import check_device, device_of
from .rows import FORMATS, Row
from .spawn import RankError, run_on_ranks
from .tables import screen_width
from .units import MEMORY, in_words

_SIZE_OF_A_STARTUP = 1 << 18
"""Bytes that take about as long as a call's startup, for the estimate of the remaining time."""


def run(options: argparse.Namespace) -> int:
    """Measure on all ranks; rank 0 writes the rows. Return the exit status."""
    for codec in _codecs(options):
        codecs.get(codec)
    for algorithm in _algorithms(options):
        if algorithm != DEFAULT:
            collectives.get(algorithm)
    launched = launch.find_place()
    if options.num_proc is not None and launched.size == 1:
        _check(options, options.num_proc, writes=True)
        arguments = _without_num_proc(options.arguments)
        try:
            run_on_ranks(["-m", "fusionlayer", *arguments], options.num_proc, errors_shown=True)
        except RankError as error:
            if error.rank:
                raise
            return 1  # rank 0 has said why
        return 0
    if options.num_proc is not None and options.num_proc != launched.size:
        raise ConfigError(
            f"-np {options.num_proc}, but {launched.launcher} has started {launched.size} ranks; leave -np out"
        )
    context.init()
    try:
        transport = context.transport()
        _check(options, transport.size, writes=transport.rank == 0)
        with ProgressLine("bench", shown=transport.rank == 0) as progress:
            found = list(_measure(options, transport, progress))
        if transport.rank == 0:
            _write(options, found)
        transport.barrier()
    finally:
        context.shutdown()
    return 0


def _check(options: argparse.Namespace, ranks: int, writes: bool) -> None:
    """Raise ``ConfigError`` for options that cannot be measured, before any rank starts.

    ``writes``: whether this process can see the file that is to be written.
    """
    if ranks < 2:
        raise ConfigError(
            "one rank has no peer: give -np 2 or more, or start this command by torchrun, mpirun or fusionrun"
        )
    check_device(options)
    if options.out is not None and writes:
        check_file(options.out, "--out")


def _codecs(options: argparse.Namespace) -> list[str]:
    return codecs.names() if options.codecs == ["all"] else options.codecs


def _algorithms(options: argparse.Namespace) -> list[str]:
    return collectives.names() if options.algorithms == ["all"] else options.algorithms


def _without_num_proc(arguments: list[str]) -> list[str]:
    """Return the command line without -np, in any of its spellings."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("-np", "--num-proc"):
            skip = True
        elif not argument.startswith("--num-proc="):
            kept.append(argument)
    return kept


def _sizes(smallest: int, largest: int, factor: float) -> Iterator[int]:
    size = float(smallest)
    while size <= largest:
        yield int(size)
        size *= factor


def _cells(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield kind, algorithm and codec of each measurement."""
    for kind in options.collectives:
        algorithms = {"all_reduce": _algorithms(options), "reduce_scatter": [DEFAULT]}.get(kind, [DEFAULT])
        if kind == "reduce_scatter" and {"ring", "all"} & {*options.algorithms}:
            algorithms = [DEFAULT, "ring"]
        for algorithm in algorithms:
            for codec in _codecs(options):
                yield kind, algorithm, codec


def _measure(options: argparse.Namespace, transport: Transport, progress: ProgressLine) -> Iterator[Row]:
    dtype = getattr(torch, DTYPES[options.dtype])
    device = device_of(options)
    cells = list(_cells(options))
    sizes = list(_sizes(options.min, options.max, options.factor))
    weights = [size + _SIZE_OF_A_STARTUP for size in sizes]
    for place, (kind, algorithm, codec) in enumerate(cells):
        for number, size in enumerate(sizes):
            share = (place + sum(weights[:number]) / sum(weights)) / len(cells)
            progress.at(share, f"{kind} of {in_words(size, MEMORY)} by {codec}")
            numel = max(1, size // dtype.itemsize // transport.size) * transport.size
            x = (
                torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank), device="cpu")
                .to(dtype)
                .to(device)
            )
            try:
                call = _call(kind, x, codec, None if algorithm == DEFAULT else algorithm, transport)
                call()
            except ConfigError as error:  # raised on every rank, before anything is sent
                progress.say(f"no {kind} of {codec} by {algorithm}: {error}")
                break
            yield _time(options, transport, kind, codec, algorithm, x, call)


def _call(kind: str, x: Tensor, codec: str, algorithm: str | None, transport: Transport) -> Callable[[], object]:
    if kind == "all_reduce":
        y = x.clone()
        return lambda: functional.all_reduce(y, codec, algorithm, group=transport)
    if kind == "reduce_scatter":
        return lambda: functional.reduce_scatter(x, codec, group=transport, algorithm=algorithm)
    if kind == "all_gather":
        part = x.view(transport.size, -1)[transport.rank].clone()
        return lambda: functional.all_gather(part, codec, transport)
    return lambda: functional.all_to_all(x, None, codec, transport)


def _time(
    options: argparse.Namespace,
    transport: Transport,
    kind: str,
    codec: str,
    algorithm: str,
    x: Tensor,
    call: Callable[[], object],
) -> Row:
    for _ in range(options.warmup - 1):
        call()
    seconds = []
    sent = 0
    for _ in range(options.calls):
        transport.barrier()
        before, started = transport.bytes_sent, time.perf_counter()
        call()
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        seconds.append(time.perf_counter() - started)
        sent = transport.bytes_sent - before
    slowest = _largest_over_ranks(transport, [*seconds, float(sent)])
    seconds, sent = slowest[:-1], int(slowest[-1])
    middle = statistics.median(seconds)
    nbytes = x.numel() * x.element_size()
    share = (transport.size - 1) / transport.size
    uncompressed = nbytes * (2 * share if kind == "all_reduce" else share)
    return Row(
        collective=kind,
        codec=codec,
        algorithm=algorithm,
        dtype=options.dtype,
        ranks=transport.size,
        size=nbytes,
        calls=options.calls,
        time_s=middle,
        min_s=min(seconds),
        max_s=max(seconds),
        algbw_gb_s=nbytes / middle / 1e9,
        busbw_gb_s=sent / middle / 1e9,
        effbw_gb_s=uncompressed / middle / 1e9,
        sent_bytes=sent,
        ratio=uncompressed / sent,
    )


def _largest_over_ranks(transport: Transport, numbers: list[float]) -> list[float]:
    mine = torch.frombuffer(bytearray(struct.pack(f"{len(numbers)}d", *numbers)), dtype=torch.float64)
    transport.all_reduce_max(mine)
    largest: list[float] = mine.tolist()
    return largest


def _write(options: argparse.Namespace, rows: list[Row]) -> None:
    text = FORMATS[options.format](rows, options.columns, None if options.out else screen_width())
    if options.out is None:
        tell(text, f"bench.{options.format}")
    else:
        keep(options.out, lambda place: place.write_bytes(text.encode()), "--out")
        print(options.out)
