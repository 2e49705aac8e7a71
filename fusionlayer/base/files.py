"""Files in folders that other users may reach, such as /tmp: written whole under random names, read if they are plain.

Any process that can write to a folder can put a link, a pipe or a device at a guessable name. So nothing is written
through an existing name, and an opened file is checked by its descriptor before it is read.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def is_private(found: os.stat_result) -> bool:
    """Return whether this user owns the file or folder, and no other user can write to it."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


@contextmanager
def whole(path: str | Path, *, sync: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that has its name only once the block has ended without an error; a file of this name is replaced.

    Only this user may read it; where the folder is this user's or root's and has the set-group-ID bit, its group may,
    too.

    Args:
        path: its name, in a folder that is there.
        sync: wait until it is on the disk.

    Raises:
        OSError: it cannot be written; no part of it remains.
    """
    path = Path(path)
    folder = os.open(path.parent, _FOLDER)
    try:
        with _whole(folder, path.name, sync) as file:
            yield file
    finally:
        os.close(folder)


@contextmanager
def _whole(folder: int, name: str, sync: bool = False) -> Iterator[IO[bytes]]:
    draft = f".{name}.{secrets.token_hex(8)}.partial"
    found = os.fstat(folder)
    # Another user's folder would give the file to a group of that user's choice.
    group = 0o040 if found.st_mode & stat.S_ISGID and found.st_uid in (os.geteuid(), 0) else 0
    own = os.open(draft, _CREATE, 0o600, dir_fd=folder)
    try:
        with open(own, "wb") as file:
            if group:
                os.fchmod(own, 0o600 | group)
            yield file
            if sync:
                file.flush()
                os.fsync(own)
        os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise


def opened(path: str | Path, *, follow: bool = False, folder: int | None = None) -> BufferedReader:
    """Return a plain file, open for reading. It never waits, as the open of a pipe would.

    Args:
        path: the path of the file.
        follow: it may be a link, as a user may name one.
        folder: descriptor of the folder that ``path`` begins at.

    Raises:
        OSError: it is missing, a link, or no plain file.
    """
    try:
        own = os.open(path, _READ | (0 if follow else os.O_NOFOLLOW), dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a link; expected a plain file", str(path)) from None
    if not stat.S_ISREG(os.fstat(own).st_mode):
        os.close(own)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return open(own, "rb")


def read(path: str | Path, most: int, *, follow: bool = False) -> bytes:
    """Return the bytes of a plain file.

    Raises:
        OSError: as for ``opened``, or it has more than ``most`` bytes.
    """
    with opened(path, follow=follow) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


class Folder:
    """A folder of this user's to which no other user can write, held by its descriptor: none can exchange it.

    Args:
        path: made for this user alone if it does not exist; its parent must.

    Attributes:
        path: the path of the folder, for messages.

    Raises:
        OSError: it cannot be opened, or is a link; PermissionError: it is another user's, or others can write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        self._own = os.open(path, _FOLDER | os.O_NOFOLLOW)
        weakref.finalize(self, os.close, self._own)
        if not is_private(os.fstat(self._own)):
            raise PermissionError(errno.EPERM, "it is not this user's, or others can write to it", str(path))

    def names(self) -> list[str]:
        """Return the names of the plain files of this user's to which no other user can write."""
        found = []
        for name in os.listdir(self._own):
            with suppress(OSError):  # it was removed just now
                each = os.stat(name, dir_fd=self._own, follow_symlinks=False)
                if stat.S_ISREG(each.st_mode) and is_private(each):
                    found.append(name)
        return found

    @contextmanager
    def whole(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file as the function ``whole`` does."""
        with _whole(self._own, name) as file:
            yield file

    def opened(self, name: str) -> BufferedReader:
        """Return a file, open for reading.

        Raises:
            OSError: as for the function ``opened``; PermissionError: it is another user's, or others can write to it.
        """
        file = opened(name, folder=self._own)
        if not is_private(os.fstat(file.fileno())):
            file.close()
            raise PermissionError(
                errno.EPERM, "it is not this user's, or others can write to it", str(self.path / name)
            )
        return file

    def rename(self, name: str, to: str) -> None:
        """Give a file another name; a file of that name is replaced."""
        os.replace(name, to, src_dir_fd=self._own, dst_dir_fd=self._own)

    def link(self, name: str, to: str) -> None:
        """Give a file a second name; FileExistsError if there is a file of that name."""
        os.link(name, to, src_dir_fd=self._own, dst_dir_fd=self._own, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._own)
