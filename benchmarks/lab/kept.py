"""Labs that stay up between runs.

A lab that is kept is one process, and what it has made. It answers on a socket whose name the kernel holds and forgets
with the process: there is no file that could be left behind.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.lab.namespaces import Namespaces, unshare, why_refused
from benchmarks.lab.network import Network, Obstacle

__all__ = ["DEFAULT_NAME", "LONGEST_ANSWER", "Lab", "down", "find", "names", "peer_of", "up"]

DEFAULT_NAME = "lab"
LONGEST_ANSWER = 4096
"""Bytes of the description of a lab."""

_KEEPER = str(Path(__file__).with_name("keeper.py"))
_PATIENCE = 20.0
"""Seconds in which a lab must answer or end."""


@dataclass(frozen=True)
class Lab:
    """A lab that is up: its name, its network and the process that keeps it."""

    name: str
    network: Network
    process: int

    @contextmanager
    def namespaces(self) -> Iterator[Namespaces]:
        """Yield its namespaces, which are open within the block.

        Raises:
            Obstacle: it is gone.
        """
        connection, _, files = _ask(self.name)
        connection.close()
        try:
            user, process, net, *hosts = files
            yield Namespaces(user, process, net, tuple(hosts))
        finally:
            for file in files:
                os.close(file)


def up(network: Network, name: str = DEFAULT_NAME) -> Lab:
    """Return a new lab that stays until ``down``.

    Raises:
        ValueError: not a name, or a network without namespaces.
        Obstacle: the name is taken, or this machine cannot make the network.
    """
    if not network.isolated:
        raise ValueError("a lab without namespaces cannot be kept; there is nothing to keep")
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address(name))
        except OSError:
            raise Obstacle(f"there is a lab {name!r} already; take it away (down) or choose another --name") from None
        # Detached by `setsid --fork`, so that it is no child of this process.
        arguments = [json.dumps(asdict(network)), str(listener.fileno())]
        with subprocess.Popen(
            ["setsid", "--fork", *unshare(), sys.executable, _KEEPER, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[listener.fileno()],
            text=True,
        ) as starter:
            assert starter.stdout is not None
            answers = []
            while (answer := starter.stdout.readline().strip()) not in ("ready", ""):
                answers.append(answer)
    if answer != "ready":
        raise Obstacle(why_refused("\n".join(answers)))
    return find(name)


def find(name: str = DEFAULT_NAME) -> Lab:
    """Return the lab of this user that has this name.

    Raises:
        Obstacle: there is none.
    """
    connection, network, files = _ask(name)
    with connection:
        for file in files:
            os.close(file)
        return Lab(name, network, peer_of(connection)[0])


def down(name: str = DEFAULT_NAME) -> None:
    """End a lab and all that runs in it; return when they are gone.

    Raises:
        Obstacle: there is none of this name, or it does not end.
    """
    connection, _, files = _ask(name)
    for file in files:
        os.close(file)
    with connection:
        process = os.pidfd_open(peer_of(connection)[0])
        connection.sendall(b"down")
    end = time.monotonic() + _PATIENCE
    try:
        ended = select.select([process], [], [], _PATIENCE)[0]
    finally:
        os.close(process)
    # unshare, which has the socket too, ends a moment after the process that it waits for.
    while not ended or name in names():
        if time.monotonic() > end:
            raise Obstacle(f"the lab {name!r} did not end within {_PATIENCE:g} s")
        time.sleep(0.01)


def names() -> list[str]:
    """Return the names of this user's labs."""
    prefix = _prefix().replace("\0", "@")
    table = Path("/proc/net/unix")
    words = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
    return sorted({row[7].removeprefix(prefix) for row in words if len(row) == 8 and row[7].startswith(prefix)})


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def _address(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,40}", name):
        raise ValueError(f"name={name!r}; expected 1 to 40 letters, digits, dots and dashes")
    return _prefix() + name


def _prefix() -> str:
    return f"\0fusionlayer-lab/{os.geteuid()}/"


def _ask(name: str) -> tuple[socket.socket, Network, list[int]]:
    """Return the open connection to a lab, its network and its namespaces as open files."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_PATIENCE)
    try:
        connection.connect(_address(name))
        if peer_of(connection)[1] != os.geteuid():
            raise Obstacle(f"the lab {name!r} is another user's; choose another --name")
        text, files, _, _ = socket.recv_fds(connection, LONGEST_ANSWER, 253)
        return connection, Network(**json.loads(text)), list(files)
    except (OSError, ValueError):
        connection.close()
        raise Obstacle(f"there is no lab {name!r}; make one (up --name {name})") from None
    except BaseException:
        connection.close()
        raise
