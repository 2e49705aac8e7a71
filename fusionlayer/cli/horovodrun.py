"""Flags of horovodrun without a counterpart here: those whose effect holds anyway, and refused ones."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from ..base.errors import ConfigError


class _Flag(NamedTuple):
    """A refused flag: the number of its values, and a remedy."""

    values: int
    instead: str


# Flags whose effect fusionrun has anyway.
_TAKEN = (
    "--gloo",
    "--disable-cache",
    "--no-autotune",
    "--no-hierarchical-allreduce",
    "--no-hierarchical-allgather",
    "--no-torus-allreduce",
    "--no-timeline-mark-cycles",
    "--no-mpi-threads-disable",
    "--log-without-timestamp",
    "--log-hide-timestamp",
)

_SEARCH = "buckets are not searched for while training runs, which made no step faster; leave it out"
_TIMES = "the program formats its log: logging.basicConfig(format='%(asctime)s %(message)s')"
_STAMPS = "pipe the output through 'ts', or give --output-filename"

_REFUSED = {
    "--cycle-time-ms": _Flag(
        1, "messages leave when they are complete, so there is no cycle to wait for; leave it out"
    ),
    "--timeline-mark-cycles": _Flag(0, "there are no cycles to mark; leave it out"),
    "--hierarchical-allreduce": _Flag(0, "write 'algorithm: two_level' into the file that FUSIONLAYER_CONFIG names"),
    "--hierarchical-allgather": _Flag(0, "gathers go between nodes once by themselves; leave it out"),
    "--torus-allreduce": _Flag(0, "write 'algorithm: two_level' into the file that FUSIONLAYER_CONFIG names"),
    "--autotune": _Flag(0, _SEARCH),
    "--autotune-log-file": _Flag(1, _SEARCH),
    "--autotune-warmup-samples": _Flag(1, _SEARCH),
    "--autotune-steps-per-sample": _Flag(1, _SEARCH),
    "--autotune-bayes-opt-max-samples": _Flag(1, _SEARCH),
    "--autotune-gaussian-process-noise": _Flag(1, _SEARCH),
    "--mpi": _Flag(
        0, "start with 'mpirun -n N python train.py'; FUSIONLAYER_TRANSPORT=mpi lets MPI move the bytes too"
    ),
    "--mpi-args": _Flag(1, "start with mpirun itself"),
    "--mpi-threads-disable": _Flag(0, "MPI is not used, so nothing limits its threads; leave it out"),
    "--tcp": _Flag(0, "start with mpirun itself"),
    "--binding-args": _Flag(1, "start with mpirun itself, or bind processes by numactl or taskset"),
    "--thread-affinity": _Flag(1, "bind processes by numactl or taskset; threads keep to what their process has"),
    "--num-nccl-streams": _Flag(
        1, "each lane has a stream of its own: write 'lanes: 2' into the file that FUSIONLAYER_CONFIG names"
    ),
    "--jsrun": _Flag(0, "start with jsrun itself; processes meet at MASTER_ADDR and MASTER_PORT"),
    "--config-file": _Flag(1, "give flags here; settings go into the file that FUSIONLAYER_CONFIG names"),
    "--host-discovery-script": _Flag(
        1,
        "hosts join when an agent of torchrun starts on them: give all hosts that may take part with -H and "
        "--min-np, or start 'torchrun --rdzv-endpoint ...', which --verbose shows, on a new host",
    ),
    "--slots-per-host": _Flag(1, "say the slots of each host: -H node1:4,node2:4"),
    "--blacklist-cooldown-range": _Flag(2, "hosts are not discovered, so none is excluded; leave it out"),
    "--log-with-timestamp": _Flag(0, _TIMES),
    "--no-log-hide-timestamp": _Flag(0, _TIMES),
    "--prefix-output-with-timestamp": _Flag(0, _STAMPS),
    "-prefix-timestamp": _Flag(0, _STAMPS),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` know these flags; its help does not show them."""
    for flag in _TAKEN:
        parser.add_argument(flag, dest=flag, action="store_true", help=argparse.SUPPRESS)
    for flag, (values, _) in _REFUSED.items():
        if values:
            parser.add_argument(flag, dest=flag, nargs=values, help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, dest=flag, action="store_true", help=argparse.SUPPRESS)


def refuse(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for the first flag without meaning here, with a remedy."""
    for flag, (_, instead) in _REFUSED.items():
        if getattr(options, flag):
            raise ConfigError(f"{flag} means nothing here: {instead}")
