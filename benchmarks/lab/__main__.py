"""Emulated networks on one machine, as a command: python -m benchmarks.lab."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from benchmarks.lab import kept
from benchmarks.lab.check import measure
from benchmarks.lab.flaps import EVENTS, Flap
from benchmarks.lab.job import INTERRUPTED
from benchmarks.lab.launcher import launch, why_not
from benchmarks.lab.mpi import why_no_mpi
from benchmarks.lab.network import Network, Obstacle, seconds_of

__all__ = ["main"]

_DESCRIPTION = """\
Run programs on hosts that are joined by a network of a given speed, all on this machine.

Each host is a network namespace with one link, eth0, shaped both ways; workers find each other as under torchrun.
Nothing of this machine's own network is touched, and nothing is left behind. Works as root and without; Linux only.

  python -m benchmarks.lab run --hosts 2 --rate 100mbit -- python examples/train_gpt.py --codec int8
  python -m benchmarks.lab run --hosts 2 --workers 2 --rate 1gbit --delay 1ms --mpi -- python train.py
  python -m benchmarks.lab check --rate 1gbit

  python -m benchmarks.lab up --hosts 4 --rate 1gbit
  python -m benchmarks.lab run --name lab -- python train.py
  python -m benchmarks.lab run --name lab --host 0 -- ping -c 3 10.77.0.2
  python -m benchmarks.lab down
