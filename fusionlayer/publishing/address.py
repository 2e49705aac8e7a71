"""The place of published versions: a TCP port, a folder, or a URL of fsspec."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..base.errors import ConfigError, kind_of

__all__ = ["Endpoint", "parse", "seconds_of"]

_LEAST_SECONDS = 2.0
_EXPECTED = "expected 'tcp://HOST:PORT', 'file:///FOLDER', a Path, or a URL of fsspec such as 's3://BUCKET/FOLDER'"


@dataclass(frozen=True)
class Endpoint:
    """A folder, a URL of fsspec, or a host and a port; the others are empty.

    Attributes:
        folder: where files are.
        host: name or address of a host.
        port: the port of TCP; a publisher gets one of the system's choice for 0.
        url: of a folder, for fsspec.
    """

    folder: Path | None = None
    host: str = ""
    port: int = 0
    url: str = ""

    @property
    def is_tcp(self) -> bool:
        """Whether it is a host and a port."""
        return self.folder is None and not self.url

    def __str__(self) -> str:
        if self.url:
            return self.url
        if self.folder is not None:
            return f"file://{self.folder}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse(address: str | os.PathLike[str]) -> Endpoint:
    """Return what ``address`` names: "tcp://HOST:PORT", "file:///FOLDER", a Path, or a URL that fsspec knows.

    No host means 127.0.0.1.

    Raises:
        ConfigError: it names neither.
    """
    if isinstance(address, os.PathLike):
        return Endpoint(Path(address).absolute())
    if not isinstance(address, str):
        raise ConfigError(f"address: got {kind_of(address)}; {_EXPECTED}")
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port if parts.scheme == "tcp" else None
    except ValueError as error:
        raise ConfigError(f"address {address!r}: {error}; {_EXPECTED}") from None
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return Endpoint(Path(unquote(parts.path)))
    if parts.scheme == "tcp" and port is not None and not parts.path:
        return Endpoint(None, host or "127.0.0.1", port)
    if parts.scheme not in ("", "file", "tcp") and _is_known(parts.scheme):
        return Endpoint(url=address.rstrip("/"))
    raise ConfigError(f"address {address!r}; {_EXPECTED}")


def _is_known(scheme: str) -> bool:
    """Return whether fsspec, which torch needs, has a file system for URLs of this kind."""
    try:
        from fsspec import available_protocols
    except ImportError:
        return False
    return scheme in available_protocols()


def seconds_of(timeout: float) -> float:
    """Return a user's deadline in seconds.

    Raises:
        ConfigError: it is no number, or shorter than the heartbeat of both ends, half a second.
    """
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout >= _LEAST_SECONDS:
        raise ConfigError(f"timeout={timeout!r}; expected seconds, at least {_LEAST_SECONDS:g}")
    return float(timeout)
