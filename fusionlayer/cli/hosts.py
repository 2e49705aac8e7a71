"""The hosts of a job: named with horovodrun's syntax, and reached by ssh."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import ConfigError
from ..process.interfaces import addresses
from .forwarded import exports

# A name that no program takes for an option, with the user to log in as before it.
_USER = r"(?:[\w.+\\][\w.+\\@-]*@)?"
_NAME = re.compile(rf"{_USER}\w[\w.-]*", re.ASCII)
_SLOTS = re.compile(r"0*[1-9]\d{0,5}", re.ASCII)
_IPV6 = re.compile(rf"({_USER})([\da-fA-F:.]*:[\da-fA-F:.]*(?:%\w[\w.-]*)?)", re.ASCII)

# What another host runs. Standard input has the variables, which no list of processes may show, up to a line that none
# of them has. From then on it stays open until this process ends.
_WATCHED = """\
variables=
while IFS= read -r line || exit 1; do
[ "$line" = {end} ] && break
variables="$variables$line
"
done
eval "$variables"; unset variables line
exec 3<&0; cd {folder} || exit 1
{command} </dev/null & program=$!
(read -r _ <&3; kill -TERM $program) >/dev/null 2>&1 &
wait $program; status=$?; kill $! 2>/dev/null; exit $status"""


@dataclass(frozen=True)
class Host:
    """A host, and how many processes it takes. An IPv6 address has no brackets."""

    name: str
    slots: int

    @property
    def address(self) -> str:
        """The name without the user to log in as."""
        return self.name.rpartition("@")[2]

    @property
    def is_here(self) -> bool:
        """Whether this process runs on the host."""
        own = {address for found in addresses().values() for address in found}
        return _plain(self.name) in {"localhost", socket.gethostname(), socket.getfqdn(), *own}


def _plain(name: str) -> str:
    """Return an IPv6 address in the system's form; any other name unchanged."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def parse_hosts(text: str) -> list[Host]:
    """Read "host1:2,host2:4"; a host without a number takes one process. An IPv6 address stands in brackets.

    Raises:
        ConfigError: a name is none that ssh takes, or the number after a colon is not a whole number above 0.
    """
    hosts = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        bracketed = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](?::(.*))?", part)
        if bracketed:
            name, slots = bracketed[1] + bracketed[2], bracketed[3]
        else:
            name, _, slots = part.partition(":")
            slots = slots if ":" in part else None
        slots = "1" if slots is None else slots
        if not name or not _SLOTS.fullmatch(slots):
            raise ConfigError(f"host {part!r}; expected name:slots, such as node1:4, or [fd00::1]:4")
        hosts.append(Host(_checked(name, part, is_ipv6=bool(bracketed)), int(slots)))
    if not hosts:
        raise ConfigError(f"hosts {text!r} names none; expected name:slots,name:slots")
    return hosts


def _checked(name: str, given: str, *, is_ipv6: bool) -> str:
    found = _IPV6.fullmatch(name) if is_ipv6 else None
    if found:
        try:
            return found[1] + str(ipaddress.IPv6Address(found[2]))
        except ValueError:
            pass
    if is_ipv6 or not _NAME.fullmatch(name):
        raise ConfigError(
            f"host {given!r}: {name!r} is no name of a host; expected letters, digits, dots and dashes that begin with "
            "a letter or a digit, user@ in front of them, or an IPv6 address in brackets"
        )
    return name


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
        where = f"hostfile {path}, line {number}"
        if words[0].count(":") > 1 and "[" not in words[0]:
            words[0] = re.sub("([^@]*)$", r"[\1]", words[0], count=1)  # an IPv6 address, as other launchers take it
        if len(words) == 2 and words[1].startswith("slots="):
            words = [f"{words[0]}:{words[1].removeprefix('slots=')}"]
        if len(words) != 1:
            raise ConfigError(f"{where}: {line!r}; expected 'name slots=4'")
        try:
            hosts += parse_hosts(words[0])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
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
    variables: Mapping[str, str],
    port: int | None = None,
    identity: str | None = None,
    *,
    new_hosts: bool = False,
) -> tuple[list[str], bytes]:
    """Return the ssh command that runs ``command`` on another host, in this folder, and its first input.

    The program there ends when the standard input of the ssh command is closed.

    Args:
        host: where to; its name may be user@name.
        command: program and arguments.
        variables: environment variables of the program, in addition to the other host's.
        port: the port of its ssh server; None: as ssh is configured.
        identity: file with the key; None: as ssh is configured.
        new_hosts: accept the key of a host that ssh does not know yet. A key that has changed is refused anyway.
    """
    end = f"end-{secrets.token_hex(8)}"
    script = _WATCHED.format(end=end, folder=shlex.quote(os.getcwd()), command=shlex.join(command))
    options = [*(("-p", str(port)) if port else ()), *(("-i", identity) if identity else ())]
    if new_hosts:
        options += ["-o", "StrictHostKeyChecking=accept-new"]
    ssh = ["ssh", "-o", "BatchMode=yes", *options, "--", host.name, shlex.join(["sh", "-c", script])]
    return ssh, f"{exports(variables)}{end}\n".encode(errors="surrogateescape")
