"""Where rank 0 publishes its address, for ranks without a MASTER_ADDR."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import quote

from ..base import files
from ..base.errors import ConfigError, TransportError
from ..base.job_key import seal, unseal
from ..process import forks

# The files of this process that name its store.
_published: list[Path] = []

_MOST_BYTES = 1 << 12
# The content sealed with the job key: an address, valid at this place alone.
_PLACE = "address of rank 0"


def clear() -> None:
    """Remove what this process has published in files: all ranks have read it."""
    while _published:
        _published.pop().unlink(missing_ok=True)


def port_of(environ: Mapping[str, str], name: str) -> int:
    """Return the port that a variable names."""
    text = environ.get(name, "")
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"{name}={environ.get(name)!r}; expected a port number, at most 65535")
    return int(text)


class Board(ABC):
    """A place where rank 0 publishes its address. The other ranks look there for up to ``timeout`` seconds.

    With a job key they take no address that another program has written.

    Attributes:
        host: this host, as rank 0 names it to the others.
    """

    host = "127.0.0.1"

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def publish(self, port: int) -> None:
        """Publish rank 0's port on this host."""
        self.write(seal(_PLACE, f"{self.host}:{port}").hex())

    @abstractmethod
    def write(self, text: str) -> None:
        """Write a text for the other ranks."""

    @abstractmethod
    def look(self) -> str | None:
        """Return the text, or None if it is not there yet."""

    def read(self) -> tuple[str, int]:
        """Return host and port of rank 0 as soon as they are published."""
        end = time.monotonic() + self._timeout
        while time.monotonic() < end:
            text = self.look()
            if text:
                return _address(text)
            time.sleep(0.05)
        raise TransportError(f"rank 0 did not publish its address within {self._timeout:g} s; was it started?", [0])


def _address(text: str) -> tuple[str, int]:
    try:
        host, _, port = unseal(_PLACE, bytes.fromhex(text)).decode().rpartition(":")
        if host and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16:
            return host, int(port)
    except ValueError:
        pass
    raise TransportError(f"{text[:80]!r} stands where rank 0 publishes its address; another program has written it")


class FileBoard(Board):
    """A file whose name only the processes of one launcher compute. ``step``: the name of srun's step, or None."""

    def __init__(self, environ: Mapping[str, str], timeout: float, step: str | None) -> None:
        super().__init__(timeout)
        job = environ.get("PMIX_NAMESPACE") or step
        if not job:
            parent = os.getppid()
            started = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19]
            job = f"{parent}-{started}"
        self._path = Path(tempfile.gettempdir()) / f"fusionlayer-{os.getuid()}-{quote(job, safe='')}"

    def write(self, text: str) -> None:
        try:
            with files.whole(self._path) as file:  # no reader sees half an address
                file.write(text.encode())
        except OSError as error:
            raise ConfigError(
                f"rank 0 cannot publish its address in {self._path}: {error.strerror}; name a folder of this user's in "
                "TMPDIR, or set MASTER_ADDR and MASTER_PORT on every rank"
            ) from error
        _published.append(self._path)
        forks.at_exit(partial(self._path.unlink, missing_ok=True))

    def look(self) -> str | None:
        # Every user can write to this folder, so what another user has put there is ignored, also behind a link.
        try:
            with files.opened(self._path) as file:
                mine = files.is_private(os.fstat(file.fileno()))
                return file.read(_MOST_BYTES).decode(errors="replace") if mine else None
        except OSError:
            return None


class HorovodBoard(Board):
    """The key-value server that horovodrun keeps for its Gloo rendezvous: PUT and GET under a scope."""

    _KEY = "/fusionlayer/address"

    def __init__(self, environ: Mapping[str, str], timeout: float) -> None:
        super().__init__(timeout)
        self.host = environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        self._server = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        self._port = port_of(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT")

    def write(self, text: str) -> None:
        self._request("PUT", text)

    def look(self) -> str | None:
        return self._request("GET")

    def _request(self, method: str, body: str | None = None) -> str | None:
        connection = HTTPConnection(self._server, self._port, timeout=self._timeout)
        try:
            connection.request(method, self._KEY, body)
            response = connection.getresponse()
            text = response.read(_MOST_BYTES).decode(errors="replace")
            return text if response.status == 200 else None
        except (OSError, HTTPException) as error:
            raise TransportError(
                f"horovodrun's rendezvous server at {self._server}:{self._port} does not answer: {error}"
            ) from error
        finally:
            connection.close()