"""
_PLACES = "host 0 is 10.77.0.1, host 1 is 10.77.0.2, and so on"
_FIELDS = (
    *("hosts", "rate", "interfaces", "rates", "delay", "loss", "reordering", "corruption", "congestion"),
    "allow_cpu_bound",
)


def _parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description=_DESCRIPTION, formatter_class=style)
    commands = parser.add_subparsers(dest="action", required=True, metavar="up|down|list|run|check")

    run = commands.add_parser("run", help="run workers, in a lab of their own or in one that is up", epilog=_PLACES)
    _add_network(run)
    run.add_argument("--name", help="run in this lab, which is up; the network's options do not apply then")
    run.add_argument("--workers", type=int, default=1, help="workers on each host (default 1)")
    run.add_argument("--host", type=int, help="the only host, from 0, that has workers (default: all have)")
    run.add_argument("--mpi", action="store_true", help="mpirun of Open MPI starts the workers")
    run.add_argument("--timeout", type=float, default=600.0, help="seconds until all workers are ended (default 600)")
    run.add_argument("--bytes", action="store_true", help="at the end, say how many bytes each host has sent")
    run.add_argument(
        "--flap",
        action="append",
        default=[],
        metavar="HOST:DEVICE:FROM-TO[:EVENT]",
        help="this host's interface is down for this time after the start, such as 1:eth1:2s-5s, or after a worker has "
        f"made the file EVENT in the folder ${EVENTS}; may be given again",
    )
    run.add_argument("command", nargs="+", help="what each worker runs, after --")

    up = commands.add_parser("up", help="make a lab that stays", epilog=_PLACES)
    _add_network(up)
    up.add_argument("--name", default=kept.DEFAULT_NAME, help=f"of the lab (default {kept.DEFAULT_NAME})")

    down = commands.add_parser("down", help="end a lab and all that runs in it")
    down.add_argument("--name", default=kept.DEFAULT_NAME, help=f"of the lab (default {kept.DEFAULT_NAME})")

    commands.add_parser("list", help="show the labs that are up")

    check = commands.add_parser("check", help="measure what a lab gives against what was asked of it")
    _add_network(check)
    check.add_argument("--seconds", type=float, default=3.0, help="of each stream (default 3)")
    return parser


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument("--hosts", type=int, help="number of hosts (default 2)")
    group.add_argument("--rate", help="of each host's link, both ways, such as 100mbit (default: not limited)")
    group.add_argument(
        "--interfaces",
        type=_words,
        metavar="RATE,RATE",
        help="every host has eth0, eth1 and so on, of these rates, such as 30mbit,100mbit",
    )
    group.add_argument(
        "--rates", type=_words, metavar="RATE,RATE", help="of each host's link, where hosts differ, one for each"
    )
    group.add_argument("--delay", help="of every frame on its way between two hosts, such as 1ms (default: none)")
    group.add_argument("--rtt", help="round trip, such as 50ms: the same as a delay of half of it")
    group.add_argument("--loss", type=float, help="chance of a frame to be lost, such as 0.01 (default 0)")
    group.add_argument("--reordering", type=float, help="chance of a frame to be overtaken by later ones (default 0)")
    group.add_argument(
        "--corruption",
        type=float,
        help="chance of a long frame to have a bit flipped that no checksum tells (default 0)",
    )
    group.add_argument("--congestion", help="control of TCP (default reno)")
    group.add_argument(
        "--allow-cpu-bound",
        action="store_true",
        default=None,
        help="take a rate above 1gbit, although this machine's cores then limit it",
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _network_options(options: argparse.Namespace) -> dict[str, object]:
    """Return the options of the network that were given."""
    given = {field: value for field in _FIELDS if (value := getattr(options, field)) is not None}
    if options.rtt is not None:
        if "delay" in given:
            raise ValueError(f"--delay {options.delay} and --rtt {options.rtt}; give one of them")
        given["delay"] = f"{seconds_of('rtt', options.rtt) / 2 * 1e3:g}ms"
    if "rates" in given and "hosts" not in given:
        given["hosts"] = len(options.rates)
    return given


def _possible(options: argparse.Namespace, mpi: bool = False) -> Network:
    """Return the network that was asked for, which this machine can make."""
    network = Network(**_network_options(options))  # type: ignore[arg-type]
    if reason := why_not(network, mpi=mpi):
        raise Obstacle(f"no such network here: {reason}")
    return network


def _run(options: argparse.Namespace) -> int:
    if options.name is None:
        place: Network | kept.Lab = _possible(options, mpi=options.mpi)
    else:
        if given := _network_options(options):
            raise ValueError(
                f"--{min(given).replace('_', '-')} with --name; the network of a lab that is up is settled"
            )
        place = kept.find(options.name)
        if options.mpi and (reason := why_no_mpi()):
            raise Obstacle(reason)
    with launch(
        options.command,
        place,
        workers=options.workers,
        timeout=options.timeout,
        mpi=options.mpi,
        host=options.host,
        count_bytes=options.bytes,
        flaps=[Flap.parse(text) for text in options.flap],
    ) as process:
        return process.wait()


def _check(options: argparse.Namespace) -> int:
    """Measure each interface of the first two hosts; where hosts differ, the links from the first to all others."""
    network = _possible(options)
    load = os.getloadavg()[0]
    print(f"{network}; load {load:.1f} before")
    links = [(0, peer) for peer in range(1, network.hosts)] if network.rates else [(0, 1)]
    if network.interfaces:
        links = [(number, 1) for number in range(len(network.interfaces))]
    for number, peer in links:
        if len(links) > 1:
            print(f"{network.devices[number]} of hosts 0 and {peer}:")
        rows = measure(network, options.seconds, number, peer).rows()
        widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in rows[0]}
        for row in [{column: column for column in widths}, *rows]:
            print("  ".join(text.ljust(widths[column]) for column, text in row.items()).rstrip())
    return 0


def _perform(options: argparse.Namespace) -> int:
    if options.action == "run":
        return _run(options)
    if options.action == "check":
        return _check(options)
    if options.action == "up":
        network = _possible(options)
        lab = kept.up(network, options.name)
        print(f"{lab.name}: {network}")
    elif options.action == "down":
        kept.down(options.name)
    else:
        for name in kept.names():
            with suppress(Obstacle):  # it has ended meanwhile, or is still being made
                lab = kept.find(name)
                print(f"{name}: {lab.network}; process {lab.process}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _perform(options)
    except ValueError as error:
        parser.error(str(error))
    except Obstacle as obstacle:
        print(obstacle, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
