"""A network of the program's own, so that the machine's name server plays no part in what it measures.

Torch's store looks up the name of each process that connects, on its only thread. Where a name server answers late,
nobody gets an answer from the store meanwhile: a rank that has come seems not to have. That is a fault of the machine,
and none of those that are played here.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable

from benchmarks import driver
from benchmarks.lab.namespaces import unshare

__all__ = ["leave"]


def leave(module: str, main: Callable[[], int]) -> None:
    """Run ``main`` of ``python -m module`` in a network with the loopback alone if one can be made; then exit."""
    if any(name != "lo" for _, name in socket.if_nameindex()) and _can_isolate():
        sys.exit(subprocess.call([*_isolated(), sys.executable, "-m", module, *sys.argv[1:]]))
    driver.leave(main)


def _isolated() -> list[str]:
    # The shell is process 1 there: it reaps what the jobs leave, and ends when the program does.
    return [*unshare(), "sh", "-c", 'ip link set lo up && "$@"; exit $?', "sh"]


def _can_isolate() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*_isolated(), "true"], capture_output=True).returncode == 0
