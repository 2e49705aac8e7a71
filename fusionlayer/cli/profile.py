"""``fusionlayer profile``: measures a cost profile. All ranks of a job run it together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import __version__, codecs, context
from ..clock import clock_of
from ..codecs import Codec
from ..planning.cost_model import parse_rate
from ..planning.profiler import Sizes, describe_machine, device_name, file_name, measure_profile
from ..transport import Transport, local
from .arguments import add_device, check_device, check_folder, device_of, names, positive
from .outputs import keep
from .progress import Progress

__all__ = ["add_parser"]

_EPILOG = """\
examples:
    fusionlayer profile --model gpt --codec raw,int8,int4
    torchrun --nproc-per-node 2 --no-python fusionlayer profile --model gpt
    mpirun -n 2 fusionlayer profile --model mypackage.training:model_and_batch
    torchrun --nproc-per-node 2 --no-python fusionlayer profile --device cuda

Alone it measures the model's step, codecs and copies. On several ranks it also
measures a link and collectives, and writes means over ranks. The schema of the
file is in profiles/README.md. With --device cuda model, codecs and messages
are on GPUs, and times are those of the GPUs.
"""
_COMMENT = "A measured cost profile; profiles/README.md has the schema. Written by: {command}"


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
        help="gpt, resnet, or module:function, which returns a model, whose forward returns its loss, and the "
        "arguments of that forward (default gpt)",
    )
    parser.add_argument("--codec", type=names, metavar="NAME,NAME", help="codecs to measure (default: all)")
    add_device(parser, "of the model")
    parser.add_argument("--rate", metavar="RATE", help="of the link, such as 1gbit (default: as it was measured)")
    parser.add_argument("--out", type=Path, default=Path("profiles"), metavar="FOLDER", help="default profiles")
    parser.add_argument("--hardware", metavar="NAME", help="of the machine (default: its processor)")
    parser.add_argument("--steps", type=positive, default=whole.steps, help=f"of the model (default {whole.steps})")
    parser.add_argument(
        "--repeats", type=positive, default=whole.repeats, help=f"calls for each size (default {whole.repeats})"
    )
    parser.add_argument(
        "--largest",
        type=positive,
        default=whole.elements[-1],
        metavar="N",
        help=f"elements, and bytes of transfers, up to which sizes grow fourfold (default {whole.elements[-1]})",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure on all ranks; rank 0 writes the profile and prints its path."""
    if options.rate is not None:
        parse_rate(options.rate)
    check_device(options)
    chosen = {name: codecs.get(name) for name in options.codec or codecs.names()}
    whole = Sizes()
    grown = tuple(size for size in whole.elements[2:] if size <= options.largest)
    sizes = Sizes((*whole.elements[:2], *grown), (*whole.nbytes[:2], *grown), options.steps, options.repeats)
    context.init()
    try:
        _measure(options, chosen, sizes)
    finally:
        context.shutdown()


def _measure(options: argparse.Namespace, chosen: Mapping[str, Codec], sizes: Sizes) -> None:
    device = device_of(options)  # before the transport, which takes the current one
    transport = context.transport()
    if transport.rank == 0:
        check_folder(options.out, "--out")
    environment = {**describe_machine(options.hardware or device_name(device)), "fusionlayer": __version__}
    with Progress("profile", shown=transport.rank == 0) as progress:
        profile = measure_profile(
            options.model,
            chosen,
            transport,
            pair=_pair(transport),
            local_size=context.local_size(),
            rate=options.rate,
            sizes=sizes,
            environment=environment,
            clock=clock_of(device),
            note=progress.at,
        )
    if transport.rank == 0:
        path = options.out / f"{file_name(profile.model.name, environment)}.yaml"
        keep(path, lambda place: profile.to_yaml(place, _COMMENT.format(command=environment["command"])), "--out")
        print(path)
        sys.stdout.flush()
    transport.barrier()


def _pair(transport: Transport) -> Transport | None:
    """Return a transport between the first and the last rank, which are the furthest apart; None on the other ranks."""
    if transport.size == 2 or local.current() is not None:
        return transport if transport.size == 2 else None
    if transport.size == 1:
        return None
    ends = [0, transport.size - 1]
    group = dist.new_group(ends)
    return context.transport(group) if transport.rank in ends else None
