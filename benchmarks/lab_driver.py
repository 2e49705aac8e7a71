"""What the command lines share whose workers are the same module again, on the hosts of a lab."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import driver
from .lab import Flap, Network, launch, why_not
from .report import Environment

__all__ = ["begin", "parse", "run"]

_WORKER = "--worker"


def parse(parser: argparse.ArgumentParser, work: Callable[[Mapping[str, Any]], None]) -> argparse.Namespace | None:
    """Return the options. In a worker do its ``work``, whose last line on stdout is rank 0's result, and return None.

    The parser gets --out, --hardware, --busy-ok and --smoke.
    """
    driver.add_options(parser, timed=True, smoke=True)
    parser.add_argument(_WORKER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return None
    return options


def begin(
    parser: argparse.ArgumentParser, options: argparse.Namespace, make: Callable[[], Network]
) -> tuple[Network, Environment]:
    """Return the network and the environment, once the machine is quiet enough.

    Args:
        parser: tells the user that there is no such network, if ``make`` raises ``ValueError``.
        options: as parsed.
        make: returns the network that they ask for.

    Raises:
        SystemExit: there is none here, or the machine is busy; the message says why.
    """
    try:
        network = make()
    except ValueError as error:
        parser.error(str(error))
    if reason := why_not(network):
        raise SystemExit(f"no such network here: {reason}")
    return network, driver.begin(options, network.hosts)


def run(
    module: str, job: Mapping[str, Any], network: Network, timeout: float, flaps: Sequence[Flap] = ()
) -> dict[str, Any]:
    """Return what rank 0 of the workers of ``python -m module`` has found: one worker on each host, all with the job.

    Raises:
        SystemExit: a worker failed, which it has said on stderr.
    """
    command = [sys.executable, "-m", module, _WORKER, json.dumps(job)]
    with launch(command, network, timeout=timeout, flaps=flaps, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        told = process.stdout.read()
        if process.wait():
            raise SystemExit(1)
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found
