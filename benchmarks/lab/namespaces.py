"""The commands that make namespaces, and those that enter the ones of a kept lab."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Namespaces", "unshare", "unshare_processes", "why_no_namespaces", "why_refused"]

_PACKAGES = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
_LIMITS = [f"max_{kind}_namespaces" for kind in ("user", "net", "pid", "mnt")]
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


def why_no_namespaces() -> str | None:
    """Return why this user can make no network namespaces on this machine, in one line; None if the user can."""
    for program, package in _PACKAGES.items():
        if shutil.which(program) is None:
            return f"the program {program} is missing (install {package})"
    done = subprocess.run([*unshare(), "true"], capture_output=True, text=True, check=False)
    return why_refused(done.stderr) if done.returncode else None


def why_refused(errors: str) -> str:
    """Return the reason, in one line, for which ``unshare`` or a program that it started has written ``errors``."""
    last = (errors.strip() or "unshare failed").splitlines()[-1]
    if last.startswith("unshare:") and "No space left on device" in last:  # the kernel's word for a limit
        limits = [limit for limit in _LIMITS if _is_zero(limit)]
        if limits:
            return f"the kernel's limit user.{limits[0]} is 0: raise it (sysctl -w user.{limits[0]}=10000)"
        return "the kernel's limit of namespaces is reached: raise the user.max_*_namespaces of sysctl"
    if last.startswith("unshare:") and "Operation not permitted" in last and "mount" not in last:
        if os.geteuid() == 0:
            return "root of this container may make no namespaces: start the container with --cap-add SYS_ADMIN"
        return "the system lets only root make namespaces: run as root, or allow unprivileged user namespaces"
    return last


def _is_zero(limit: str) -> bool:
    try:
        return Path("/proc/sys/user", limit).read_text().strip() == "0"
    except OSError:
        return False


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
