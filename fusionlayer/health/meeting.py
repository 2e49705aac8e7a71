"""How ranks wait for each other when they meet through a store, and find missing ones."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..process.bounded import bounded
from ..process.processes import Identity
from .judge import verdict
from .processes import Processes
from .state import Finding
from .store import StatusKeys

# Seconds until a waiting rank checks which ranks have come, and whether one has failed; and the longest interval of
# these checks.
_FIRST_LOOK, _LAST_LOOK = 0.1, 1.0
# Seconds after the deadline until which the store may answer.
_PATIENCE = 1.0


def await_all(
    keys: StatusKeys,
    others: Callable[[], StatusKeys],
    processes: Processes,
    deadline: float,
    hint: str,
    explain: Callable[[list[int], bool], Finding | None] = lambda missing, is_late: None,
) -> Finding | None:
    """Return None when all ranks have arrived, or why they cannot meet. ``processes`` has them all then.

    The store's server ends the wait, so its number of requests does not depend on the number of ranks. Only a rank that
    waits long checks the others, at growing intervals, and reads each of them once. The first rank to find the cause
    writes it, and lets the others continue to read it.

    Args:
        keys: the keys of the ranks that meet, at which this rank has arrived. Its client waits, so no one else may need
            it.
        others: returns the same keys with another client, for checks.
        processes: theirs, which it completes.
        deadline: moment on the monotonic clock until which they have to come.
        hint: a remedy to add to the error about ranks that have not arrived.
        explain: returns what this process knows of missing ranks, maybe because of a failure elsewhere; its second
            argument is whether the deadline has passed.
    """
    if keys.others:
        look = _Look(others, processes, deadline, hint, explain)
        until = deadline + _PATIENCE
        bounded(lambda: keys.wait_for_all(max(until - time.monotonic(), 0.001)), until, look, "wait for ranks")
    finding = keys.cause()
    if finding is None and len(processes.of) < keys.size:
        finding = _learn_all(keys, processes)
    return finding


def _learn_all(keys: StatusKeys, processes: Processes) -> Finding | None:
    """Complete ``processes`` once all have come; return missing ranks if others have come twice."""
    states = keys.arrivals(0)
    processes.of.update({state.rank: state.process for state in states if state and state.rank != keys.rank})
    missing = [rank for rank in keys.others if rank not in processes.of]
    if missing and None not in states:
        ranks = [state.rank for state in states if state]
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        return Finding("missing", tuple(missing), f"ranks {missing} did not come, and ranks {twice} came twice")
    if missing:
        keys.complain("what a rank has written about itself")
        processes.of.update(dict.fromkeys(missing, Identity.unknown()))
    return None


class _Look:
    """Looks, from time to time, which ranks have come and whether one has failed; arguments as for ``await_all``."""

    def __init__(
        self,
        keys: Callable[[], StatusKeys],
        processes: Processes,
        deadline: float,
        hint: str,
        explain: Callable[[list[int], bool], Finding | None],
    ) -> None:
        self._keys, self._processes = keys, processes
        self._deadline, self._hint, self._explain = deadline, hint, explain
        self._come: set[int] = set()
        self._seen = 0
        self._pause = _FIRST_LOOK
        self._next = min(time.monotonic() + _FIRST_LOOK, deadline)

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        is_late = now > self._deadline
        self._pause = min(2 * self._pause, _LAST_LOOK)
        self._next = now + self._pause if is_late else min(now + self._pause, self._deadline + 0.001)
        keys = self._keys()
        finding = self._find(keys, is_late)
        if finding is not None:
            keys.settle(finding)
            keys.go_on()

    def _find(self, keys: StatusKeys, is_late: bool) -> Finding | None:
        states = keys.arrivals(self._seen)
        self._seen += len(states)
        for state in states:
            if state is not None and state.rank != keys.rank:
                self._come.add(state.rank)
                self._processes.of[state.rank] = state.process
        missing = [rank for rank in keys.others if rank not in self._come]
        if is_late:  # a rank may have written a state, and not have got so far as to be counted
            missing = [rank for rank in missing if not keys.have_come([rank])]
        found = keys.cause() or (self._explain(missing, is_late) if missing else None)
        # A rank that is known from an earlier meeting is stopped or gone: others may be missing because of it.
        if found is None and (self._processes.see_gone() or is_late):
            found = verdict(self._processes.seen(), None)
        if found is None and missing and is_late:
            found = Finding("missing", tuple(missing), f"ranks {missing} did not come within {self._hint}")
        return found
