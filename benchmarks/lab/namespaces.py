"""The commands that make namespaces, and those that enter the ones of a kept lab."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Namespaces", "unshare", "unshare_processes"]

_PROCESSES = ("--pid", "--fork", "--kill-child", "--mount-proc", "--")


def unshare() -> list[str]:
    """Return the start of a command whose child is process 1 of its own namespaces.

    When that ends, the kernel ends all others in them, and the networks that they have made with them.
    """
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    return ["unshare", *user, "--net", *_PROCESSES]


def unshare_processes() -> list[str]:
    """Return the same for processes alone, in a lab that is there: root of it needs no namespace of users."""
    return ["unshare", *_PROCESSES]


@dataclass(frozen=True)
class Namespaces:
    """Open files that are the namespaces of a kept lab: of users, processes and the switch, and of each host."""

    user: int
    pid: int
    net: int
    hosts: tuple[int, ...]

    @property
    def files(self) -> tuple[int, ...]:
        """All of them, in the order of the fields."""
        return (self.user, self.pid, self.net, *self.hosts)

    @property
    def enter(self) -> list[str]:
        """Start of a command that runs in the lab, outside its hosts."""
        same_user = os.path.samestat(os.fstat(self.user), os.stat("/proc/self/ns/user"))
        # Who made the lab is root of it by the map: there is nobody to become.
        user = [] if same_user else ["--preserve-credentials", f"--user=/proc/self/fd/{self.user}"]
        return ["nsenter", *user, f"--pid=/proc/self/fd/{self.pid}", f"--net=/proc/self/fd/{self.net}", "--"]
