"""Who a process is, and whether it still runs: what ranks tell each other about themselves."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Identity", "node_name"]


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, so described that another one can find it, or can tell that it cannot look.

    Attributes:
        pid: process id.
        host: host name, for messages.
        place: boot id and pid namespace, empty without /proc; processes of one place see each other in /proc.
        started: start time as /proc gives it; tells a process from a later one with its pid.
    """

    pid: int
    host: str
    place: str
    started: str

    @classmethod
    def own(cls) -> Identity:
        """Return the calling process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            place = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            place = ""
        pid = os.getpid()
        return cls(pid, socket.gethostname(), place, _stat(pid)[1] if place else "")

    def as_dict(self) -> dict[str, str | int]:
        """Return what the constructor takes."""
        return asdict(self)

    def trouble(self, seen_from: Identity) -> str | None:
        """Return "gone" or "stopped", or None if it runs or cannot be looked at from the process ``seen_from``."""
        if not self.place or self.place != seen_from.place:
            return None
        state, started = _stat(self.pid)
        if state in ("", "Z", "X") or started != self.started:
            return "gone"
        return "stopped" if state in ("T", "t") else None

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


def node_name() -> str:
    """Return what processes that share a host and its network have in common, and no others."""
    try:
        network = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        network = ""
    return f"{socket.gethostname()} {network}"


def _stat(pid: int) -> tuple[str, str]:
    """Return state and start time of a process, both empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], fields[19]
