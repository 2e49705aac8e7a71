"""A place where ranks run: ``python -m benchmarks.faults.host SOCKET``.

It imports torch and fusionlayer once, and forks a clean process for each rank that the controller asks for; so a rank
starts in hundredths of a second. It sends signals, since process ids mean nothing outside its namespace, and tells how
processes have ended. It starts no thread. When the controller is gone it ends all ranks and itself.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from .connection import connect

__all__ = ["Host"]

PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "fusionlayer.backend",
    "fusionlayer.sharded.fsdp",
    "fusionlayer.parallel.pipeline",
    "fusionlayer.parallel.tensor_parallel",
    "fusionlayer.torch.elastic",
    "fusionlayer.transport.c10d",
    "benchmarks.faults.worker",
)

Key = tuple[int, int]
"""Number of a job, and a rank of it."""


class Host:
    """The server: one process, with those it has forked.

    Args:
        path: of the controller's socket.
        number: of this host.
    """

    def __init__(self, path: str, number: int) -> None:
        self._path = path
        self._controller = connect(path, ("host", number))
        self._children: dict[int, tuple[int, Key]] = {}  # by the file descriptor of the process

    def serve(self) -> Callable[[], None] | None:
        """Return None when the controller is gone; in a forked process, what the rank is to run."""
        try:
            while True:
                for ready in wait([self._controller, *self._children]):
                    if isinstance(ready, int):
                        self._tell_end(ready)
                        continue
                    what, key, *more = self._controller.recv()
                    if what == "signal":
                        self._signal(key, *more)
                    elif (pid := os.fork()) != 0:
                        self._children[os.pidfd_open(pid)] = pid, key
                    else:
                        return self._become(key, *more)
        except (EOFError, OSError):
            for pid, _ in self._children.values():
                os.kill(pid, signal.SIGKILL)
            return None

    def _become(self, key: Key, job: Any, environment: dict[str, str], log: str) -> Callable[[], None]:
        from .worker import run

        self._controller.close()
        for child in self._children:
            os.close(child)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.update(environment)
        return partial(run, job, key[1], connect(self._path, ("rank", *key, os.getpid())))

    def _signal(self, key: Key, number: int) -> None:
        for pidfd, (_, of) in self._children.items():
            if of == key:
                signal.pidfd_send_signal(pidfd, number)
        self._controller.send(("signalled", key, time.monotonic()))

    def _tell_end(self, pidfd: int) -> None:
        pid, key = self._children.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        self._controller.send(("ended", key, time.monotonic(), os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # or the end of each rank would copy all of the server's memory
    # A rank leaves the server's loop and runs to the interpreter's own end, as any Python process does.
    if rank := Host(sys.argv[1], int(os.environ.get("RANK", "0"))).serve():
        rank()
