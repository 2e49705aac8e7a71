"""Commits that outlive the worker: in the memory of its host, or in a folder of the user's."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from ...errors import ConfigError

__all__ = ["Storage"]

_KEPT = 2
"""Generations of commits that stay: when a worker is killed, ranks are at most one commit apart."""


_MOST_STRANGERS = 100
"""Names that are tried for a folder that every user could have made."""


class Storage:
    """A folder with the last commits of the ranks that share it.

    One rank writes the part that is the same on all of them; each rank adds its own part. Files appear whole.

    Args:
        folder: made if it does not exist; only this user may read it.
        rank: this rank.

    Attributes:
        token: equal on ranks that share the folder, different on others, even if their folders have the same name.
        writes_shared: whether this rank writes the shared part.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self.writes_shared = True
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise ConfigError(f"{folder} belongs to another user; give a folder of yours in FUSIONLAYER_ELASTIC_DIR")
        self.token = self._agree_on_token()

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
            if whose and _is_mine(left) and _started(int(whose[1])) != whose[2]:
                shutil.rmtree(left, ignore_errors=True)
        return cls(_own_folder(root, f"{folders}{agent}-{_started(agent)}"), rank)

    def keep(self, number: int, shared: Any, own: Any) -> None:
        """Write commit ``number``. Keep the one before it, and remove older ones.

        Raises:
            ConfigError: there is no room. Nothing of this commit stays, and the one before it is still the last.
        """
        parts = {f"rank-{self._rank}": own, **({"shared": shared} if self.writes_shared else {})}
        drafts = [self._folder / f"{number}.{part}.draft" for part in parts]
        try:
            for draft, value in zip(drafts, parts.values(), strict=True):
                with draft.open("wb") as file:
                    torch.save(value, file)
        except Exception as error:
            for draft in drafts:
                draft.unlink(missing_ok=True)
            # torch's writer may raise an error of its own while it handles that of the file.
            why = error if isinstance(error, OSError) else error.__context__
            if not isinstance(why, OSError):
                raise
            raise ConfigError(
                f"cannot keep a commit in {self._folder}: {why.strerror}; make room, or name another folder in "
                "FUSIONLAYER_ELASTIC_DIR"
            ) from error
        # The shared part comes last: a commit counts once that is there.
        for draft in drafts:
            draft.rename(draft.with_suffix(""))
        for path, of, part in self._files():
            mine = self.writes_shared or part == f"rank-{self._rank}"
            if mine and of <= number - _KEPT:
                path.unlink(missing_ok=True)

    def newest(self) -> int:
        """Return the number of the last commit whose shared part is here, or 0 if there is none."""
        return max((number for _, number, part in self._files() if part == "shared"), default=0)

    def shared(self, number: int) -> Any:
        """Return the shared part of commit ``number``."""
        return _read(self._folder / f"{number}.shared")

    def ranks(self, number: int) -> list[int]:
        """Return the ranks whose own parts of commit ``number`` are here, in ascending order."""
        return sorted(
            int(part.removeprefix("rank-"))
            for _, of, part in self._files()
            if of == number and part.startswith("rank-")
        )

    def own(self, number: int, rank: int) -> Any:
        """Return rank ``rank``'s own part of commit ``number``."""
        return _read(self._folder / f"{number}.rank-{rank}")

    def forget(self) -> None:
        """Remove all commits that are here."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _files(self) -> Iterator[tuple[Path, int, str]]:
        for path in self._folder.glob("*.*"):
            number, _, part = path.name.partition(".")
            if number.isdigit() and not part.endswith(".draft"):
                yield path, int(number), part

    def _agree_on_token(self) -> str:
        path = self._folder / "token"
        draft = self._folder / f"token.{secrets.token_hex(8)}"
        draft.write_text(draft.name)
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
        return path.read_text()


def _own_folder(root: Path, name: str) -> Path:
    """Return a folder of this user's, made if need be, by the first of a few names that nobody else has taken.

    Every user can write to ``root``. The ranks of a host see the same strangers there, so they find the same folder.
    """
    for number in range(_MOST_STRANGERS):
        folder = root / (f"{name}.{number}" if number else name)
        with suppress(OSError):
            folder.mkdir(mode=0o700)
        if _is_mine(folder):
            return folder
    raise ConfigError(
        f"other users have taken the names {name}... in {root}; name a folder of yours in FUSIONLAYER_ELASTIC_DIR"
    )


def _is_mine(folder: Path) -> bool:
    """Return whether this is a folder, not a link to one, that this user has and others cannot write to."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)  # written by this job, in a folder of this user's


def _agent(job: str) -> int:
    """Return the process that started this worker, perhaps through a script: the first without the job's variable."""
    mark = f"TORCHELASTIC_RUN_ID={job}".encode()
    process = os.getppid()
    while process > 1 and mark in _bytes(Path(f"/proc/{process}/environ")).split(b"\0"):
        process = int(_stat(process)[1])
    return process


def _started(process: int) -> str:
    """Return when a process was started, as /proc gives it, or "" if it does not exist or is a zombie."""
    fields = _stat(process)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _stat(process: int) -> list[str]:
    return _bytes(Path(f"/proc/{process}/stat")).decode().rpartition(")")[2].split()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
