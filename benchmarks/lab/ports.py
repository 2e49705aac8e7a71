"""A port for a process that is started later."""

from __future__ import annotations

import socket

__all__ = ["hold_port"]


def hold_port() -> socket.socket:
    """Return a socket that holds a port of this host, until it is closed, for another process that will listen there.

    The system gives the port neither to connections nor to those who let it choose one. A server may listen at it all
    the same, because both ends allow addresses to be used again, as those of torch, Python and Slurm do.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
