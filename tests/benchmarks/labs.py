"""What the tests of the lab share."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.lab import Network, launch
from benchmarks.lab.mpi import why_no_mpi
from tests.examples.places import ROOT, marked, needs_namespaces
from tests.tiers import exhaustive

__all__ = [
    "ROOT",
    "command_of",
    "mark",
    "marked",
    "needs_mpi",
    "needs_switch",
    "netns",
    "run",
    "state_of_machine",
    "thorough",
    "wait_until",
]

_TUN = os.access("/dev/net/tun", os.R_OK | os.W_OK)
_CC = shutil.which("cc") is not None

netns = [pytest.mark.medium, pytest.mark.netns, needs_namespaces]
thorough = exhaustive(
    guarded_by="tests/benchmarks/test_lab.py::TestLink::test_hosts_reach_each_other_over_shaped_links"
)
"""Marks what CI has of the lab; the fast tier sees that there is one."""
needs_switch = pytest.mark.skipif(
    not (_TUN and _CC), reason="no C compiler: install gcc" if _TUN else "this user may not open /dev/net/tun"
)
needs_mpi = pytest.mark.skipif(why_no_mpi() is not None, reason=f"needs Open MPI: {why_no_mpi()}")


def run(
    command: Sequence[str],
    network: Network,
    *,
    workers: int = 1,
    timeout: float = 180,
    mpi: bool = False,
    count_bytes: bool = False,
) -> tuple[int, str]:
    """Return exit status and output of ``command`` in ``network``."""
    with launch(
        command,
        network,
        workers=workers,
        timeout=timeout,
        mpi=mpi,
        count_bytes=count_bytes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        return process.wait(), output


def mark() -> tuple[str, dict[str, str]]:
    """Return a word that no other process has in its environment, and an environment that has it."""
    key, value = "FUSIONLAYER_TEST_MARK", f"{os.getpid()}-{time.monotonic_ns()}"
    return f"{key}={value}", {**os.environ, key: value}


def wait_until(condition: Callable[[], bool], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def command_of(process: int) -> str:
    """Return the name of the program that a process runs; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def state_of_machine(lab: str = "") -> dict[str, str]:
    """Return what a lab could leave behind in the network of this machine itself, and who answers by its name."""
    commands = {"links": ("ip", "-brief", "link"), "shapers": ("tc", "qdisc"), "namespaces": ("ip", "netns")}
    told = {
        name: subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name, command in commands.items()
    }
    sockets = [row.split()[-1] for row in Path("/proc/net/unix").read_text().splitlines()]
    return {**told, "lab": " ".join(s for s in sockets if "@fusionlayer-lab/" in s and s.endswith(f"/{lab}"))}
