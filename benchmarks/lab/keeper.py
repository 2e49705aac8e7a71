"""The inner side of a kept lab: makes the hosts, tells those who ask of them, and ends when it is told to.

Started by ``up`` with a network as JSON and the number of an open socket, as process 1 of namespaces of its own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # this file runs as a script

from benchmarks.lab.hosts import make_hosts  # noqa: E402
from benchmarks.lab.kept import peer_of  # noqa: E402
from benchmarks.lab.network import Network, Obstacle  # noqa: E402

__all__ = ["main"]


def main() -> int:
    """Keep the lab until it is taken down; return the exit status."""
    network = Network(**json.loads(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    listener.set_inheritable(False)
    try:
        hosts, switch = make_hosts(network)
    except Obstacle as obstacle:
        print(obstacle)
        return 1
    own = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("user", "pid", "net")]
    files = [*own, *(host.namespace for host in hosts if host.namespace is not None)]
    listener.listen()
    print("ready", flush=True)
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    answer = json.dumps(asdict(network)).encode()
    listener.settimeout(1.0)
    while switch is None or switch.poll() is None:
        _reap(switch)
        with suppress(OSError), listener.accept()[0] as connection:
            connection.settimeout(5.0)
            if peer_of(connection)[1] != os.getuid():
                continue
            socket.send_fds(connection, [answer], files)
            if connection.recv(16) == b"down":
                return 0
    return 1


def _reap(switch: subprocess.Popen[str] | None) -> None:
    """Forget processes of runs that have ended: the first process of a namespace inherits them."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if switch is not None and ended.si_pid == switch.pid:
                return
            os.waitpid(ended.si_pid, 0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main())
