"""A TCP store for processes that met without one. Rank 0 keeps it, and a broadcast tells the others its address."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from ..interfaces import reachable_names
from ..processes import node_name

__all__ = ["open_store"]

_NOTICE_BYTES = 4096
_TOKEN = "fusionlayer/token"
# Seconds that a host may take to accept a connection before the next of its addresses is tried.
_KNOCK = 3.0


def open_store(rank: int, timeout: float, broadcast: Callable[[Tensor], None]) -> dist.Store:
    """Return a store that all ranks share. All ranks call it together.

    Args:
        rank: this rank. Rank 0 keeps the store for the life of its process.
        timeout: seconds that the store may take to answer.
        broadcast: a function that replaces a tensor (n,) uint8 by that of rank 0.

    Raises:
        TransportError: rank 0 cannot be reached by any of its addresses.
    """
    notice = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8, device="cpu")
    patience = timedelta(seconds=timeout)
    if rank == 0:
        store = dist.TCPStore("0.0.0.0", 0, None, True, patience, wait_for_workers=False)
        token = secrets.token_hex(8)
        store.set(_TOKEN, token)
        told = {"node": node_name(), "names": reachable_names(), "port": store.port, "token": token}
        text = json.dumps(told).encode()
        notice[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        broadcast(notice)
        return store
    broadcast(notice)
    told = json.loads(notice.numpy().tobytes().rstrip(b"\0"))
    names = ["127.0.0.1"] if told["node"] == node_name() else told["names"]
    for name in names:
        # The same address may lead to different hosts, depending on where it is used. The token shows the right store.
        with suppress(OSError, RuntimeError):
            socket.create_connection((name, told["port"]), _KNOCK).close()
            store = dist.TCPStore(name, told["port"], None, False, patience, wait_for_workers=False)
            if store.check([_TOKEN]) and store.get(_TOKEN).decode() == told["token"]:
                return store
    raise TransportError(
        f"rank {rank} cannot reach rank 0 at port {told['port']} of {', '.join(names)}; open that port in the firewall "
        "or let GLOO_SOCKET_IFNAME name the interface of rank 0's host that others can reach",
        [0],
    )
