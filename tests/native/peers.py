"""Emulated devices that reach each other's memory (``cuda_on_host/devices.cpp``), and ``fl_two_shot`` on them."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fusionlayer.base import libraries
from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs.native import NativeCodec
from fusionlayer.collectives._base import split_evenly

__all__ = ["WARPS", "Devices", "devices"]

WARPS = 8
ALIGNMENT = 128


class Devices:
    """A number of devices, their memory full of garbage behind the numbers with which it begins."""

    def __init__(self, library: ctypes.CDLL, count: int, nbytes: int, seed: int) -> None:
        library.devices_alias.restype = ctypes.c_void_p
        self.library, self.count, self.nbytes = library, count, nbytes
        self._room = torch.randint(256, (count, nbytes + ALIGNMENT), dtype=torch.uint8)
        self.memory = [row[-row.data_ptr() % ALIGNMENT :][:nbytes] for row in self._room]
        for memory in self.memory:
            memory[: 4 * WARPS * (1 + 2 * count)] = 0
        self._stop = torch.zeros(1, dtype=torch.int32)
        library.devices_begin(
            count, (ctypes.c_void_p * count)(*[m.data_ptr() for m in self.memory]), ctypes.c_int64(nbytes), seed
        )

    def peers(self, rank: int) -> libraries.Peers:
        """Return all memory as device ``rank`` sees it."""
        known = [self.library.devices_alias(rank, to) for to in range(self.count)]
        memory = (ctypes.c_void_p * libraries.MAX_PEERS)(*known)
        return libraries.Peers(rank, self.count, WARPS, self.nbytes, memory, self._stop.data_ptr())

    def two_shot(
        self, rank: int, codec: NativeCodec, x: Tensor, out: Tensor, residual: Tensor | None, seed: int
    ) -> None:
        """Let device ``rank`` take part in a sum when ``run`` comes to it."""
        self.library.devices_launch_on(rank)
        status = self.library.fl_two_shot(
            codec.core_spec(x.numel(), x.dtype, derive_seed(seed, rank, 0)),
            derive_seed(seed, rank, 1),
            split_evenly(x.numel(), self.count, codec.block),
            x.data_ptr(),
            out.data_ptr(),
            None if residual is None else residual.data_ptr(),
            self.peers(rank),
            None,
        )
        self.library.devices_launch_on(-1)
        assert status == 0

    def run(self, resident: int = 2, patience: int = 0) -> bool:
        """Run all launches; false: they wait for each other for ever. After ``patience`` turns the host gives up."""
        return bool(
            self.library.devices_run(resident, ctypes.c_int64(patience), ctypes.c_void_p(self._stop.data_ptr()))
        )


@contextmanager
def devices(library: ctypes.CDLL, count: int, nbytes: int, seed: int) -> Iterator[Devices]:
    """Emulate ``count`` devices with ``nbytes`` of memory each; ``seed`` draws the order of all that happens."""
    try:
        yield Devices(library, count, nbytes, seed)
    finally:
        library.devices_end()
