"""What the ranks of one job do, and what each of them tells at its end: the words between controller and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["Deed", "Job", "Outcome", "Phase"]

CALM_TIMEOUT = 20.0
"""Seconds that ranks of a job that nothing is done to may wait for each other, as they do on a busy machine."""


@dataclass(frozen=True)
class Phase:
    """A point in the life of a rank: a name, and which of the points of this name.

    In order: ``start``; ``grouping`` (before torch's process group is made); ``joined``; ``meeting``, ``connecting``
    and ``connected`` (a transport of fusionlayer, counted from 0); ``wrapped``; for each step ``forward``,
    ``backward`` (in the middle of it), ``reduced`` (backward is over) and ``stepped``; ``ending``.
    """

    name: str
    number: int = 0

    def __str__(self) -> str:
        return (
            f"{self.name} {self.number}"
            if self.name not in ("start", "grouping", "joined", "wrapped", "ending")
            else self.name
        )


@dataclass(frozen=True)
class Deed:
    """Something that a rank does to itself at a point of its life: ``what`` is a name of ``deeds.DEEDS``."""

    rank: int
    phase: Phase
    what: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Some training steps of a small model.

    Attributes:
        front: name of ``fronts.FRONTS``, and the codec behind a colon where the front has one.
        world: number of ranks.
        steps: training steps.
        width: of the model's hidden layer.
        timeout: seconds that a call may wait for other ranks.
        keeper: who keeps the store: "rank 0", or "agent", which outlives all ranks, as torchrun's agent does.
        habits: what all ranks do otherwise than ``front.Habits`` says.
        changes: what single ranks do otherwise, by rank.
        holds: points at which a rank waits until the controller lets it go on.
        deeds: what ranks do to themselves.
        environment: variables for all ranks.
        quick: ranks leave out the interpreter's own end, which takes most of a short job's time: for attacks that have
            nothing to do with how processes end.
        patience: seconds that ranks get to end by themselves after an attack; None: several times what they should
            need, since it is worth knowing how late an error comes.
        settings: of fusionlayer, for the file that ``FUSIONLAYER_CONFIG`` names; those that it does not know are left
            out.
    """

    front: str
    world: int
    steps: int = 4
    width: int = 40
    timeout: float = 4.0
    keeper: str = "rank 0"
    habits: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    holds: tuple[tuple[int, Phase], ...] = ()
    deeds: tuple[Deed, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False
    patience: float | None = None

    @property
    def deadline(self) -> float:
        """Seconds that ranks get to end by themselves."""
        return 3 * self.timeout + 10 if self.patience is None else self.patience

    @property
    def undisturbed(self) -> Job:
        """The same job without anything that is done to it; what it trains does not depend on its start and end."""
        calm = replace(self, holds=(), deeds=(), changes={}, environment={}, keeper="rank 0", quick=True)
        return replace(calm, timeout=max(self.timeout, CALM_TIMEOUT), patience=None)


@dataclass
class Outcome:
    """What became of a rank.

    Attributes:
        kind: "raised", "finished", or "silent": it has told neither.
        at: monotonic seconds when it told.
        error: type names of the exception and its bases, from the outermost cause that has ranks.
        typed: ranks that the exception names in its attribute ``ranks``.
        text: message of the exception.
        trace: its traceback.
        digest: of the final parameters.
        facts: whatever else the rank noted: name -> value.
        status: as of ``os.waitstatus_to_exitcode``; None: the process has not ended by itself.
        ended: monotonic seconds of its end.
        log: the end of what it wrote to stdout and stderr.
    """

    kind: str = "silent"
    at: float = 0.0
    error: tuple[str, ...] = ()
    typed: tuple[int, ...] | None = None
    text: str = ""
    trace: str = ""
    digest: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    status: int | None = None
    ended: float = 0.0
    log: str = ""
