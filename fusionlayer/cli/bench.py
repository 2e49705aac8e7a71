"""``fusionlayer bench collectives``: how long collectives take, by size, codec and algorithm, on the job's ranks."""

from __future__ import annotations

import argparse
import re
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import codecs, collectives, context, functional, launch
from ..errors import ConfigError
from ..transport import Transport
from .arguments import add_device, check_device, check_file, device_of, names, positive
from .outputs import add_plot, check_picture, keep, keep_picture, tell
from .pictures import draw_bandwidths
from .progress import Progress
from .rows import FORMATS, Row, bandwidths, table, title
from .spawn import RankError, run_on_ranks
from .tables import add_columns, check_columns, screen_width
from .units import MEMORY, in_words

__all__ = ["add_parser", "as_bytes"]

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_DEFAULT = "default"
_SIZE_OF_A_STARTUP = 1 << 18
"""Bytes that take about as long as a call's startup; only the estimate of the time that is left needs it."""

_EPILOG = """\
examples:
    fusionlayer bench collectives -np 2
    fusionlayer bench collectives -np 2 --codecs raw,int8,int4 --plot bench.svg
    torchrun --nproc-per-node 2 --no-python fusionlayer bench collectives
    mpirun -n 2 env FUSIONLAYER_TRANSPORT=mpi \\
        fusionlayer bench collectives --format csv --out rows.csv

size    bytes of the largest tensor of the call, uncompressed: all_gather's
        result, otherwise what each rank gives
time    of one call: the slowest rank's, median over calls; min and max over
        calls stand beside it
algbw   size / time
busbw   bytes that each rank really sends / time: what the network carries
effbw   bytes that each rank would send uncompressed, by the best algorithm
        / time: the network that would be needed to be as fast without a codec.
        all_reduce: 2 (n - 1) / n * size; others: (n - 1) / n * size
ratio   size of those bytes uncompressed / bytes sent

kB, MB and GB are powers of 1000, KiB and MiB of 1024. In csv and json times are
in seconds and bandwidths in GB/s. A codec that cannot travel by an algorithm
has no row; standard error says why.
"""


def as_bytes(text: str) -> int:
    """Read a number of bytes, such as 4096, 64K, 1.5M or 1G; K, KB and KiB are 1024 bytes, and so on."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    value = float(found[1]) * 1024 ** " KMG".index(found[2].upper() or " ") if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected bytes, such as 4096, 64K or 16M")
    return int(value)


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    bench = commands.add_parser("bench", help="measure collectives on the job's ranks")
    subjects = bench.add_subparsers(dest="subject", metavar="SUBJECT", required=True)
    parser = subjects.add_parser(
        "collectives",
        help="time, bandwidth and bytes of collectives, by size, codec and algorithm",
        description="Measure collectives over the ranks that a launcher has started, or over -np\nranks of this host.",
        epilog=_EPILOG,
    )
    parser.add_argument("-np", "--num-proc", type=positive, metavar="N", help="start so many ranks on this host")
    parser.add_argument("--min", type=as_bytes, default=1 << 12, metavar="BYTES", help="smallest size (default 4K)")
    parser.add_argument("--max", type=as_bytes, default=1 << 24, metavar="BYTES", help="largest size (default 16M)")
    parser.add_argument("--factor", type=_above_one, default=4.0, help="from one size to the next (default 4)")
    parser.add_argument(
        "--collectives", type=names, default=[*_KINDS], metavar="NAME,NAME", help=f"default {','.join(_KINDS)}"
    )
    parser.add_argument("--codecs", type=names, default=["raw", "int8", "int4"], metavar="NAME,NAME", help="or all")
    parser.add_argument(
        "--algorithms",
        type=names,
        default=[_DEFAULT],
        metavar="NAME,NAME",
        help="of all_reduce and reduce_scatter; default: what is chosen by codec and number of ranks; or all",
    )
    parser.add_argument("--dtype", choices=[*_DTYPES], default="f32", help="of the tensors (default f32)")
    add_device(parser, "of the tensors")
    parser.add_argument("--calls", type=positive, default=20, metavar="N", help="that are timed (default 20)")
    parser.add_argument("--warmup", type=positive, default=5, metavar="N", help="calls before those (default 5)")
    parser.add_argument("--format", choices=[*FORMATS], default="text", help="default text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of standard output")
    add_plot(parser, "effbw against size")
    add_columns(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure on all ranks; rank 0 writes the rows. Return the exit status."""
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
        with Progress("bench", shown=transport.rank == 0) as progress:
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
            "one rank has nobody to talk to: give -np 2 or more, or start this command by torchrun, mpirun or fusionrun"
        )
    if options.min > options.max:
        raise ConfigError(f"--min {options.min} is above --max {options.max} bytes; give a range")
    check_device(options)
    if options.out is not None and writes:
        check_file(options.out, "--out")
    if options.plot is not None and writes:
        check_picture(options.plot)
    check_columns([table([])], options.columns)
    for collective in options.collectives:
        if collective not in _KINDS:
            raise ConfigError(f"unknown collective {collective!r}; known: {', '.join(_KINDS)}")
    for codec in _codecs(options):
        codecs.get(codec)
    for algorithm in _algorithms(options):
        if algorithm != _DEFAULT:
            collectives.get(algorithm)


def _codecs(options: argparse.Namespace) -> list[str]:
    return codecs.names() if options.codecs == ["all"] else options.codecs


def _algorithms(options: argparse.Namespace) -> list[str]:
    return collectives.names() if options.algorithms == ["all"] else options.algorithms


def _above_one(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 1")
    return value


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
    """Yield kind, algorithm and codec of what is measured."""
    for kind in options.collectives:
        algorithms = {"all_reduce": _algorithms(options), "reduce_scatter": [_DEFAULT]}.get(kind, [_DEFAULT])
        if kind == "reduce_scatter" and {"ring", "all"} & {*options.algorithms}:
            algorithms = [_DEFAULT, "ring"]
        for algorithm in algorithms:
            for codec in _codecs(options):
                yield kind, algorithm, codec


def _measure(options: argparse.Namespace, transport: Transport, progress: Progress) -> Iterator[Row]:
    dtype = _DTYPES[options.dtype]
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
                call = _call(kind, x, codec, None if algorithm == _DEFAULT else algorithm, transport)
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
    if options.plot is not None and rows:
        keep_picture(options.plot, lambda: draw_bandwidths(title(rows), bandwidths(rows)))
