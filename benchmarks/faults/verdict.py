"""Judges a run: what each rank told after an attack, against what an undisturbed run of the same job gives."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from .job import Outcome

__all__ = ["FAILURES", "GOALS", "Expected", "Verdict", "blamed", "judge"]

FAILURES = {
    "not attacked": "the rank did not come to the point of the attack: the benchmark itself has failed",
    "not ended": "a rank had not ended by itself long after its time",
    "aborted": "a rank that nobody killed died of a signal",
    "silent wrong": "all ranks finished, and none warned, with parameters that differ over ranks or from those of an "
    "undisturbed run",
    "wrong blame": "an error names a rank that did nothing",
    "too late": "an error came later than the timeout and two seconds",
    "no name": "an error does not say which rank it was",
    "no type": "an error names the rank in its text, but has no attribute `ranks`",
    "false alarm": "an error, where training could have gone on",
    "left behind": "files stay in the folder for temporary files",
}
"""What can be wrong with a run, the gravest first."""

GOALS = ("not ended", "aborted", "silent wrong", "wrong blame", "too late", "false alarm")
"""What must not be."""

GRACE = 2.0
"""Seconds that an error may take beyond the timeout."""


CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True)
class Expected:
    """What an attack may lead to.

    Attributes:
        culprits: ranks that errors may name; None: any, as where no rank is to blame.
        lost: ranks of which nothing is expected.
        harmless: training must go on. Otherwise an error is right, and so are the parameters of an undisturbed run.
        slow: ranks whose own error may come late, as they were stopped.
        own: ranks whose own error may say anything, as they have made it themselves.
        compared: texts say how ranks differ, so they may name those that the culprits are compared with.
        any_result: parameters may be any that are equal over ranks.
        files: files may be left behind, as by a process that was killed.
        ends: the ranks of ``own`` do not come to their end; where one does, the attack had no effect.
    """

    culprits: tuple[int, ...] | None
    lost: tuple[int, ...] = ()
    harmless: bool = False
    slow: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    compared: bool = False
    any_result: bool = False
    files: bool = False
    ends: bool = False


@dataclass(frozen=True)
class Verdict:
    """What is to be said of a run.

    Attributes:
        kinds: keys of ``FAILURES``, the gravest first; empty: all is well.
        why: of the gravest, in words.
        seconds: from the attack to the last rank's error; None: no rank raised one.
        ending: what the run came to: "error", "harmless", "warning" (parameters differ, and that was told) or "none".
    """

    kinds: tuple[str, ...]
    why: str
    seconds: float | None
    ending: str

    @property
    def fails(self) -> bool:
        """Whether something happened that must not be."""
        return any(kind in GOALS or kind == "not attacked" for kind in self.kinds)


def judge(
    outcomes: Sequence[Outcome],
    reference: Sequence[str],
    expected: Expected,
    attacked: float,
    timeout: float,
    strayed: Sequence[str] = (),
) -> Verdict:
    """Return the verdict on a run.

    Args:
        outcomes: of all ranks.
        reference: digest of each rank's parameters after an undisturbed run.
        expected: what the attack may lead to.
        attacked: monotonic seconds of the attack; 0: there was none.
        timeout: seconds that ranks may wait for each other.
        strayed: files that were left behind.
    """
    ranks = [rank for rank in range(len(outcomes)) if rank not in expected.lost]
    raised = [rank for rank in ranks if outcomes[rank].kind == "raised"]
    timed = raised if attacked else []
    times = {rank: outcomes[rank].at - attacked for rank in timed if rank not in expected.slow}
    found: dict[str, str] = {}
    if attacked == 0 or (expected.ends and any(outcomes[rank].kind == "finished" for rank in expected.own)):
        found["not attacked"] = "; ".join(outcome.text or outcome.log[-200:] for outcome in outcomes)
    for rank in ranks:
        outcome = outcomes[rank]
        if outcome.status is None:
            told = f"after it had {outcome.kind}" if outcome.kind != "silent" else "and had told nothing"
            found.setdefault("not ended", f"rank {rank} ran on {told} {outcome.text}".strip())
        elif -outcome.status in CRASHES:
            name = signal.Signals(-outcome.status).name
            found.setdefault("aborted", f"rank {rank} died of {name}: {_last_line(outcome.log)}")
    finished = [rank for rank in ranks if outcomes[rank].kind == "finished"]
    right = [outcomes[finished[0]].digest] * len(outcomes) if expected.any_result and finished else reference
    wrong = [rank for rank in finished if outcomes[rank].digest != right[rank]]
    warned = any("differ" in text for rank in ranks for text in outcomes[rank].facts.get("warned", ()))
    if wrong and not raised and not warned and len(finished) == len(ranks):
        parted = len({outcomes[rank].digest for rank in finished}) > len({right[rank] for rank in finished})
        how = "differ over ranks" if parted else "are equal, but not those of an undisturbed run"
        found["silent wrong"] = f"parameters of ranks {wrong} {how}"
    for rank in raised:
        outcome = outcomes[rank]
        described = f"rank {rank}: {outcome.error[0]}: {outcome.text}"
        if times.get(rank, 0.0) > timeout + GRACE:
            found.setdefault("too late", f"after {times[rank]:.1f} s {described}")
        if rank in expected.own:
            continue
        if expected.harmless:
            found.setdefault("false alarm", described)
        elif expected.culprits is not None:
            named = blamed(outcome, rank)
            if not named:
                found.setdefault("no name", described)
            elif outcome.typed is None and expected.compared and set(named) & set(expected.culprits):
                found.setdefault("no type", described)
            elif not set(named) <= set(expected.culprits):
                found.setdefault("wrong blame", f"named {list(named)}, it was {list(expected.culprits)}: {described}")
            elif outcome.typed is None:
                found.setdefault("no type", described)
    if strayed and not expected.files:
        found["left behind"] = ", ".join(strayed)
    kinds = tuple(kind for kind in FAILURES if kind in found)
    ending = "error" if raised else "harmless" if finished and not wrong else "warning" if wrong and warned else "none"
    return Verdict(kinds, found[kinds[0]] if kinds else "", max(times.values(), default=None), ending)


def blamed(outcome: Outcome, rank: int) -> tuple[int, ...]:
    """Return the ranks that an error names: by its attribute, else in its text, but for the rank that is speaking."""
    if outcome.typed is not None:
        return outcome.typed
    singles = re.findall(r"\b[Rr]ank (\d+)", outcome.text)
    lists = [number for found in re.findall(r"\b[Rr]anks \[([\d, ]+)\]", outcome.text) for number in found.split(",")]
    return tuple(sorted({*map(int, singles + lists)} - {rank}))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
