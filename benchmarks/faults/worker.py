"""One rank: it joins the job, trains, and tells the controller where it is and how it ended."""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusionlayer.health import heartbeat
from fusionlayer.transport.links import gloo as _gloo

from .deeds import DEEDS, await_child, set_link
from .fronts import make_front
from .job import Job, Phase

__all__ = ["Worker", "run"]


class Worker:
    """A rank of a job, as fronts and deeds see it.

    Attributes:
        job: what all ranks do.
        rank: this one.
        facts: what is told at the end besides.
        children: processes that it has forked.
        change_last: one bit of the last parameter is to be changed before the digest is made.
        flip_bucket: number of the sum of plain DDP in which a bit is to be flipped, and a seed of the bit.
    """

    def __init__(self, job: Job, rank: int, controller: Connection) -> None:
        self.job, self.rank = job, rank
        self.facts: dict[str, Any] = {}
        self.children: list[int] = []
        self.change_last = False
        self.flip_bucket: tuple[int, int] | None = None
        self.front: object = None  # of a quick job, which ends without taking it apart
        self._controller = controller
        self._lock = threading.Lock()  # of the connection: a deed may be done on a thread of the transport's
        self._is_child = False
        self._seen: Counter[str] = Counter()

    def at(self, name: str, number: int | None = None) -> None:
        """Be at a point: tell the controller, wait for it, or do something, if the job says so.

        Args:
            name: of the point.
            number: None: the points of this name are counted.
        """
        phase = Phase(name, self._seen[name] if number is None else number)
        self._seen[name] += 1
        if (self.rank, phase) in self.job.holds:
            self.ask(phase)
        for deed in self.job.deeds:
            if (deed.rank, deed.phase) == (self.rank, phase):
                DEEDS[deed.what](self, **deed.options)

    def ask(self, phase: Phase) -> Any:
        """Be held at a point; return the controller's answer."""
        with self._lock:
            self._controller.send(("at", time.monotonic(), phase))
        return self._controller.recv()

    def tell(self, kind: str, **details: Any) -> None:
        """Tell the controller how this rank has ended."""
        if not self._is_child:
            with self._lock:
                self._controller.send((kind, time.monotonic(), {"kind": kind, "facts": self.facts, **details}))

    def did(self) -> None:
        """Tell the controller that the attack is made now. Any thread may call it."""
        with self._lock:
            self._controller.send(("did", time.monotonic(), None))

    def become_child(self) -> None:
        """Be a process that this rank has forked: the connection is the rank's."""
        self._is_child = True
        self.children.clear()
        self._controller.close()


def run(job: Job, rank: int, controller: Connection) -> None:
    """Be rank ``rank`` of ``job``, from the first line of a user's program to the last."""
    torch.set_num_threads(1)
    # A shell without job control starts what runs in the background with Ctrl-C ignored, and ranks would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None  # the host has looked for it already, and for torch's level of debugging
    dist.set_debug_level_from_env()
    if (device := os.environ["GLOO_SOCKET_IFNAME"]) != "lo":
        set_link(device, True)  # the job before this one may have left it down
    worker = Worker(job, rank, controller)
    _watch(worker)
    warnings.showwarning = lambda message, *_: worker.facts.setdefault("warned", []).append(str(message))
    try:
        digest = train(worker)
    except BaseException as error:
        worker.tell("raised", **_described(error))
        if job.quick:
            _end(1)
        raise
    worker.tell("finished", digest=digest)
    if job.quick:
        _end(0)


def _end(status: int) -> None:
    """End this process as Python does, but for the taking apart of its modules."""
    atexit._run_exitfuncs()
    os._exit(status)


def train(worker: Worker) -> str:
    """Do the worker's job; return the digest of the final parameters."""
    try:
        worker.at("start")
        front = make_front(worker)
        if worker.job.quick:
            # Taken apart, DDP's reducer joins gloo's thread and holds the interpreter's lock, for which it may wait.
            worker.front = front
        worker.at("wrapped")
        for step in range(worker.job.steps):
            front.step(step)
        worker.at("ending")
        digest = _digest(front.state(), worker.change_last)
        front.leave()
        return digest
    finally:
        for child in worker.children:
            worker.facts["child"] = await_child(child, worker.job.timeout / 2, 2.5 * worker.job.timeout)
        worker.children.clear()


def _watch(worker: Worker) -> None:
    """Announce the points of a connection's making, inside torch and fusionlayer."""
    _before(dist, "init_process_group", lambda: worker.at("grouping"), lambda: worker.at("joined"))
    _before(heartbeat.Heartbeat, "meet", lambda: worker.at("meeting"))
    _before(_gloo.GlooLink, "__init__", lambda: worker.at("connecting"), lambda: worker.at("connected"))


def _before(owner: Any, name: str, before: Callable[[], None], after: Callable[[], None] | None = None) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        result = inner(*args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(owner, name, wrapped)


def _described(error: BaseException) -> dict[str, Any]:
    """Return type, message and blame of an exception; the first of its causes that has ``ranks`` says who it was."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    typed = next((tuple(ranks) for each in causes if (ranks := getattr(each, "ranks", ()))), None)
    return {
        "error": tuple(kind.__name__ for kind in type(error).__mro__),
        "typed": typed,
        "text": str(error),
        "trace": traceback.format_exc(),
    }


def _digest(tensors: list[Tensor], changed: bool) -> str:
    found = hashlib.sha256()
    if changed:
        tensors[-1].detach().view(torch.uint8)[0] ^= 1
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
