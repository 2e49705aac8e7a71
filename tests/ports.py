"""Ports of this host that belong to one test."""

import socket

from benchmarks.lab.ports import hold_port

__all__ = ["free_port"]

_held: list[socket.socket] = []


def free_port() -> int:
    """Return a port at which only a process of the calling test will listen. It is held until this process ends."""
    _held.append(hold_port())
    port: int = _held[-1].getsockname()[1]
    return port
