"""A TCP store for processes that met without one. Rank 0 keeps it, and broadcasts its address."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import TransportError
from ..launch.stores import dial, mark, serve
from ..process.interfaces import own_address, reachable_names
from ..process.processes import node_name

_NOTICE_BYTES = 4096
# Seconds that a host may take to accept a connection before the next of its addresses is tried.
_KNOCK = 3.0


def open_store(rank: int, timeout: float, broadcast: Callable[[Tensor], None]) -> dist.Store:
    """Return a store that all ranks share. All ranks call it together."""
    notice = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8, device="cpu")
    if rank == 0:
        place = own_address()
        store = serve(place, timeout)
        names = [place] if place else reachable_names()
        text = json.dumps({"node": node_name(), "names": names, "port": store.port, "token": mark(store)}).encode()
        notice[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        broadcast(notice)
        return store
    broadcast(notice)
    try:
        told = json.loads(notice.numpy().tobytes().rstrip(b"\0"))
        node, names, port, token = told["node"], [*map(str, told["names"])], int(told["port"]), str(told["token"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise TransportError("rank 0 announces a store that makes no sense", [0]) from None
    if node == node_name() and len(names) > 1:
        names = ["127.0.0.1"]  # it listens on all addresses
    for name in names:
        found = dial(name, port, token, timeout, _KNOCK)
        if found is not None:
            return found
    raise TransportError(
        f"rank {rank} cannot reach rank 0 at port {port} of {', '.join(names)}; open that port in the firewall "
        "or let GLOO_SOCKET_IFNAME name the interface of rank 0's host that others can reach",
        [0],
    )
