"""``run``: training that continues when workers fail or are added."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

from ... import context, launch
from ...base.errors import ConfigError, TransportError, kind_of, require
from .. import mpi_ops as ops
from ..basics import HorovodInternalError, rank, shutdown
from ..environment import elastic_timeout
from ..functions import allgather_object, broadcast_object
from ..startup import init
from .signals import Notice
from .state import HostsUpdatedInterrupt, State
from .storage import Storage

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=State)

_log = logging.getLogger(__name__)

_RESTART = 75
"""Exit status of a worker that asks its agent for a restart (EX_TEMPFAIL of sysexits.h)."""

_MEMBERS = (
    "it begins jobs anew, and the members go on by themselves; train in a plain loop with "
    "fusionlayer.DistributedOptimizer, or leave elastic=True out"
)

_PATIENCE = 10.0
"""Seconds that a worker waits for its own agent's notice when another agent's workers have got theirs."""


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Return ``func``, whose first argument is a ``State``, so that it outlives lost and added workers.

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, epochs):
                ...
                state.commit()

    First all ranks get the newest commit that any rank finds, or the state of rank 0 if there is no commit. Then
    ``func`` is called. If it raises ``HorovodInternalError``, a peer has failed: the state goes back to its last
    commit. If it raises ``HostsUpdatedInterrupt``, workers will leave or join: the state stays unchanged. In both cases
    the job begins again, and ``func`` is called again.

    torchrun's agent restarts all workers when one fails or a node joins. The restarted workers find the commits in the
    memory of the host. If no rank failed, or without an agent, the job begins again by ``shutdown`` and ``init`` in the
    same processes. Without an agent, a rank that does not return within the job's timeout ends the others with
    ``TransportError``.
    """

    if not callable(func):
        raise ConfigError(f"elastic.run got {kind_of(func)}; expected a function, whose first argument is a state")

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> T:
        context.refuse_elastic("hvd.elastic.run", _MEMBERS)
        require(state, State, "elastic.run", "a state, such as hvd.elastic.TorchState(model, optimizer)")
        storage = Storage.of_agent(rank())
        state.keeper = storage
        notice = Notice(state)
        found = 0 if storage is None else storage.newest()
        synchronized = False
        try:
            while True:
                try:
                    if not synchronized:
                        _bring_together(state, storage, found)
                    if storage is None:
                        return func(state, *args, **kwargs)
                    with notice.awaited():
                        result = func(state, *args, **kwargs)
                    # A rank that has finished keeps the commits: the others may still need them to continue.
                    ops.barrier()
                    storage.forget()
                    return result
                except (HorovodInternalError, TransportError) as error:
                    _log.warning("rank %d goes back to commit %d: %s", rank(), state.commits, error)
                    state.restore()
                    synchronized = False
                except HostsUpdatedInterrupt as interrupt:
                    _log.warning("rank %d: %s", rank(), interrupt)
                    synchronized = interrupt.skip_sync
                    state.save()
                    if storage is not None:
                        state.keep()
                        _leave(notice)
                if storage is not None:
                    _await_all(notice)
                shutdown()
                init()
                state.on_reset()
        finally:
            state.keeper = None

    return cast(Callable[Concatenate[S, P], T], wrapper)


@dataclass(frozen=True)
class _Findings:
    """The state from which a rank continues.

    Attributes:
        held: number of the commit that its state is at, 0 in a process that has just been started.
        found: number of the newest commit in its storage, for such a process.
        ranks: the ranks that the own parts of that one are from.
        token: the token of its storage.
    """

    held: int
    found: int
    ranks: tuple[int, ...]
    token: str | None


def _bring_together(state: State, storage: Storage | None, found: int) -> None:
    """Give all ranks one state: the newest commit, or the state of rank 0."""
    ranks = () if storage is None else tuple(storage.ranks(found))
    mine = _Findings(state.commits, found, ranks, None if storage is None else storage.token)
    every = allgather_object(mine, name="elastic.findings")
    sharers = [other for other, findings in enumerate(every) if findings.token == mine.token]
    if storage is not None:
        storage.writes_shared = rank() == sharers[0]
    newest = max(max(findings.held, findings.found) for findings in every)
    if any(findings.held != newest for findings in every):
        source = next(other for other, findings in enumerate(every) if newest in (findings.held, findings.found))
        shared = None
        if rank() == source:
            shared = _shared(state, storage, newest)
            _log.warning("training goes on from commit %d, which rank %d has", newest, source)
        shared = broadcast_object(shared, source, name="elastic.shared")
        if state.commits != newest and shared is not None:
            own = []
            if storage is not None and found == newest:
                place = sharers.index(rank())
                own = [storage.own(newest, old) for old in ranks[place :: len(sharers)]]
            state.adopt(shared, own)
        state.commits = newest
    state.sync()


def _shared(state: State, storage: Storage | None, newest: int) -> Any:
    if state.commits != newest and storage is not None:
        return storage.shared(newest)
    parts = state.export()
    return None if parts is None else parts[0]


def _leave(notice: Notice) -> NoReturn:
    """End this process so that its agent starts it again."""
    if not notice.given:
        # Another agent's workers were notified. Ours restarts them if a node joins; if a node only leaves, we have to
        # ask.
        time.sleep(_PATIENCE)
    raise SystemExit(_RESTART)


def _await_all(notice: Notice) -> None:
    """Return when all ranks are here, in the processes that they were; otherwise ask the agent for a restart."""
    if notice.given:
        raise SystemExit(_RESTART)
    place = launch.find_place()
    if place.size == 1:
        return
    try:
        launch.make_store(place, elastic_timeout())
    except TransportError as error:
        _log.warning("rank %d asks for a restart: %s", place.rank, error)
        raise SystemExit(_RESTART) from error
