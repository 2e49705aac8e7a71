"""What is measured: every collective with every codec that it takes, and what torch and MPI offer beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import fusionlayer as fl
from fusionlayer.transport import Transport

from .cell import Cell

__all__ = ["YARDSTICK", "Operation", "operations"]

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
    """

    name: str
    codec: str
    bus_factor: float
    call: Callable[[Tensor], object]


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
    for collective in cell.collectives:
        for codec in cell.codecs:
            reduce = partial(fl.collectives.get(collective), codec=fl.codecs.get(codec).bare, transport=transport)
            yield Operation(collective, codec, 2 * share, reduce)


def _mpi_all_reduce() -> Callable[[Tensor], object]:
    from mpi4py import MPI

    def all_reduce(x: Tensor) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy())

    return all_reduce
