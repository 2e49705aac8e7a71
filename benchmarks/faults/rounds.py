"""A round: a job, what is done to it, and what may come of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .controller import Attack, Field, NotReached, nothing
from .fronts import PLAIN
from .job import Job, Outcome
from .verdict import Expected, Verdict, judge

__all__ = ["Round", "Rounds"]


ATTEMPTS = 3
"""Of an undisturbed job, since a busy machine may let it wait too long, and of an attack that was missed."""


@dataclass(frozen=True)
class Round:
    """One attack on one job.

    Attributes:
        attack: the kind of attack, a row of the table.
        what: was done, to whom and when.
        job: that it is done to.
        expected: what may come of it.
        do: what the controller does; None: the ranks do it, or the job itself is the attack.
        reference: the job whose parameters are right; None: the same, undisturbed.
        adapt: what makes the job of it when the outcomes of the reference are known; called again, with the number of
            the attempt, where the attack was not made.
        hosts: 0: this machine; else hosts of a lab, with as many links.
        also: a further check of the outcomes: what is wrong, and why.
    """

    attack: str
    what: str
    job: Job
    expected: Expected
    do: Attack = nothing
    reference: Job | None = None
    adapt: Callable[[Job, list[Outcome], int], Job] | None = None
    hosts: int = 0
    also: Callable[[list[Outcome]], tuple[str, str] | None] | None = None

    @property
    def plain(self) -> bool:
        """Whether this is torch's own DDP."""
        return self.job.front == PLAIN


class Rounds:
    """Runs rounds on a field, and knows the parameters of undisturbed jobs.

    Args:
        field: where they run.
        references: outcomes of undisturbed jobs; shared by fields.
    """

    def __init__(self, field: Field, references: dict[str, list[Outcome]]) -> None:
        self._field = field
        self._references = references

    def play(self, round_: Round) -> tuple[Verdict, dict[str, Any]]:
        """Return the verdict on a round and its row of the result; it has what ranks told where something is wrong."""
        job, error = round_.job, ""
        reference: list[str] = []
        try:
            known = self._reference(round_.reference or job.undisturbed)
            reference = [outcome.digest for outcome in known]
            for attempt in range(ATTEMPTS):
                job = round_.adapt(job, known, attempt) if round_.adapt else job
                run = self._field.run(job, round_.do, lost=round_.expected.lost)
                if run.attacked or not round_.adapt:
                    break
            outcomes, attacked, strayed = run.outcomes, run.attacked, run.strayed
        except NotReached as reason:
            outcomes, attacked, strayed, error = [], 0.0, [], str(reason)
        if error:
            verdict = Verdict(("not attacked",), error, None, "none")
        else:
            verdict = judge(outcomes, reference, round_.expected, attacked, job.timeout, strayed)
            if round_.also is not None and (more := round_.also(outcomes)):
                kinds = (more[0], *(kind for kind in verdict.kinds if kind != more[0]))
                verdict = Verdict(kinds, more[1], verdict.seconds, verdict.ending)
        return verdict, {
            "attack": round_.attack,
            "ours": not round_.plain,
            "what": round_.what,
            "front": job.front,
            "world": job.world,
            "keeper": job.keeper,
            "width": job.width,
            "verdict": list(verdict.kinds) or ["ok"],
            "why": verdict.why,
            "ending": verdict.ending,
            "seconds": None if verdict.seconds is None else round(verdict.seconds, 3),
            "ranks": [_told(outcome, attacked) for outcome in outcomes if verdict.kinds],
        }

    def _reference(self, job: Job) -> list[Outcome]:
        key = repr(job)
        if key not in self._references:
            for _ in range(ATTEMPTS):
                outcomes = self._field.run(job).outcomes
                failed = [rank for rank, outcome in enumerate(outcomes) if outcome.kind != "finished" or outcome.status]
                if not failed:
                    break
            else:
                first = outcomes[failed[0]]
                where = f"{job.front} on {job.world} ranks fails without an attack, on rank {failed[0]}"
                raise NotReached(f"{where}: {first.text or first.log}")
            self._references[key] = outcomes
        return self._references[key]


def _told(outcome: Outcome, attacked: float) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": outcome.kind, "status": outcome.status}
    if outcome.kind == "raised":
        told |= {"error": outcome.error[0], "ranks": outcome.typed, "text": outcome.text}
        told["seconds"] = round(outcome.at - attacked, 3)
    if outcome.facts:
        told["facts"] = outcome.facts
    return told
