"""``join``: a rank without more data takes part in operations and optimizers' steps until all ranks have joined."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from .. import context
from ..base.errors import FusionLayerError
from ..coordination import Session
from ..scheduler.lanes import Job, Worker
from ..training.step_state import StepState
from .basics import HorovodInternalError, session

_Key = tuple[int, int]

_enlisted: WeakKeyDictionary[Session, WeakValueDictionary[_Key, Any]] = WeakKeyDictionary()
# Guards _enlisted: where ranks are threads, each of them makes optimizers and joins.
_lock = threading.Lock()


def enlist(process_set: int, optimizer: Any) -> _Key:
    """Let ``join`` take part in an optimizer's steps. Return the optimizer's key for ``Session.begin_step``.

    All ranks of the set register their optimizers in the same order, so an optimizer has the same key on all of them.
    """
    here = session()
    key = here.enlist(process_set)
    with _lock:
        _enlisted.setdefault(here, WeakValueDictionary())[key] = optimizer
    return key


def join(device: int = -1) -> int:
    """Say that this rank has no more data. Wait until all ranks have said so; return the last one that did.

    Until then this rank takes part in the others' operations. It gives zeros to sums and averages (which are still
    divided by the number of all ranks), neutral values to other reductions and no rows to allgathers, and it receives
    broadcasts. Operations that need other values of it fail on every rank.

    To the steps of ``DistributedOptimizer`` it gives zeros and its error feedback. If backward has run without
    ``step``, ``join`` ends that step in the same way without an update. This rank's parameters and optimizer state are
    not updated. To train on after ``join``, broadcast both from the rank that it returns: that rank has made the most
    updates.

    Args:
        device: the GPU of this rank if the others' tensors are on GPUs. -1: that of its former tensors, else the
            thread's current one, else the one of its local rank.

    Raises:
        HorovodInternalError: a peer failed, or a step that this rank took part in has failed.
    """
    here = session()
    try:
        here.stand_in_on(_device_of(device))
        handle = here.submit("join", at_once=True)
        standing_in = _StandingIn(here)
        try:
            standing_in.follow(handle)
            last: int = here.wait(handle)
            standing_in.end()
        finally:
            standing_in.close()
    except FusionLayerError as error:
        raise HorovodInternalError.of(error) from None
    return last


def _device_of(index: int) -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    if index < 0:  # a process that has not used a GPU is not asked for its current one: that would take memory there
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        index = index or context.local_rank() % torch.cuda.device_count()
    return torch.device("cuda", index)


class _StandingIn:
    """Makes steps of this rank's optimizers because other ranks make them.

    Each optimizer has a thread of its own. Ranks may begin steps of two optimizers in one order and wait for them in
    another. One thread for both would wait for the wrong one, and ranks would deadlock.
    """

    def __init__(self, here: Session) -> None:
        self._here = here
        with _lock:
            self._optimizers = dict(_enlisted.get(here, {}))
        self._workers: dict[_Key, Worker] = {}
        self._last: dict[_Key, Job] = {}

    def follow(self, join: int) -> None:
        """Make the steps that other ranks begin, until all ranks have joined. Runs on the thread of ``join``."""
        known: dict[_Key, int] = {}
        while (begun := self._here.await_steps(join, known, self._has_failed)) is not None:
            for key, count in begun.items():
                # A key that is not here belongs to a process set without this rank, or to an optimizer that is gone.
                if key in self._optimizers and count != known.get(key):
                    # A step may make a new plan, which asks for the job of this thread.
                    work = partial(copy_context().run, self._make_steps, key, count)
                    # notify: await_steps looks again if the job fails, else it would wait for ever.
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
        """End the threads, each after its last job."""
        for worker in self._workers.values():
            worker.close()

    def _has_failed(self) -> bool:
        return any(job.error is not None for job in self._last.values())

    def _worker(self, key: _Key) -> Worker:
        if key not in self._workers:
            self._workers[key] = Worker(f"fusionlayer stands in {key}")
        return self._workers[key]

    def _make_steps(self, key: _Key, count: int) -> None:
        """Make steps of one optimizer until it has begun ``count``; runs on the optimizer's thread."""
        optimizer = self._optimizers[key]
        reducer = optimizer.reducer
        device = reducer.enrolment.device
        # The current device belongs to a thread, so this one sets it. REDUCING: backward had begun a step before join;
        # that step counts as begun but has to be ended.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            while reducer.engine is not None and (
                reducer.state is StepState.REDUCING or self._here.steps_begun(key) < count
            ):
                reducer.policy.stand_in()
