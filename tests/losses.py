"""A process that is lost at the worst moment: its host's kernel knows, and the libraries of the others do not yet."""

import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["lose", "stop_here"]


def stop_here(folder: str, name: str) -> None:
    """Write which process this is to a file that others wait for, and stop, as if another one had the processor."""
    draft = Path(folder, f".{name}")
    draft.write_text(str(os.getpid()))
    draft.rename(Path(folder, name))
    os.kill(os.getpid(), signal.SIGSTOP)


def lose(pid: int) -> None:
    """Let nothing more be written to a stopped process, as if it were gone already."""
    theirs = _ports(pid)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] in theirs:
                        end.shutdown(socket.SHUT_WR)


def _ports(pid: int) -> set[int]:
    """Return the local ports of a process's connections."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
            inodes |= {found[1]} if found else set()
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[9] in inodes}
