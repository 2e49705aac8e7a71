"""Who am I: rank, size and rendezvous as torchrun, mpirun or horovodrun have put them into the environment."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import torch.distributed as dist

from .errors import ConfigError, TransportError

__all__ = ["Place", "find_place", "make_store"]


@dataclass(frozen=True)
class Place:
    """Where this process stands in its job.

    Attributes:
        rank: 0 <= rank < size.
        size: processes of the job.
        local_rank: rank among the processes of this host.
        local_size: processes of this host.
        launcher: who said so: "torchrun", "mpirun", "mpich", "horovodrun" or "single".
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "single"


_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Return this process's place; a process that nobody launched is rank 0 of 1.

    Raises:
        ConfigError: a launcher's variables are incomplete, not numbers or contradict each other.
    """
    for launcher, names in _VARIABLES.items():
        if names[0] not in environ or names[1] not in environ:
            continue
        try:
            rank, size = int(environ[names[0]]), int(environ[names[1]])
            local_rank = int(environ.get(names[2], rank))
            local_size = int(environ.get(names[3], max(1, local_rank + 1 if names[2] in environ else size)))
        except ValueError:
            given = {name: environ.get(name) for name in names}
            raise ConfigError(f"{launcher} variables {given}; expected whole numbers") from None
        if not 0 <= rank < size or not 0 <= local_rank < local_size:
            raise ConfigError(
                f"{launcher} variables say rank {rank} of {size}, local rank {local_rank} of {local_size}; "
                "expected 0 <= rank < size"
            )
        return Place(rank, size, local_rank, local_size, launcher)
    return Place()


def make_store(place: Place, timeout: float, environ: Mapping[str, str] = os.environ) -> dist.Store:
    """Return the store through which the job's processes find each other.

    MASTER_ADDR and MASTER_PORT are used where they are set (torchrun sets them). Otherwise rank 0 opens a port of its own
    and publishes it: through horovodrun's key-value server, or through a file for processes of one mpirun on one host.

    Raises:
        ConfigError: processes on several hosts and no MASTER_ADDR.
        TransportError: rank 0 did not come within ``timeout`` seconds.
    """
    wait = timedelta(seconds=timeout)
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        return dist.TCPStore(host, port, place.size, place.rank == 0 and not agent, wait, wait_for_workers=False)
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        board: _Board = _HorovodBoard(environ, timeout)
        host = environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    elif place.local_size == place.size:
        board = _FileBoard(timeout)
        host = "127.0.0.1"
    else:
        raise ConfigError(
            f"{place.size} processes on several hosts ({place.local_size} here) and no MASTER_ADDR: start with "
            "'mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...', or with torchrun"
        )
    if place.rank == 0:
        store = dist.TCPStore("0.0.0.0", 0, place.size, True, wait, wait_for_workers=False)
        board.publish(f"{host}:{store.port}")
        return store
    host, port_text = board.read().rsplit(":", 1)
    return dist.TCPStore(host, int(port_text), place.size, False, wait, wait_for_workers=False)


class _Board:
    """A place where rank 0 leaves its address and the others look for it until ``timeout``."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def publish(self, address: str) -> None:
        raise NotImplementedError

    def look(self) -> str | None:
        raise NotImplementedError

    def read(self) -> str:
        end = time.monotonic() + self._timeout
        while time.monotonic() < end:
            address = self.look()
            if address:
                return address
            time.sleep(0.05)
        raise TransportError(f"rank 0 did not publish its address within {self._timeout:g} s; was it started?", [0])


class _FileBoard(_Board):
    """A file that only the children of one launcher process know."""

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        parent = os.getppid()
        started = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19]
        self._path = Path(tempfile.gettempdir()) / f"fusionlayer-{os.getuid()}-{parent}-{started}"

    def publish(self, address: str) -> None:
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text(address)
        draft.rename(self._path)

    def look(self) -> str | None:
        return self._path.read_text() if self._path.exists() else None


class _HorovodBoard(_Board):
    """The key-value server that horovodrun keeps for its Gloo rendezvous: PUT and GET under a scope."""

    _KEY = "/fusionlayer/address"

    def __init__(self, environ: Mapping[str, str], timeout: float) -> None:
        super().__init__(timeout)
        self._host = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        self._port = int(environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "0"))

    def publish(self, address: str) -> None:
        self._request("PUT", address)

    def look(self) -> str | None:
        return self._request("GET")

    def _request(self, method: str, body: str | None = None) -> str | None:
        connection = HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(method, self._KEY, body)
            response = connection.getresponse()
            text = response.read().decode()
            return text if response.status == 200 else None
        except (OSError, HTTPException) as error:
            raise TransportError(
                f"horovodrun's rendezvous server at {self._host}:{self._port} does not answer: {error}"
            ) from error
        finally:
            connection.close()
