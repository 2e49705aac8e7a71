"""Strangers at the ports on which processes listen."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

__all__ = ["Scanner", "listening"]

_LISTEN = "0A"
_TIMES = 20
"""Connections of a scan to each port."""


def listening(pid: int) -> set[int]:
    """Return the TCP ports on which a process of this user listens; none if it has ended."""
    inodes = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                name = os.readlink(descriptor)
                if name.startswith("socket:["):
                    inodes.add(name[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in inodes:
                    ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


class Scanner:
    """A stranger that connects to every port once it is there.

    Args:
        how: "half-open" says nothing and stays; "garbage" sends bytes without meaning; "scan" comes and goes at once,
            many times.
    """

    def __init__(self, how: str) -> None:
        self._how = how
        self._known: set[int] = set()
        self._kept: list[socket.socket] = []

    def visit(self, pids: Iterable[int]) -> int:
        """Connect to the ports that are new; return how many of them took the connection."""
        ports = set().union(*map(listening, pids)) - self._known
        return sum(map(self._knock, ports))

    def _knock(self, port: int) -> bool:
        self._known.add(port)
        reached = False
        for _ in range(_TIMES if self._how == "scan" else 1):
            stranger = socket.socket()
            stranger.settimeout(0.2)
            with suppress(OSError):
                stranger.connect(("127.0.0.1", port))
                reached = True
                if self._how == "garbage":
                    stranger.sendall(random.Random(port).randbytes(512))
            if self._how == "scan":
                stranger.close()
            else:
                self._kept.append(stranger)
        return reached

    def __enter__(self) -> Scanner:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for stranger in self._kept:
            stranger.close()
