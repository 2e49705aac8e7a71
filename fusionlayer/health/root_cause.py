"""The first cause of a failure, as the transports of one process tell it to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..process.processes import Identity
from .evidence import Diagnosis

__all__ = ["Cause"]


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a transport of this process has failed.

    When it has, the program soon leaves the other transports too. Their peers must learn the same culprit, though it
    may have another number there. So a culprit is a process here.

    Attributes:
        text: the reason, as a clause that names the ranks that are to blame.
        culprits: their processes.
    """

    text: str
    culprits: tuple[Identity, ...]

    @classmethod
    def of(cls, finding: Diagnosis, identities: Mapping[int, Identity]) -> Cause:
        """Return what a transport has found out. ``identities``: the processes of its ranks."""
        return cls(finding.text, tuple(identities[rank] for rank in finding.ranks))

    def among(self, identities: Mapping[int, Identity]) -> Diagnosis | None:
        """Return the finding for a transport over these processes; None if no culprit is one of them."""
        ranks = tuple(sorted(rank for rank, identity in identities.items() if identity in self.culprits))
        return Diagnosis(ranks, self.text, True) if ranks else None
