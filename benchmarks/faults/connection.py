"""Connections between the controller and its hosts and ranks: pickled messages over a socket that has a path."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["accept", "connect", "listen"]


def listen(path: str) -> socket.socket:
    """Return a socket at ``path``. A path is seen from other network namespaces, too."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    return listener


def accept(listener: socket.socket) -> tuple[Connection, tuple[Any, ...]]:
    """Return a new connection, and who is at its other end."""
    connection = Connection(listener.accept()[0].detach())
    return connection, connection.recv()


def connect(path: str, who: tuple[Any, ...]) -> Connection:
    """Return a connection to the socket at ``path``, as ``who``."""
    end = socket.socket(socket.AF_UNIX)
    end.connect(path)
    connection = Connection(end.detach())
    connection.send(who)
    return connection
