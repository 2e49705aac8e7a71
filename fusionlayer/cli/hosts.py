"""The hosts of a job: named with horovodrun's syntax, and reached by ssh."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..interfaces import ipv4_addresses
from .spawn import without_launcher

__all__ = ["Host", "assign", "parse_hosts", "read_hostfile", "remote_command"]

# Variables of this host or login, which another host must not get.
_OWN_PREFIXES = ("SSH_", "XDG_", "DBUS_")
_OWN_NAMES = {
    *("HOME", "USER", "LOGNAME", "MAIL", "SHELL", "SHLVL", "TERM", "DISPLAY", "HOSTNAME", "PWD", "OLDPWD", "TMPDIR"),
    "_",
}

# The program ends when its standard input does, because its parent is then gone.
_WATCHED = """\
exec 3<&0; cd {folder} || exit 1
{command} </dev/null & program=$!
(read -r _ <&3; kill -TERM $program) >/dev/null 2>&1 &
wait $program; status=$?; kill $! 2>/dev/null; exit $status"""


@dataclass(frozen=True)
class Host:
    """A host, and how many processes it takes."""

    name: str
    slots: int

    @property
    def is_here(self) -> bool:
        """Whether this process runs on the host."""
        here = {"localhost", socket.gethostname(), socket.getfqdn(), *ipv4_addresses().values()}
        return self.name in here


def parse_hosts(text: str) -> list[Host]:
    """Read "host1:2,host2:4"; a host without a number takes one process.

    Raises:
        ConfigError: the number after a colon is not a whole number above 0.
    """
    hosts = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, slots = part.rpartition(":")
        if not colon:
            name, slots = part, "1"
        if not name or not slots.isdecimal() or int(slots) < 1:
            raise ConfigError(f"host {part!r}; expected name:slots, such as node1:4")
        hosts.append(Host(name, int(slots)))
    if not hosts:
        raise ConfigError(f"hosts {text!r} names none; expected name:slots,name:slots")
    return hosts


def read_hostfile(path: str | os.PathLike[str]) -> list[Host]:
    """Read a file with a line "name slots=4" for each host; "name" and "name:4" will do too, # begins a comment.

    Raises:
        ConfigError: the file cannot be read, names no host, or has a line of another form.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"hostfile {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"hostfile {path} is no text; expected lines 'name slots=4'") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) == 2 and words[1].startswith("slots="):
            words = [f"{words[0]}:{words[1].removeprefix('slots=')}"]
        if len(words) != 1:
            raise ConfigError(f"hostfile {path}, line {number}: {line!r}; expected 'name slots=4'")
        hosts += parse_hosts(words[0])
    if not hosts:
        raise ConfigError(f"hostfile {path} names no host; expected lines 'name slots=4'")
    return hosts


def assign(processes: int, hosts: Sequence[Host]) -> list[Host]:
    """Return the first hosts that have room for ``processes``, each with the number of slots that are used.

    Raises:
        ConfigError: there are fewer slots.
    """
    left, used = processes, []
    for host in hosts:
        if left:
            used.append(Host(host.name, min(left, host.slots)))
            left -= used[-1].slots
    if left:
        have = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigError(f"-np {processes}, but the hosts have {processes - left} slots: {have}; give more")
    return used


def remote_command(
    host: Host,
    command: Sequence[str],
    settings: Mapping[str, str],
    port: int | None = None,
    identity: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return the ssh command that runs ``command`` on another host, in this folder and with this environment.

    The program there ends when the standard input of the ssh command is closed.

    Args:
        host: where to; its name may be user@name.
        command: program and arguments.
        settings: variables that win over those of ``environ``.
        port: of its ssh server; None: as ssh is configured.
        identity: file with the key; None: as ssh is configured.
        environ: variables to take along, except those that belong to this host.
    """
    taken = {
        name: value
        for name, value in without_launcher(environ).items()
        if not name.startswith(_OWN_PREFIXES) and name not in _OWN_NAMES and name.isidentifier()
    }
    variables = [f"{name}={value}" for name, value in sorted({**taken, **settings}.items())]
    script = _WATCHED.format(folder=shlex.quote(os.getcwd()), command=shlex.join(["env", *variables, *command]))
    options = [*(("-p", str(port)) if port else ()), *(("-i", identity) if identity else ())]
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", *options, host.name]
    return [*ssh, shlex.join(["sh", "-c", script])]
