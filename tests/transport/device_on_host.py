"""A device that is a thread of this process: what ``PeerLink`` asks of CUDA, by ``driver_on_host.c`` in its place."""

import ctypes
import fcntl
import os
import pickle
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusionlayer.transport import _capture
from fusionlayer.transport.c10d import C10dTransport
from fusionlayer.transport.links import copy_engines, peer_memory
from fusionlayer.transport.links.base import LinkMessage
from fusionlayer.transport.links.copy_engines import CopyEngines
from fusionlayer.transport.links.peer import PeerLink
from fusionlayer.transport.links.shared_memory import map_memory
from fusionlayer.transport.rendezvous import Connecting
from tests.native.conftest import find_compiler

__all__ = ["Host", "Keeping", "OverPeers", "Shared", "compiled", "device_on_host"]

SOURCE = Path(__file__).with_name("driver_on_host.c")
FLAGS = ("-xc", "-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")
DEVICE = torch.device("cuda", 0)


def compiled() -> str:
    """Return the path of the library; it is compiled when its source has changed, which takes half a second."""
    folder = Path(__file__).parents[2] / "build" / "driver_on_host"
    folder.mkdir(parents=True, exist_ok=True)
    library, made_of = folder / "libcuda.so", folder / "made_of"
    wanted = f"{FLAGS} {SOURCE.read_text()}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # guards the folder while one worker compiles
        if not library.exists() or not made_of.exists() or made_of.read_text() != wanted:
            made_of.unlink(missing_ok=True)
            subprocess.run([find_compiler(), *FLAGS, str(SOURCE), "-o", str(library)], check=True)
            made_of.write_text(wanted)
    return str(library)


class Host:
    """Streams, one for each thread that asks or that a test chooses, and events of them.

    Args:
        path: of the library.
        seed: for the pauses of its streams.
        longest: microseconds of a pause; 0: there are none.
    """

    def __init__(self, path: str, seed: int, longest: int) -> None:
        self.library = ctypes.CDLL(path)
        self.library.host_stream.restype = ctypes.c_void_p
        self.library.host_mark.restype = ctypes.c_long
        self._seed, self._longest = seed, longest
        self._of_thread = threading.local()
        self._numbered: dict[int, SimpleNamespace] = {}

    def stream(self, device: object = None) -> SimpleNamespace:
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = self._made()
        found: SimpleNamespace = self._of_thread.stream
        return found

    def on(self, number: int) -> None:
        """Let this thread go on with a stream that has this number."""
        if number not in self._numbered:
            self._numbered[number] = self._made()
        self._of_thread.stream = self._numbered[number]

    def _made(self) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=self.library.host_stream(self._seed, self._longest))

    def event(self) -> SimpleNamespace:
        mark: list[tuple[ctypes.c_void_p, ctypes.c_long]] = []

        def record(stream: Any) -> None:
            handle = ctypes.c_void_p(stream.cuda_stream)
            mark[:] = [(handle, ctypes.c_long(self.library.host_mark(handle)))]

        return SimpleNamespace(record=record, query=lambda: bool(self.library.host_has_reached(*mark[0])))


class Shared:
    """Stands in for ``DeviceMemory``: memory without a name, and without a process of torch's that looks after it."""

    @staticmethod
    def share(x: Tensor) -> bytes:
        file = os.memfd_create("device")
        os.truncate(file, x.nbytes)
        x.set_(torch.from_file(f"/proc/self/fd/{file}", shared=True, size=x.nbytes, dtype=torch.uint8))
        return pickle.dumps((os.getpid(), file, x.nbytes))

    @staticmethod
    def reach(offer: bytes) -> Tensor:
        pid, file, nbytes = pickle.loads(offer)
        return map_memory(pid, file, b"", nbytes)


@contextmanager
def device_on_host(path: str, seed: int = 1, longest: int = 0) -> Iterator[Host]:
    """Let this process have a device of this kind, whose memory is that of the host."""
    host, begin = Host(path, seed, longest), CopyEngines.__init__
    with (
        mock.patch.object(_capture, "DRIVER", path),
        mock.patch.object(copy_engines, "DRIVER", path),
        mock.patch.object(peer_memory, "DeviceMemory", Shared),
        mock.patch.object(torch.cuda, "Event", host.event),
        mock.patch.object(torch.cuda, "current_stream", host.stream),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(CopyEngines, "__init__", lambda self, device: begin(self, DEVICE)),
    ):
        yield host


_used: list[Tensor] = []


class Keeping(PeerLink):
    """It keeps all tensors, as the device may still use them. On a GPU the allocator sees to that: it knows streams."""

    def exchange(self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage]) -> None:
        _used.extend(each.data for each in (*outgoing, *incoming))
        super().exchange(outgoing, incoming)


class Awaited(Keeping):
    """Its calls return when the device has done them, as is expected with tensors of the host."""

    only_queues = False

    def exchange(self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage]) -> None:
        super().exchange(outgoing, incoming)
        super().drain()


class OverPeers(C10dTransport):
    """A transport whose messages are copied from memory to memory. Its sums are gloo's."""

    link: type[PeerLink] = Awaited

    def _make_links(self, connecting: Connecting) -> Iterator[tuple[str, PeerLink]]:  # type: ignore[override]
        gloo, gather = self._gloo_link(connecting), self._gather_by(connecting)
        yield "cpu", self.link(gloo, self.rank, self.size, self.timeout, self.peer_bytes, gather)
