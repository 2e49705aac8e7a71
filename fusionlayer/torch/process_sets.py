"""Process sets: sets of ranks that run operations without the other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..base.errors import ConfigError, FusionLayerError, require
from ..coordination.requests import ALL_RANKS
from ..transport import Transport
from .basics import HorovodInternalError, rank, session, size


class ProcessSet:
    """A set of ranks. Give it to ``init`` or ``add_process_set`` first, then to operations.

    Args:
        ranks: ranks of the job, in any order.

    Attributes:
        process_set_id: number of the set; None before it is added and after it is removed.
        ranks: in ascending order.
    """

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise ConfigError(f"ProcessSet({ranks!r}); expected ranks, such as [0, 2]; communicators are not supported")
        given = list(ranks)
        if any(not isinstance(each, int) for each in given):
            raise ConfigError(f"ProcessSet({given!r}); expected whole numbers")
        self.ranks: list[int] | None = sorted(given)

    def size(self) -> int | None:
        """Return the number of ranks, or None before the set is added."""
        return None if self.process_set_id is None else len(self._members())

    def rank(self) -> int | None:
        """Return this process's place in the set, or None before the set is added."""
        if self.process_set_id is None:
            return None
        members = self._members()
        if rank() not in members:
            raise ConfigError(f"rank {rank()} is not in {self}; ask included() first")
        return members.index(rank())

    def included(self) -> bool | None:
        """Return whether this process is in the set."""
        return None if self.ranks is None else rank() in self._members()

    def _members(self) -> list[int]:
        return self.ranks or []

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _AllRanks(ProcessSet):
    """The set of all ranks of the present job."""

    process_set_id = ALL_RANKS

    def __init__(self) -> None:
        super().__init__(())

    def _members(self) -> list[int]:
        return list(range(size()))

    def __str__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _AllRanks()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a set and return it. All ranks of the job add the same sets in the same order.

    Raises:
        ConfigError: there is a set of these ranks already, or they are not ranks of the job.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    here = session()
    ranks = tuple(added.ranks or ())
    if not ranks or len(set(ranks)) != len(ranks) or not 0 <= ranks[0] <= ranks[-1] < here.size:
        raise ConfigError(f"{added}; expected different ranks from 0 to {here.size - 1}")
    if any(members.ranks == ranks for members in here.process_sets.values()):
        raise ConfigError(f"there is a process set of the ranks {list(ranks)} already; use that one")
    try:
        number: int = here.wait(here.submit("add_process_set", ranks=ranks))
    except FusionLayerError as error:
        raise HorovodInternalError.of(error) from None
    added.process_set_id = number
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set, on all ranks of the job. Return False for a set that was not added, and for the set of all
    ranks."""
    require(process_set, ProcessSet, "remove_process_set", "what add_process_set() has returned")
    number = process_set.process_set_id
    here = session()
    if number is None or number == ALL_RANKS or number not in here.process_sets:
        return False
    process_set.process_set_id = None
    try:
        here.wait(here.submit("remove_process_set", root=number))
    except FusionLayerError as error:
        raise HorovodInternalError.of(error) from None
    return True


def number_of(process_set: Any) -> int:
    """Return the number of a set."""
    number: int | None = getattr(process_set, "process_set_id", None)
    if not isinstance(process_set, ProcessSet) or number is None:
        raise ConfigError(f"process_set={process_set}; give it to add_process_set() or init() first")
    return number


def transport_of(process_set: ProcessSet) -> Transport | None:
    """Return the transport over a set's ranks, or None if this process is not in it. Duplicate it before use."""
    return session().process_sets[number_of(process_set)].transport
