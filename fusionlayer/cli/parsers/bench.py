"""The options of ``fusionlayer bench``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ..arguments import add_device, add_removed, join, names, positive, some_of
from ..rows import FORMATS, table
from ..tables import add_columns

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
"""torch's names of types by ours."""
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
DEFAULT = "default"
"""The algorithm that is chosen by codec and nodes."""

_EPILOG = """\
examples:
    fusionlayer bench collectives -np 2
    fusionlayer bench collectives -np 2 --codecs raw,int8,int4
    torchrun --nproc-per-node 2 --no-python fusionlayer bench collectives
    mpirun -n 2 env FUSIONLAYER_TRANSPORT=mpi \\
        fusionlayer bench collectives --format csv --out rows.csv

size    bytes of the call's largest tensor, uncompressed
time    the slowest rank's, median over calls, with min and max
algbw   size / time
busbw   bytes sent by a rank / time: what the network carries
effbw   bytes of the best algorithm without a codec / time: the network that
        would be as fast uncompressed. all_reduce: 2 (n - 1) / n * size;
        others: (n - 1) / n * size
ratio   those bytes / bytes sent

kB, MB and GB are powers of 1000, KiB and MiB of 1024. csv and json have seconds
and GB/s. A codec that an algorithm cannot send has no row; standard error says
why.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    bench = commands.add_parser("bench", help="measure collectives on the job's ranks")
    subjects = bench.add_subparsers(dest="subject", metavar="SUBJECT", required=True)
    parser = subjects.add_parser(
        "collectives",
        help="time, bandwidth and bytes of collectives, by size, codec and algorithm",
        description="Measure collectives over the ranks of a launcher, or -np ranks of this host.",
        epilog=_EPILOG,
    )
    parser.add_argument("-np", "--num-proc", type=positive, metavar="N", help="ranks to start on this host")
    parser.add_argument("--min", type=as_bytes, default=1 << 12, metavar="BYTES", help="smallest size (default 4K)")
    parser.add_argument("--max", type=as_bytes, default=1 << 24, metavar="BYTES", help="largest size (default 16M)")
    parser.add_argument("--factor", type=_above_one, default=4.0, help="growth of the size (default 4)")
    parser.add_argument(
        "--collectives",
        type=some_of("collective", KINDS),
        default=[*KINDS],
        metavar="NAME,NAME",
        help=f"default {join(KINDS)}",
    )
    parser.add_argument(
        "--codecs", type=names, default=["raw", "int8", "int4"], metavar="NAME,NAME", help="codecs, or all"
    )
    parser.add_argument(
        "--algorithms",
        type=names,
        default=[DEFAULT],
        metavar="NAME,NAME",
        help="algorithms of all_reduce and reduce_scatter, or all (default: by codec and nodes)",
    )
    parser.add_argument("--dtype", choices=[*DTYPES], default="f32", help="type of the tensors (default f32)")
    add_device(parser, "place of the tensors")
    parser.add_argument("--calls", type=positive, default=20, metavar="N", help="timed calls (default 20)")
    parser.add_argument("--warmup", type=positive, default=5, metavar="N", help="calls before (default 5)")
    parser.add_argument("--format", choices=[*FORMATS], default="text", help="output format (default text)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file (default: standard output)")
    add_removed(parser, "--plot", "write rows with --format csv --out FILE and draw those")
    add_columns(parser, [column.name for column in table([]).columns])
    parser.set_defaults(check=_check)


def as_bytes(text: str) -> int:
    """Read a number of bytes, such as 4096, 64K, 1.5M or 1G; K, KB and KiB are 1024 bytes, and so on."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    value = float(found[1]) * 1024 ** " KMG".index(found[2].upper() or " ") if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected bytes, such as 4096, 64K or 16M")
    return int(value)


def _above_one(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 1")
    return value


def _check(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for options that contradict each other."""
    if options.min > options.max:
        raise ConfigError(f"--min {options.min} is above --max {options.max} bytes; give a range")
