"""Commits that outlive the worker: in the memory of its host, or in a folder of the user's."""

from __future__ import annotations

import os
import pickle
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from ...base.errors import ConfigError
from ...base.files import Folder

_KEPT = 2
"""Generations of commits that stay: when a worker is killed, ranks are at most one commit apart."""

_MOST_STRANGERS = 100
"""Names that are tried for a folder that every user could have made."""

_COMMIT = re.compile(r"\.?(\d{1,18})\.(shared|rank-\d{1,9})(\.\w+\.partial)?", re.ASCII)
_TOKEN = "token"
_MOST_TOKEN = 64


class Storage:
    """A folder with the last commits of the ranks that share it.

    One rank writes the common part; each rank adds its own part. Files appear whole. Commits may be pickled objects, so
    a file counts only if no other user can have written it.

    Args:
        folder: made if it does not exist; only this user may read it.
        rank: this rank.

    Attributes:
        token: equal on ranks that share the folder, different on others, even if their folders have the same name.
        writes_shared: whether this rank writes the shared part.

    Raises:
        ConfigError: the folder is a link or another user's, or others can write to it.
    """

    def __init__(self, folder: Path | Folder, rank: int) -> None:
        self._rank = rank
        self.writes_shared = True
        try:
            if isinstance(folder, Path):
                folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = folder if isinstance(folder, Folder) else Folder(folder)
            self.token = self._agree_on_token()
        except OSError as error:
            where = folder.path if isinstance(folder, Folder) else folder
            raise ConfigError(
                f"commits cannot be kept in {where}: {error.strerror}; name a folder in FUSIONLAYER_ELASTIC_DIR that "
                "belongs to this user and to which no other user can write"
            ) from error

    @classmethod
    def of_agent(cls, rank: int, environ: Mapping[str, str] = os.environ) -> Storage | None:
        """Return where a worker of torchrun's agent keeps commits, or None for a process without an agent.

        FUSIONLAYER_ELASTIC_DIR names a folder, which may be shared by hosts: commits then outlive agents and hosts,
        too. Without it they are in /dev/shm and go with the agent.
        """
        job = environ.get("TORCHELASTIC_RUN_ID")
        if job is None:
            return None
        chosen = environ.get("FUSIONLAYER_ELASTIC_DIR")
        if chosen:
            return cls(Path(chosen) / quote(job, safe=""), rank)
        memory = Path("/dev/shm")
        root = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        agent = _agent(job)
        folders = f"fusionlayer-elastic-{os.getuid()}-"
        for left in root.glob(f"{folders}*"):
            whose = re.fullmatch(r"([0-9]+)-([0-9]+)(\.[0-9]+)?", left.name.removeprefix(folders))
            if whose and _started(int(whose[1])) != whose[2]:
                with suppress(OSError):  # a link, or another user's
                    Folder(left)
                    shutil.rmtree(left, ignore_errors=True)
        return cls(_own_folder(root, f"{folders}{agent}-{_started(agent)}"), rank)

    def keep(self, number: int, shared: Any, own: Any) -> None:
        """Write commit ``number``. Keep the one before it, and remove older ones.

        Raises:
            ConfigError: there is no room. Nothing of this commit stays, and the previous one is still the last.
        """
        # The shared part gets its name last, as files get theirs in reverse order: a commit counts once that is there.
        parts = {**({"shared": shared} if self.writes_shared else {}), f"rank-{self._rank}": own}
        try:
            with ExitStack() as files:
                for part, value in parts.items():
                    file = files.enter_context(self._folder.whole(f"{number}.{part}"))
                    torch.save(value, file)
                    file.flush()
        except Exception as error:
            # torch's writer may raise an error of its own while it handles the file's error.
            why = error if isinstance(error, OSError) else error.__context__
            if not isinstance(why, OSError):
                raise
            raise ConfigError(
                f"cannot keep a commit in {self._folder.path}: {why.strerror}; make room, or name another folder in "
                "FUSIONLAYER_ELASTIC_DIR"
            ) from error
        for name, of, part in self._files(drafts=True):  # of workers that were killed
            mine = self.writes_shared or part == f"rank-{self._rank}"
            if mine and of <= number - _KEPT:
                self._folder.remove(name)

    def newest(self) -> int:
        """Return the number of the last commit whose shared part is here, or 0 if there is none."""
        return max((number for _, number, part in self._files() if part == "shared"), default=0)

    def shared(self, number: int) -> Any:
        """Return the shared part of commit ``number``."""
        return self._read(f"{number}.shared")

    def ranks(self, number: int) -> list[int]:
        """Return the ranks whose own parts of commit ``number`` are here, in ascending order."""
        return sorted(
            int(part.removeprefix("rank-"))
            for _, of, part in self._files()
            if of == number and part.startswith("rank-")
        )

    def own(self, number: int, rank: int) -> Any:
        """Return rank ``rank``'s own part of commit ``number``."""
        return self._read(f"{number}.rank-{rank}")

    def forget(self) -> None:
        """Remove all commits that are here, and the folder if it has nothing else."""
        for name in [*(name for name, *_ in self._files(drafts=True)), _TOKEN]:
            self._folder.remove(name)
        with suppress(OSError):
            self._folder.path.rmdir()

    def _files(self, drafts: bool = False) -> Iterator[tuple[str, int, str]]:
        for name in self._folder.names():
            if (found := _COMMIT.fullmatch(name)) and (drafts or name[0] != "."):
                yield name, int(found[1]), found[2]

    def _read(self, name: str) -> Any:
        with self._folder.opened(name) as file:
            try:
                return torch.load(file, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError:  # objects of the user's: no other user can have written this file
                file.seek(0)
                return torch.load(file, map_location="cpu", weights_only=False)

    def _agree_on_token(self) -> str:
        draft = f"token.{secrets.token_hex(8)}"
        with self._folder.whole(draft) as file:
            file.write(draft.encode())
        with suppress(FileExistsError):
            self._folder.link(draft, _TOKEN)
        self._folder.remove(draft)
        with self._folder.opened(_TOKEN) as file:
            return file.read(_MOST_TOKEN).decode()


def _own_folder(root: Path, name: str) -> Folder:
    """Return a folder of this user's, made if need be, by the first of a few names that no other user has taken.

    Every user can write to ``root``. The ranks of a host see the same strangers there, so they find the same folder.
    """
    for number in range(_MOST_STRANGERS):
        with suppress(OSError):
            return Folder(root / (f"{name}.{number}" if number else name))
    raise ConfigError(
        f"other users have taken the names {name}... in {root}; name a folder of yours in FUSIONLAYER_ELASTIC_DIR"
    )


def _agent(job: str) -> int:
    """Return the process that started this worker, perhaps through a script: the first without the job's variable."""
    mark = f"TORCHELASTIC_RUN_ID={job}".encode()
    process = os.getppid()
    while process > 1 and mark in _bytes(Path(f"/proc/{process}/environ")).split(b"\0"):
        process = int(_stat(process)[1])
    return process


def _started(process: int) -> str:
    """Return the start time of a process in /proc, or "" if it does not exist or is a zombie."""
    fields = _stat(process)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _stat(process: int) -> list[str]:
    return _bytes(Path(f"/proc/{process}/stat")).decode().rpartition(")")[2].split()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
