"""What a rank does to itself at a point of its life."""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fusionlayer.base.errors import TransportError
from fusionlayer.transport.links import gloo as _gloo

if TYPE_CHECKING:
    from .worker import Worker

__all__ = ["DEEDS", "await_child", "set_link"]


def fork(worker: Worker, how: str) -> None:
    """Fork, as a data loader does, and train on; the child ends ``how``, and ``await_child`` says whether it did."""
    worker.did()
    child = os.fork()
    if child:
        worker.children.append(child)
        return
    worker.become_child()
    # What Python does in a child that hangs goes to the rank's log.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "_exit":
        os._exit(0)
    if how == "raise":
        raise RuntimeError("a mistake in a child")
    sys.exit(0)


def await_child(child: int, idle: float, most: float) -> int | str:
    """Return the exit status of a child, or "hung" and what the kernel says of its wait; then it is killed.

    The interpreter's own end takes a second of a processor, which may be many seconds on a busy machine. So a child
    hangs if it sleeps and computes nothing.

    Args:
        child: process id.
        idle: seconds of sleep that mean that it hangs.
        most: seconds after which it hangs in any case.
    """
    begun = since = time.monotonic()
    before = ""
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        now = time.monotonic()
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        spent = " ".join(fields[11:13])
        if spent != before or fields[0] in "RD":
            before, since = spent, now
        if now > min(since + idle, begun + most):
            waits_for = Path(f"/proc/{child}/wchan").read_text()
            os.kill(child, signal.SIGUSR1)
            time.sleep(0.5)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"hung in {waits_for}"
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(found[1])


class _Group:
    """A gloo group of a link, whose messages are counted as they arrive; one of them arrives with another bit."""

    def __init__(self, group: Any, worker: Worker, at: int, seed: int) -> None:
        self._group, self._worker, self._at, self._seed = group, worker, at, seed

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        number = self._worker.facts["messages"]
        self._worker.facts["messages"] += 1
        work = self._group.recv(tensors, peer, tag)
        return _Work(work, self._worker, tensors[0], self._seed) if number == self._at else work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class _Work:
    """The arrival of the message that is damaged."""

    def __init__(self, work: Any, worker: Worker, data: Tensor, seed: int) -> None:
        self._work, self._worker, self._data, self._seed = work, worker, data, seed

    def wait(self, timeout: timedelta) -> bool:
        done: bool = self._work.wait(timeout)
        bit = random.Random(self._seed).randrange(8 * self._data.numel())
        self._data[bit // 8] ^= 1 << bit % 8
        self._worker.facts["flipped"] = f"bit {bit} of {self._data.numel()} bytes"
        self._worker.did()
        return done


def flip(worker: Worker, at: int, seed: int) -> None:
    """Flip one bit of message number ``at`` that this rank's links receive from now on; -1: only count them."""
    inner = _gloo.GlooLink.__init__
    worker.facts["messages"] = 0

    def opened(self: Any, *args: Any, **more: Any) -> None:
        inner(self, *args, **more)
        self._group = _Group(self._group, worker, at, seed)

    _gloo.GlooLink.__init__ = opened  # type: ignore[method-assign]


def flip_bucket(worker: Worker, number: int, seed: int) -> None:
    """Flip one bit of what plain DDP's all-reduce ``number`` brings this rank."""
    worker.flip_bucket = number, seed


def raise_error(worker: Worker) -> None:
    """Raise what a mistake in a user's hook raises."""
    worker.did()
    raise ValueError("a mistake of the user's")


def leave(worker: Worker) -> None:
    """End the program from within."""
    worker.did()
    sys.exit(3)


def end(worker: Worker, number: int) -> None:
    """Send this process a signal."""
    worker.did()
    os.kill(os.getpid(), number)
    time.sleep(0.2)


def link_down(worker: Worker, back: float | None = None) -> None:
    """Take this host's link down; a process brings it up again after ``back`` seconds."""
    worker.did()
    device = os.environ["GLOO_SOCKET_IFNAME"]
    set_link(device, False)
    if back is not None:
        subprocess.Popen(["sh", "-c", f"sleep {back}; ip link set {device} up"], start_new_session=True)


def set_link(device: str, up: bool) -> None:
    """Take a network device of this host up or down."""
    subprocess.run(["ip", "link", "set", device, "up" if up else "down"], check=True)


def fill_timeline(worker: Worker, where: str) -> None:
    """Let the timeline be on a full device, or on a disk that is full soon."""
    place = Path(os.environ["TMPDIR"]) / "trace"
    os.environ["FUSIONLAYER_TIMELINE"] = str(place)
    if where == "device":
        place.with_name(f"trace.{worker.rank}").symlink_to("/dev/full")
        worker.did()
    else:
        fill_disk(worker)


def fill_disk(worker: Worker) -> None:
    """Let no file of this process grow beyond a page: what writing to a full disk looks like."""
    worker.did()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def blame(worker: Worker, ranks: list[int]) -> None:
    """Raise an error that names these ranks, as soon as another has been attacked: a control of the judge."""
    time.sleep(0.5)
    raise TransportError(f"rank {worker.rank}: ranks {ranks} are gone", ranks)


def change(worker: Worker) -> None:
    """Change one bit of one parameter, and tell nobody: a control of the judge."""
    worker.did()
    worker.change_last = True


def hang(worker: Worker) -> None:
    """Never come back: a control of the judge."""
    worker.did()
    time.sleep(3600)


def abort(worker: Worker) -> None:
    """Die as of a failed assertion in C++: a control of the judge."""
    worker.did()
    os.abort()


def dawdle(worker: Worker, seconds: float) -> None:
    """Raise the right error, but late: a control of the judge."""
    worker.did()
    time.sleep(seconds)
    raise TransportError("rank 1 is gone", [1])


DEEDS: dict[str, Callable[..., None]] = {
    "fork": fork,
    "flip": flip,
    "flip bucket": flip_bucket,
    "raise": raise_error,
    "leave": leave,
    "signal": end,
    "link down": link_down,
    "timeline": fill_timeline,
    "full disk": fill_disk,
    "blame": blame,
    "change": change,
    "hang": hang,
    "abort": abort,
    "dawdle": dawdle,
}
