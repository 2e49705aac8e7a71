"""Identities of processes and nodes, and whether a process of this host still runs."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from ..base.errors import printable


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, described so that another process can find it in /proc, or see that it cannot.

    Attributes:
        pid: process id.
        host: host name, for messages.
        place: boot id and pid namespace; empty without /proc. Processes of the same place see each other in /proc.
        started: start time from /proc. It distinguishes the process from a later one with the same pid.
    """

    pid: int
    host: str
    place: str
    started: str

    @classmethod
    def own(cls) -> Identity:
        """Return the identity of the calling process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            place = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            place = ""
        pid = os.getpid()
        return cls(pid, socket.gethostname(), place, _stat(pid)[1] if place else "")

    @classmethod
    def unknown(cls) -> Identity:
        """Return the identity of a process that no other one can look up."""
        return cls(0, "unknown", "", "")

    def encode(self) -> str:
        """Return the identity as text, for another process to ``decode``."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes | str) -> Identity:
        """Return the identity that ``encode`` has written; for any other text one that cannot be looked up."""
        unknown = cls.unknown()
        try:
            given = json.loads(text)
            fits = given.keys() == asdict(unknown).keys() and type(given["pid"]) is int
        except (ValueError, AttributeError, RecursionError):
            return unknown
        return cls(given["pid"], *map(str, (given["host"], given["place"], given["started"]))) if fits else unknown

    def trouble(self, seen_from: Identity) -> str | None:
        """Return "gone" or "stopped"; None if the process runs, or if process ``seen_from`` cannot look it up."""
        if not self.place or self.place != seen_from.place:
            return None
        state, started = _stat(self.pid)
        if state in ("", "Z", "X") or started != self.started:
            return "gone"
        return "stopped" if state in ("T", "t") else None

    def __str__(self) -> str:
        return f"process {self.pid} on host {printable(self.host)}"


def return_free_memory() -> None:
    """Give the system the free memory between used blocks of malloc; do nothing if libc cannot.

    After much was freed that lay between smaller things, malloc keeps it, and a process seems to grow without end.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def machine_name() -> str:
    """Return a name that is equal for processes under one kernel, in whatever containers, and for no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def node_name() -> str:
    """Return a name that is equal exactly for processes that share a host and its network."""
    try:
        network = f"{machine_name()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        network = ""
    return f"{socket.gethostname()} {network}"


def _stat(pid: int) -> tuple[str, str]:
    """Return the state and start time of a process; both are empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], fields[19]
