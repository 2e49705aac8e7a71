"""What is measured: every collective with every codec that it takes, and what torch and MPI offer beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import fusionlayer as fl
from fusionlayer.transport import Transport
from fusionlayer.transport.c10d import C10dTransport
from fusionlayer.transport.links.socket_options import SocketOptions

from .cell import Cell

__all__ = ["YARDSTICK", "Operation", "functions", "operations", "transports"]

YARDSTICK = "gloo all_reduce"
"""The operation that the others are compared with."""


@dataclass(frozen=True)
class Operation:
    """One call on a flat f32 tensor, which it may change.

    Attributes:
        name: what is called.
        codec: what travels; "" where the operation takes no codec.
        bus_factor: bytes that each worker must send, uncompressed, per byte of the tensor.
        call: takes the tensor.
        against: as for ``Row``.
    """

    name: str
    codec: str
    bus_factor: float
    call: Callable[[Tensor], object]
    against: str = ""


def operations(cell: Cell, transport: Transport, numel: int) -> Iterator[Operation]:
    """Yield all operations for tensors of ``numel`` elements; some raise ``ConfigError`` when called: refused codecs.

    The yardstick comes twice: by how much the two differ, any two rows may differ by chance.
    """
    share = (transport.size - 1) / transport.size
    for name in (YARDSTICK, f"{YARDSTICK} again"):
        yield Operation(name, "", 2 * share, dist.all_reduce)
    piece = numel // transport.size
    out = torch.empty(piece * transport.size)
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name of it since torch 2.13
    yield Operation("gloo all_to_all", "", share, lambda x: dist.all_to_all_single(out, x[: len(out)]))
    yield Operation("gloo all_gather", "", share, lambda x: all_gather(out, x[:piece]))
    if cell.mpi:
        yield Operation("MPI Allreduce", "", 2 * share, _mpi_all_reduce())
    if cell.mpi and cell.functions:
        yield from _mpi_exchanges(out, share)
    for collective in cell.collectives:
        for codec in cell.codecs:
            reduce = partial(fl.collectives.get(collective), codec=fl.codecs.get(codec).bare, transport=transport)
            yield Operation(collective, codec, 2 * share, reduce)


GUARDS: Mapping[str, dict[str, bool]] = {
    "plain": {"authenticate": False},
    "tags": {"authenticate": True},
    "tls": {"encrypt": True},
}
"""What guards connections of our own, by the word that names it behind their number."""


def transports(cell: Cell, gloo: C10dTransport) -> dict[str, Transport]:
    """Return what the cell's functions are tried over, by name: gloo, and connections of our own. Collective."""
    made: dict[str, Transport] = {"over gloo": gloo}
    devices = cell.lab().devices if cell.interfaces else ()
    for text in cell.connections:
        count, _, kind = text.partition("/")
        options = SocketOptions(
            int(count),
            devices if int(count) > 1 else (),
            kind if kind and kind not in GUARDS else None,
            **GUARDS.get(kind, {}),
        )
        words = f"over {count} connection{'s' if int(count) > 1 else ''}" + (f" of {kind}" if kind else "")
        made[words] = C10dTransport(None, gloo.timeout, sockets=options)
    return made


def functions(cell: Cell, over: Mapping[str, Transport], numel: int) -> Iterator[Operation]:
    """Yield the cell's functions with every codec, over each transport, for tensors of ``numel`` elements."""
    for function in cell.functions:
        for codec in cell.codecs:
            for name, transport in over.items():
                call = partial(getattr(fl, function), codec=codec, group=transport)
                size = transport.size
                share = (size - 1) / size
                piece = numel // size
                takes: Callable[[Tensor], object] = {
                    "all_reduce": call,
                    "all_gather": lambda x, call=call, piece=piece: call(x[:piece]),
                    "all_to_all": lambda x, call=call, rows=piece * size: call(x[:rows]),
                }[function]
                factor = 2 * share if function == "all_reduce" else share
                yield Operation(f"{function} {name}", codec, factor, takes, f"gloo {function}")


def _mpi_all_reduce() -> Callable[[Tensor], object]:
    from mpi4py import MPI

    def all_reduce(x: Tensor) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy())

    return all_reduce


def _mpi_exchanges(out: Tensor, share: float) -> Iterator[Operation]:
    from mpi4py import MPI

    piece = len(out) // MPI.COMM_WORLD.size

    def all_to_all(x: Tensor) -> None:
        MPI.COMM_WORLD.Alltoall(x[: len(out)].numpy(), out.numpy())

    def all_gather(x: Tensor) -> None:
        MPI.COMM_WORLD.Allgather(x[:piece].numpy(), out.numpy())

    yield Operation("MPI Alltoall", "", share, all_to_all, "gloo all_to_all")
    yield Operation("MPI Allgather", "", share, all_gather, "gloo all_gather")
