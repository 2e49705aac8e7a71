"""The place of published versions: a TCP port, or a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..base.errors import ConfigError, kind_of

__all__ = ["Endpoint", "parse", "seconds_of"]

_LEAST_SECONDS = 2.0
_EXPECTED = "expected 'tcp://HOST:PORT', 'file:///FOLDER' or a Path"


@dataclass(frozen=True)
class Endpoint:
    """A folder, or a host and a port; the other one is None.

    Attributes:
        folder: where files are.
        host: name or address of a host.
        port: the port of TCP; a publisher gets one of the system's choice for 0.
    """

    folder: Path | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.folder is not None:
            return f"file://{self.folder}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse(address: str | os.PathLike[str]) -> Endpoint:
    """Return what ``address`` names: "tcp://HOST:PORT", "file:///FOLDER" or a Path. No host means 127.0.0.1.

    Raises:
        ConfigError: it names neither.
    """
    if isinstance(address, os.PathLike):
        return Endpoint(Path(address).absolute())
    if not isinstance(address, str):
        raise ConfigError(f"address: got {kind_of(address)}; {_EXPECTED}")
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"address {address!r}: {error}; {_EXPECTED}") from None
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return Endpoint(Path(unquote(parts.path)))
    if parts.scheme == "tcp" and port is not None and not parts.path:
        return Endpoint(None, host or "127.0.0.1", port)
    if parts.scheme in ("s3", "gs", "gcs", "az", "hdfs"):
        raise ConfigError(f"address {address!r}: mount it as a folder, and give that as 'file:///FOLDER'")
    raise ConfigError(f"address {address!r}; {_EXPECTED}")


def seconds_of(timeout: float) -> float:
    """Return a user's deadline in seconds.

    Raises:
        ConfigError: it is no number, or shorter than the heartbeat of both ends, half a second.
    """
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout >= _LEAST_SECONDS:
        raise ConfigError(f"timeout={timeout!r}; expected seconds, at least {_LEAST_SECONDS:g}")
    return float(timeout)
