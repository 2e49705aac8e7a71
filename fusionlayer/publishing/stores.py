"""Where the files of versions are: a folder, or whatever fsspec reaches by a URL, such as a bucket of S3."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ..base import files
from ..base.errors import ConfigError
from .address import Endpoint

__all__ = ["FolderStore", "Store", "UrlStore", "open_store"]


class Store(ABC):
    """Files by name. A file appears under its name when it is complete."""

    place: str

    def prepare(self) -> None:  # noqa: B027 - most stores need nothing
        """Make the folder if it is missing."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return all files by name, with their lengths."""

    @abstractmethod
    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        """Write a file, and replace the one that is there."""

    @abstractmethod
    @contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for reading."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; a missing one is none the worse."""

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a short file.

        Raises:
            FileNotFoundError: there is none.
            OSError: it has more than ``most`` bytes.
        """
        with self.opened(name) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise OSError(f"{self.place}/{name} has more than {most} bytes")
        return data


class FolderStore(Store):
    """A folder of this host, or one that hosts share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.place = str(folder)

    def prepare(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def sizes(self) -> dict[str, int]:
        found = {}
        for path in self._folder.iterdir():
            with suppress(OSError):  # it was removed just now
                seen = path.lstat()
                if stat.S_ISREG(seen.st_mode):
                    found[path.name] = seen.st_size
        return found

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        with files.whole(self._folder / name, sync=True) as file:
            for part in parts:
                file.write(part)

    @contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        with files.opened(self._folder / name) as file:
            yield file

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def read(self, name: str, most: int) -> bytes:
        return files.read(self._folder / name, most)


class UrlStore(Store):
    """A file system of fsspec whose writes appear whole: object stores do, and ``memory://``.

    Raises:
        ConfigError: fsspec, or what it needs for this URL, is not installed.
    """

    def __init__(self, url: str) -> None:
        self.place = url
        try:
            import fsspec

            self._system, self._folder = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"address {url!r}: {error}; s3:// needs `pip install s3fs`, gs:// `gcsfs`") from error

    def prepare(self) -> None:
        self._system.makedirs(self._folder, exist_ok=True)

    def sizes(self) -> dict[str, int]:
        self._system.invalidate_cache(self._folder)
        try:
            found: list[dict[str, Any]] = self._system.ls(self._folder, detail=True)
        except FileNotFoundError:  # an object store has no folder without objects
            return {}
        return {each["name"].rpartition("/")[2]: int(each["size"]) for each in found if each["type"] == "file"}

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        with self._system.open(f"{self._folder}/{name}", "wb") as file:
            for part in parts:
                file.write(part)

    @contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        self._system.invalidate_cache(self._folder)  # a length in it may be that of a replaced file
        with self._system.open(f"{self._folder}/{name}", "rb") as file:
            yield file

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm_file(f"{self._folder}/{name}")


def open_store(place: Endpoint) -> Store:
    """Return the files of a place.

    Raises:
        ConfigError: fsspec cannot reach it.
    """
    return UrlStore(place.url) if place.folder is None else FolderStore(place.folder)
