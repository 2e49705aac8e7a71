"""``fusionlayer profile``: measures a cost profile. All ranks of a job run it together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

import torch.distributed as dist

from .. import __version__, codecs, context
from ..codecs import Codec
from ..planning.cost_model import parse_rate
from ..planning.profiler.job import measure_profile
from ..planning.profiler.machine import describe_machine, device_name, file_name
from ..planning.sizes import Sizes
from ..process.clock import clock_of
from ..transport import Transport, local
from .arguments import check_folder
from .outputs import keep
from .progress import ProgressLine
from .resolve import check_device, device_of

_COMMENT = "A measured cost profile; profiles/README.md has the schema. Written by: {command}"


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
    with ProgressLine("profile", shown=transport.rank == 0) as progress:
        profile = measure_profile(
            options.model,
            chosen,
            transport,
            pair=_pair(transport),
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
