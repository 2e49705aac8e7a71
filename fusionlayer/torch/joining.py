"""What a rank does that has no more data: until all have joined it stands in, in operations and optimizers' steps."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from ..coordination import Session
from ..errors import FusionLayerError
from ..integrations.reduction import StepState
from ..scheduler.worker import Job, Worker
from .basics import HorovodInternalError, session

__all__ = ["enlist", "join"]

_Key = tuple[int, int]

_enlisted: WeakKeyDictionary[Session, WeakValueDictionary[_Key, Any]] = WeakKeyDictionary()
# Guards _enlisted: optimizers are made on any thread.
_lock = threading.Lock()


def enlist(process_set: int, optimizer: Any) -> _Key:
    """Have ``join`` stand in for an optimizer's steps; return the key that ``Session.begin_step`` takes for them.

    All ranks of the set enlist their optimizers in the same order.
    """
    here = session()
    key = here.enlist(process_set)
    with _lock:
        _enlisted.setdefault(here, WeakValueDictionary())[key] = optimizer
    return key


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so; return the last one that has.

    Until then it takes part in the others' operations: with zeros in sums and averages (which are still divided by the
    number of all ranks), with what changes nothing in other reductions, with no rows in allgathers, and as a receiver
    of broadcasts. Operations that need more of it fail on every rank.

    In the steps of ``DistributedOptimizer`` it takes part with zeros, and with what its error feedback holds. If
    backward has run without ``step``, ``join`` ends that step in the same way, and does not update with it. Its own
    parameters and the optimizer's state are not updated: to go on after it, broadcast both from the rank that is
    returned, which has made the most updates.

    Args:
        device: without effect; tensors are made where the others have theirs.

    Raises:
        HorovodInternalError: a peer was lost, or a step in which this rank stood in has failed.
    """
    here = session()
    try:
        handle = here.submit("join", at_once=True)
        standing_in = _StandingIn(here)
        try:
            standing_in.follow(handle)
            last: int = here.wait(handle)
            standing_in.end()
        finally:
            standing_in.close()
    except FusionLayerError as error:
        raise HorovodInternalError(str(error)) from error
    return last


class _StandingIn:
    """Steps of this rank's optimizers, made because other ranks make them.

    Each optimizer has a thread: ranks may wait for two of them in another order than that in which their steps begin.
    """

    def __init__(self, here: Session) -> None:
        self._here = here
        with _lock:
            self._optimizers = dict(_enlisted.get(here, {}))
        self._workers: dict[_Key, Worker] = {}
        self._last: dict[_Key, Job] = {}

    def follow(self, join: int) -> None:
        """Make the steps that other ranks begin until all have joined."""
        known: dict[_Key, int] = {}
        while (begun := self._here.await_steps(join, known, self._has_failed)) is not None:
            for key, count in begun.items():
                if key in self._optimizers and count != known.get(key):
                    work = partial(self._make_steps, key, count)
                    self._last[key] = self._worker(key).put(work, abandoned=self._here.notify)
            known = begun
        for job in self._last.values():
            if job.error is not None:
                raise job.error

    def end(self) -> None:
        """Wait until all steps are done."""
        for job in self._last.values():
            job.wait()

    def close(self) -> None:
        """Let the threads end."""
        for worker in self._workers.values():
            worker.close()

    def _has_failed(self) -> bool:
        return any(job.error is not None for job in self._last.values())

    def _worker(self, key: _Key) -> Worker:
        if key not in self._workers:
            self._workers[key] = Worker(f"fusionlayer stands in {key}")
        return self._workers[key]

    def _make_steps(self, key: _Key, count: int) -> None:
        optimizer = self._optimizers[key]
        device = next(iter(optimizer._fl_names)).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            while optimizer._fl_engine is not None and (
                optimizer._fl_state is StepState.REDUCING or self._here.steps_begun(key) < count
            ):
                optimizer._fl_stand_in()
