"""The file in which the reporter keeps the state of the job, for `fusionlayer status`.

A file instead of a socket: it needs no port and no secret, a hanging process cannot block its reader, and it stays
    after the job has failed. It appears whole, by a rename.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..base import files, records
from ..base.errors import ConfigError
from ..process.processes import Identity
from .state import Finding, RankState

VERSION = 2
_WEEK = 7 * 86400.0
_MOST_BYTES = 1 << 28
_LATEST = 253_370_764_800.0


@dataclass(frozen=True)
class Report:
    """A job as the first rank alive sees it.

    Attributes:
        version: the version of the file.
        command: the command of the process, shortened.
        size: number of ranks.
        writer: process that keeps the file.
        started: seconds since 1970 when it began to watch.
        written: when it wrote this.
        life: "runs", "ended" or "failed".
        states: the last of each rank that has written one.
        findings: what is wrong now.
        past: lines that were logged, with their times.
    """

    version: int
    command: str
    size: int
    writer: Identity
    started: float
    written: float
    life: str = "runs"
    states: tuple[RankState, ...] = ()
    findings: tuple[Finding, ...] = ()
    past: tuple[tuple[float, str], ...] = ()

    def __post_init__(self) -> None:
        times = self.started, self.written, *(at for at, _ in self.past)
        if not all(0 <= at < _LATEST for at in times) or not 0 <= self.size < 1 << 31:
            raise ConfigError(f"size={self.size}, and times {times}; expected seconds since 1970, before the year 9999")


def folder() -> Path:
    """Return the folder of this user's reports. It may not exist."""
    with suppress(FileNotFoundError):
        if not _is_own(_place()):
            raise ConfigError(f"{_place()} is not a folder of this user alone; name a file by FUSIONLAYER_STATUS")
    return _place()


def _place() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"fusionlayer-{os.getuid()}"


def _is_own(place: Path) -> bool:
    found = place.lstat()
    return found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077


def write(report: Report, path: Path) -> None:
    """Replace the file; only this user may read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Once more, because another user may have made it meanwhile; from now on no other user can exchange it.
    if path.parent == _place() and not _is_own(path.parent):
        raise PermissionError(errno.EPERM, "its folder is not of this user alone", str(path))
    with files.whole(path) as file:
        file.write(json.dumps(asdict(report)).encode())


def read(path: Path) -> Report:
    """Return the report in a file; raise ``ConfigError`` if it has none."""
    try:
        data = json.loads(files.read(path, _MOST_BYTES, follow=True))
    except OSError as error:
        raise ConfigError(f"status {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"status {path} is no report of a job: it is no JSON") from error
    if isinstance(data, dict) and data.get("version", VERSION) != VERSION:
        raise ConfigError(f"status {path} has version {data['version']}, expected {VERSION}; use the same fusionlayer")
    report = records.build(Report, data, f"status {path}")
    if report.life == "runs" and report.writer.trouble(Identity.own()) == "gone":
        lost = Finding("gone", (), f"the process that kept this file is gone ({report.writer}); this is its last word")
        report = replace(report, life="failed", findings=(*report.findings, lost))
    return report


def reports() -> Sequence[Path]:
    """Return the files of this user's jobs on this host: of those that run first, and the newest first."""
    found = []
    for path in folder().glob("job-*.json"):
        with suppress(OSError, ConfigError):  # it may have gone meanwhile
            report = read(path)
            found.append((report.life == "runs", report.written, path))
    return [path for *_, path in sorted(found, reverse=True)]


def forget_old() -> None:
    """Remove the files of jobs that have failed more than a week ago."""
    for path in folder().glob("job-*.json"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _WEEK:
                path.unlink()
