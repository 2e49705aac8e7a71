"""The switch in user space: built on first use, kept for the next."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.lab.network import Network, Obstacle

__all__ = ["build", "start_switch"]

_SOURCE = Path(__file__).with_name("switch.c")
_TUN = Path("/dev/net/tun")


def start_switch(network: Network, namespaces: list[str]) -> subprocess.Popen[str]:
    """Return the switch that joins the hosts in ``namespaces``: each has the network's devices now.

    Raises:
        Obstacle: no C compiler, or this user may make no TAP devices.
    """
    if not os.access(_TUN, os.R_OK | os.W_OK):
        reason = "may not be opened by this user" if _TUN.exists() else "is missing"
        raise Obstacle(
            f"{_TUN} {reason}; corruption and reordering need it, and so do delay and loss without netem in the kernel"
        )
    ports = [
        (device, f"{network.rate_of(host, number) or 0:.0f}", namespace)
        for number, device in enumerate(network.devices)
        for host, namespace in enumerate(namespaces)
    ]
    chances = (repr(network.loss), repr(network.corruption), repr(network.reordering))
    arguments = (f"{network.delay_seconds * 1e9:.0f}", *chances, *(word for port in ports for word in port))
    switch = subprocess.Popen(
        [build(), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert switch.stdout is not None
    answer = switch.stdout.readline().strip()
    if answer != "ready":
        raise Obstacle(f"the switch did not start: {answer or 'it said nothing'}")
    return switch


def build() -> Path:
    """Return the program of the switch, which is compiled unless this very source has been before.

    Raises:
        Obstacle: no C compiler, or one that fails.
    """
    source = _SOURCE.read_bytes()
    key = hashlib.sha256(source + platform.machine().encode()).hexdigest()[:16]
    program = _cache() / f"switch-{key}"
    if program.exists():
        return program
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Obstacle("no C compiler (cc, gcc or clang) to build the switch that this network needs here")
    partial = program.with_name(f"{program.name}.{os.getpid()}-{os.urandom(4).hex()}")
    command = [compiler, "-O2", "-o", str(partial), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Obstacle(f"{compiler} did not build the switch: {(done.stderr.strip() or 'no word why').splitlines()[0]}")
    partial.replace(program)
    return program


def _cache() -> Path:
    """Return a folder of this user, and of nobody else, that outlives the process."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # Within a lab everybody is root; what this user is outside stands in the map.
    user = Path("/proc/self/uid_map").read_text().split()[1]
    fallback = Path(tempfile.gettempdir()) / f"fusionlayer-lab-{user}"
    for folder in (Path(home) / "fusionlayer-lab", fallback):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
                return folder
        except OSError:
            continue
    raise Obstacle(f"neither {home} nor {fallback} can hold the program of the switch; set XDG_CACHE_HOME")
