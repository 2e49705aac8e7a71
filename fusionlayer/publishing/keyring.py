"""The secrets of publishers and followers: given by the program, or in a file that may change."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ..base.errors import ConfigError, kind_of
from ..base.secrets import make_nonce, slow_key

__all__ = ["Keyring", "check_name", "common_of", "is_name", "keyring_of"]

_logger = logging.getLogger("fusionlayer")

LEAST_BYTES, NAME_BYTES = 16, 64
# The environment names a file, because its values themselves get into logs and into all started programs.
_FILE = "FUSIONLAYER_PUBLISH_SECRET_FILE"
_MAKE_ONE = 'make one with: python -c "import secrets; print(secrets.token_hex(16))"'
_MOST_FILE_BYTES = 1 << 20


def keyring_of(secret: str | bytes | os.PathLike[str] | None) -> Keyring | None:
    """Return the keyring for the ``secret`` of ``publish`` and ``subscribe``; None: the file that the environment
    names.

    Raises:
        ConfigError: it is too short, or neither a text nor a Path.
    """
    if secret is None:
        file = os.environ.get(_FILE)
        return Keyring(path=Path(file)) if file else None
    if isinstance(secret, os.PathLike):
        return Keyring(path=Path(secret))
    if not isinstance(secret, (str, bytes)) or not secret:
        given = "an empty one" if isinstance(secret, (str, bytes)) else kind_of(secret)
        raise ConfigError(f"secret: got {given}; expected a text that publisher and followers share, a Path, or None")
    return Keyring([("", _checked("secret", secret))])


def check_name(name: object) -> None:
    """Raise ``ConfigError`` unless this can be a follower's name."""
    if not isinstance(name, str) or not is_name(name):
        raise ConfigError(
            f"name={name!r}; expected a follower's name of 1 to {NAME_BYTES} bytes, without colons and line ends"
        )


def is_name(name: str) -> bool:
    """Return whether a follower may have this name."""
    return name.isprintable() and 0 < len(name.encode()) <= NAME_BYTES and ":" not in name and name == name.strip()


def _checked(what: str, secret: str | bytes) -> bytes:
    data = secret.encode() if isinstance(secret, str) else secret
    if len(data) < LEAST_BYTES:
        raise ConfigError(f"{what}: a secret of {len(data)} bytes; expected at least {LEAST_BYTES}: {_MAKE_ONE}")
    return data


class Keyring:
    """The secrets that a publisher accepts, or that a follower has.

    A file has one secret a line: ``SECRET`` for all followers, ``NAME:SECRET`` for followers of one name, which then
    need no other. Empty lines, and lines that begin with ``#``, are ignored. A publisher accepts every line, a follower
    uses the first that fits it. So a secret is replaced without a restart: add the new line to the publisher's file,
    give it to followers, then remove the old line.

    Args:
        entries: names and secrets; "" for all names.
        path: file that has them instead of ``entries``. Nothing is read before ``read``.
    """

    def __init__(self, entries: Iterable[tuple[str, bytes]] = (), path: Path | None = None) -> None:
        self._entries = list(entries)
        self._path = path
        self._stamp: tuple[int, ...] | None = None
        self.salt = make_nonce()

    def read(self) -> None:
        """Read the file, if there is one.

        Raises:
            ConfigError: it cannot be read, others may read it, or its content is invalid.
        """
        if self._path is None:
            return
        try:
            with open(self._path, "rb") as file:
                facts = os.fstat(file.fileno())
                data = file.read(_MOST_FILE_BYTES)
        except OSError as error:
            raise ConfigError(f"file with secrets {self._path}: {error.strerror or error}") from error
        self._stamp = _stamp(facts)
        if facts.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            mode = stat.S_IMODE(facts.st_mode)
            raise ConfigError(
                f"file with secrets {self._path}: others may read or change it (mode {mode:o}); chmod 600 it"
            )
        self._entries = list(_parsed(data, self._path))

    def refresh(self) -> bool:
        """Read the file again if it has changed; return whether it has other secrets now.

        A file that cannot be used is logged, and the secrets before it stay.
        """
        if self._path is None:
            return False
        try:
            stamp = _stamp(os.stat(self._path))
        except OSError:  # it is being replaced, perhaps
            return False
        if stamp == self._stamp:
            return False
        before, self._stamp = self._entries, stamp
        try:
            self.read()
        except ConfigError as error:
            _logger.error("%s; the secrets that it had before stay valid", error)
        return self._entries != before

    def accepted(self, name: str) -> list[bytes]:
        """Return the valid secrets of a follower of this name."""
        own = [secret for whose, secret in self._entries if whose == name]
        return own or [secret for whose, secret in self._entries if not whose]

    def own(self, name: str | None, otherwise: str) -> tuple[str, bytes]:
        """Return name and secret of a follower.

        Args:
            name: the name that it was given; None: the name in the first line, or ``otherwise``.
            otherwise: a name for a follower without one.

        Raises:
            ConfigError: the file has none for this name.
        """
        fitting = [entry for entry in self._entries if name in (None, entry[0])]
        for whose, secret in fitting or [entry for entry in self._entries if not entry[0]]:
            return name or whose or otherwise, secret
        raise ConfigError(f"file with secrets {self._path} has none for a follower of the name {name!r}")


def common_of(keyring: Keyring | None) -> bytes | None:
    """Return the secret that signs a folder for all: the first that belongs to no process name.

    Raises:
        ConfigError: the file cannot be used, or has none.
    """
    if keyring is None:
        return None
    keyring.read()
    return keyring.own("", "")[1]


def key(secret: bytes, salt: bytes) -> bytes:
    """Return the key that a secret is used by."""
    return slow_key(secret, b"fusionlayer publishing" + salt)


def _stamp(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _parsed(data: bytes, path: Path) -> Iterable[tuple[str, bytes]]:
    found = 0
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip() or line.startswith(b"#"):
            continue
        whose, colon, secret = line.partition(b":")
        name = whose.decode("utf-8", "replace").strip() if colon else ""
        if colon and not is_name(name):
            raise ConfigError(f"file with secrets {path}, line {number}: no name of a follower stands before the colon")
        found += 1
        yield name, _checked(f"file with secrets {path}, line {number}", (secret if colon else line).strip())
    if not found:
        raise ConfigError(f"file with secrets {path}: there is none in it; {_MAKE_ONE}")
