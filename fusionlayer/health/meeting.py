"""How ranks wait for each other when they meet through a store, and find out which of them do not come."""

from __future__ import annotations

import time
from collections.abc import Callable

from .judge import verdict
from .processes import Processes
from .state import Finding
from .store import StatusKeys

__all__ = ["await_all"]

_POLL = 0.01
# Seconds between two looks at which ranks have come, and whether one has failed.
_NEWS_POLL = 0.1


def await_all(
    keys: StatusKeys,
    processes: Processes,
    deadline: float,
    hint: str,
    explain: Callable[[list[int], bool], Finding | None] = lambda missing, is_late: None,
) -> Finding | None:
    """Return None when all ranks have written a state, or why they cannot meet. ``processes`` has them all then.

    Args:
        keys: of the ranks that meet; this rank has written its state.
        processes: theirs, which it completes.
        deadline: moment on the monotonic clock until which they have to come.
        hint: what to say besides of ranks that have not come by then.
        explain: returns what this process knows itself of ranks that are missing, maybe because of a failure elsewhere;
            its second argument says whether the deadline is over.
    """
    missing, next_look = keys.others, 0.0
    while missing and not keys.have_come(missing):
        now = time.monotonic()
        is_late = now > deadline
        if now >= next_look or is_late:
            next_look = now + _NEWS_POLL
            come = [rank for rank in missing if keys.have_come([rank])]
            _learn(keys, processes, come)
            missing = [rank for rank in missing if rank not in come]
            found = keys.cause() or (explain(missing, is_late) if missing else None)
            # A rank that is known from an earlier meeting is stopped or gone: others may be missing because of it.
            if found is None and (processes.see_gone() or (missing and is_late)):
                found = verdict(processes.seen(), None)
            if found is None and missing and is_late:
                found = Finding("missing", tuple(missing), f"ranks {missing} did not come within {hint}")
            if found is not None:
                return found
        time.sleep(_POLL)
    _learn(keys, processes, missing)
    return keys.cause()


def _learn(keys: StatusKeys, processes: Processes, ranks: list[int]) -> None:
    for rank, state in keys.read_all(ranks).items():
        processes.of[rank] = state.process
