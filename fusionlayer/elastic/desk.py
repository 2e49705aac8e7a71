"""The store that each member keeps: there it is found when the job changes, whoever else is lost."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore

from ..errors import TransportError
from ..processes import node_name
from ..transport._interfaces import reachable_names
from .generation import Address

__all__ = ["is_refused", "open_store", "reach"]

_TOKEN = "fusionlayer/token"
_LOOPBACK = "127.0.0.1"
# Seconds that a host may take to accept a connection before the next of its addresses is tried.
_KNOCK = 1.0


def open_store(loopback: bool, patience: float) -> tuple[TCPStore, Address]:
    """Open a store in this process, at a port of the system's choice; return it and where it is.

    Args:
        loopback: only processes of this host may reach it.
        patience: seconds that a request may take.
    """
    own = socket.create_server((_LOOPBACK if loopback else "", 0), backlog=1024)
    port = own.getsockname()[1]
    store = TCPStore(
        _LOOPBACK,
        port,
        None,
        True,
        timedelta(seconds=patience),
        wait_for_workers=False,
        master_listen_fd=own.detach(),
    )
    token = secrets.token_hex(8)
    store.set(_TOKEN, token)
    return store, Address(node_name(), (_LOOPBACK,) if loopback else tuple(reachable_names()), port, token)


def reach(address: Address, patience: float) -> TCPStore:
    """Return a client of the store at an address, whose requests take ``patience`` seconds at most.

    Raises:
        TransportError: nobody answers there, or another program does.
    """
    for name in _names(address):
        # The same name may lead to different hosts, depending on where it is used. The token shows the right store.
        with suppress(OSError, RuntimeError):
            socket.create_connection((name, address.port), _KNOCK).close()
            store = TCPStore(name, address.port, None, False, timedelta(seconds=patience), wait_for_workers=False)
            if store.check([_TOKEN]) and store.get(_TOKEN).decode() == (address.token or store.get(_TOKEN).decode()):
                return store
    raise TransportError(f"nobody answers at port {address.port} of {', '.join(_names(address))}")


def is_refused(address: Address) -> bool:
    """Return whether the host of a store is there and says that nobody listens: the process has ended."""
    answers = []
    for name in _names(address):
        try:
            socket.create_connection((name, address.port), _KNOCK).close()
        except ConnectionRefusedError:
            answers.append(True)
        except OSError:
            continue
        else:
            answers.append(False)
    return bool(answers) and all(answers)


def _names(address: Address) -> tuple[str, ...]:
    return (_LOOPBACK,) if address.node == node_name() else address.names
