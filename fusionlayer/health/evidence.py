"""Evidence against the ranks that a call waits for, and the judgement of which of them is to blame."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from .calls import Call

__all__ = ["EVIDENT", "Diagnosis", "Evidence", "judge", "lost_store"]

# What can be wrong with a rank, and whether that is final. Earlier kinds are blamed first, because a later kind may be
# the consequence of an earlier one. What a rank tells comes first: it left after it had found that out.
_KINDS = {
    "told": True,  # the rank has failed, and says which ranks are to blame
    "gone": True,
    "conflict": True,
    "stopped": False,
    "left": True,
    "silent": False,
    "late": False,
    "failed": True,  # the rank has failed, and does not know why
}

# With one of these the cause is certain, so there is no need to wait for the answers of other ranks.
EVIDENT = ("told", "gone", "conflict", "stopped")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a call does not end.

    Attributes:
        ranks: the ranks that are to blame; empty if there is no evidence against any.
        text: the reason, as a clause that names them.
        final: whether waiting longer is useless.
    """

    ranks: tuple[int, ...]
    text: str
    final: bool


@dataclass(frozen=True, slots=True)
class Evidence:
    """A piece of evidence about one rank.

    Attributes:
        rank: that rank.
        kind: a key of ``_KINDS``, or "alike": the rank makes the same call as this one, so nothing speaks against it.
        text: the evidence, as a clause.
        ranks: those that the rank names, or that differ.
        call: the call of a rank that differs from this one; of one that has failed, the call if it is this rank's too.
    """

    rank: int
    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    call: Call | None = None


def judge(signs: Iterable[Evidence], call: Call | None) -> Diagnosis | None:
    """Return the diagnosis that follows from the signs, or None if there are none."""
    signs = list(signs)
    if call is not None and call.partner is not None:
        signs = [sign for sign in signs if sign.rank == call.partner] or signs
    for kind, final in _KINDS.items():
        found = [sign for sign in signs if sign.kind == kind]
        if found and kind == "told":
            return Diagnosis(found[0].ranks, found[0].text, final)
        if found and kind == "conflict":
            some_are_alike = any(sign.kind == "alike" or (sign.kind == "failed" and sign.call) for sign in signs)
            return Diagnosis(_odd(found, some_are_alike), found[0].text, final)
        if found:
            return Diagnosis(tuple(sign.rank for sign in found), "; ".join(sign.text for sign in found), final)
    return None


def _odd(conflicts: list[Evidence], some_are_alike: bool) -> tuple[int, ...]:
    """Return the one rank that differs from all others, if it is one; else the two that were compared first."""
    first = conflicts[0]
    if len(conflicts) == 1:
        return (first.rank,) if some_are_alike else first.ranks
    agree = all(
        first.call and each.call and not first.call.conflict(first.rank, each.call, each.rank) for each in conflicts
    )
    return tuple(rank for rank in first.ranks if rank != first.rank) if agree and not some_are_alike else first.ranks


def lost_store(store: dist.Store, store_rank: int | None) -> Diagnosis:
    """Return the diagnosis for a store that does not answer. ``store_rank``: the rank that keeps it, if one does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return Diagnosis((), f"the {type(store).__name__} by which the ranks met does not answer", False)
    place = f"the store at {store.host}:{store.port}"
    if store_rank is None:
        return Diagnosis((), f"{place}, kept by the launcher, does not answer", False)
    return Diagnosis((store_rank,), f"{place}, kept by rank {store_rank}, does not answer", False)
