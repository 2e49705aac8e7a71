"""The options of ``fusionlayer profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...planning.sizes import Sizes
from ..arguments import add_device, names, positive

_EPILOG = """\
examples:
    fusionlayer profile --model gpt --codec raw,int8,int4
    torchrun --nproc-per-node 2 --no-python fusionlayer profile --model gpt
    mpirun -n 2 fusionlayer profile --model mypackage.training:model_and_batch
    torchrun --nproc-per-node 2 --no-python fusionlayer profile --device cuda

One process measures the model's step, codecs and copies. Several ranks also
measure links and collectives, and write means over ranks. With --device cuda
all of it is on GPUs, in their time. profiles/README.md has the file's schema.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    whole = Sizes()
    parser = commands.add_parser(
        "profile",
        help="measure what a model's step, codecs and collectives cost",
        description="Measure a cost profile of this machine or job.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--model",
        default="gpt",
        metavar="NAME",
        help="gpt, resnet, or module:function; the function returns the model, whose forward returns the loss, and "
        "its arguments (default gpt)",
    )
    parser.add_argument("--codec", type=names, metavar="NAME,NAME", help="codecs to measure (default: all)")
    add_device(parser, "place of the model")
    parser.add_argument("--rate", metavar="RATE", help="rate of the link, such as 1gbit (default: as measured)")
    parser.add_argument(
        "--out", type=Path, default=Path("profiles"), metavar="FOLDER", help="output folder (default profiles)"
    )
    parser.add_argument("--hardware", metavar="NAME", help="name of the machine (default: its processor)")
    parser.add_argument(
        "--steps", type=positive, default=whole.steps, help=f"steps of the model (default {whole.steps})"
    )
    parser.add_argument(
        "--repeats", type=positive, default=whole.repeats, help=f"calls for each size (default {whole.repeats})"
    )
    parser.add_argument(
        "--largest",
        type=positive,
        default=whole.elements[-1],
        metavar="N",
        help=f"largest number of elements of a tensor, and of bytes of a transfer (default {whole.elements[-1]})",
    )
