"""All rounds there are: what is done to which job, and what may come of it."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .controller import Run, by_ranks
from .fronts import PLAIN
from .job import Deed, Job, Outcome, Phase
from .ports import Scanner
from .rounds import Round
from .verdict import GRACE, Expected

__all__ = ["ATTACKS", "FRONTS", "Theme", "controls", "kill"]

TRAINERS = ("optimizer:int8", "optimizer:raw", "optimizer:topk?density=0.1", "ddp:int8", "hvd:int8")
"""Fronts with an engine, which has two transports besides the shared one."""

FRONTS = (
    *TRAINERS,
    "backend:int8",
    "backend-calls:int8",
    "hvd-calls:int8",
    "sharded:int8",
    "fsdp:int8",
    "tensor-parallel:int8",
    "functional:int8",
)

COMMON = (
    *(Phase("start"), Phase("grouping"), Phase("joined"), Phase("wrapped"), Phase("forward", 1)),
    *(Phase("backward", 1), Phase("reduced", 1), Phase("stepped", 2)),
)
CONNECTING = (Phase("meeting", 0), Phase("connecting", 0), Phase("connected", 0))


def kills(rounds: int) -> Iterator[Round]:
    """Yield rounds in which a rank is killed, at each point of its life; ``rounds`` of each on each front."""
    turn = 0
    for front in (PLAIN, *FRONTS):
        phases: list[tuple[Phase, str]] = [(phase, "at") for phase in COMMON]
        phases += [(Phase("forward", 1), "after"), (Phase("backward", 2), "after")]
        if front != PLAIN:
            phases += [(phase, "at") for phase in CONNECTING] + [(Phase("connecting", 0), "inside")]
        if front in TRAINERS:
            phases += [(Phase("connecting", 1), "at"), (Phase("connecting", 1), "inside")]
        for _ in range(rounds):
            for phase, how in phases:
                turn += 1
                world = 3 + turn % 2
                yield kill(front, world, turn % world, phase, how, keeper=turn // 2 % 2, width=turn // 4 % 2, turn=turn)


def kill(
    front: str, world: int, victim: int, phase: Phase, how: str, *, keeper: int = 0, width: int = 0, turn: int = 0
) -> Round:
    """Return the round in which ``victim`` is killed ``at`` a point, a moment ``after`` it, or ``inside`` it, while
    another rank keeps all from going on.
    """
    other = (victim + 1) % world
    holds = [(victim, phase)] + ([(other, phase)] if how == "inside" else [])
    delay = random.Random(turn).uniform(0.0, 0.05)

    def do(run: Run) -> None:
        for rank, at in holds:
            run.await_hold(rank, at)
        if how != "at":
            run.release(victim)
            run.pause(0.1 if how == "inside" else delay)
        run.signal(victim, signal.SIGKILL)
        if how == "inside":
            run.release(other)

    steps = 60 if how == "after" else 4  # so that training is not over within the moment
    job = Job(front, world, steps, keeper=_keeper(keeper), width=_width(width), holds=tuple(holds))
    words = {"at": "at", "after": f"{1e3 * delay:.0f} ms after", "inside": "inside"}[how]
    expected = Expected((victim,), (victim,), files=True)
    return Round("kill", f"rank {victim} {words} {phase}", job, expected, do)


def stops(rounds: int) -> Iterator[Round]:
    """Yield rounds in which a rank is stopped: for good, for a second, for too long, or and then killed."""
    turn = 0
    for front in (PLAIN, *FRONTS):
        for _ in range(rounds):
            for how, seconds in (("for good", 0.0), ("for a second", 1.0), ("too long", 9.0), ("then killed", 1.0)):
                turn += 1
                if how != "for good" and front not in (PLAIN, "optimizer:int8", "ddp:int8", "backend:int8", "hvd:int8"):
                    continue
                phase = (Phase("backward", 1), Phase("reduced", 1), Phase("connecting", 0))[turn % 3]
                if front == PLAIN and phase.name == "connecting":
                    phase = Phase("grouping")
                yield _stop(front, 3, turn % 3, phase, how, seconds, keeper=turn % 2)


def _stop(front: str, world: int, victim: int, phase: Phase, how: str, seconds: float, keeper: int) -> Round:
    def do(run: Run) -> None:
        run.await_hold(victim, phase)
        run.signal(victim, signal.SIGSTOP)
        run.release(victim)
        if how != "for good":
            run.pause(seconds)
            run.signal(victim, signal.SIGKILL if how == "then killed" else signal.SIGCONT)

    lost = () if how in ("for a second", "too long") else (victim,)
    expected = Expected((victim,), lost, harmless=how == "for a second", files=True, slow=(victim,))
    limit = LIMIT if front.startswith("hvd") else {}
    job = Job(front, world, keeper=_keeper(keeper), holds=((victim, phase),), environment=limit)
    return Round("stop", f"rank {victim} stopped at {phase} {how}", job, expected, do)


def exits(rounds: int) -> Iterator[Round]:
    """Yield rounds in which a rank ends by itself: exceptions in hooks, sys.exit, SIGTERM, Ctrl-C."""
    ways: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("raises in a hook", "raise", {}),
        ("calls sys.exit in backward", "leave", {}),
        ("gets SIGTERM", "signal", {"number": int(signal.SIGTERM)}),
        ("gets Ctrl-C", "signal", {"number": int(signal.SIGINT)}),
    )
    turn = 0
    for front in (PLAIN, *FRONTS):
        for _ in range(rounds):
            for words, what, options in ways:
                turn += 1
                victim = turn % 3
                job = Job(
                    front, 3, keeper=_keeper(turn % 2), deeds=(Deed(victim, Phase("backward", 1), what, options),)
                )
                lost = (victim,) if words == "gets SIGTERM" else ()
                expected = Expected((victim,), lost, own=(victim,), ends=True)
                yield Round("exit", f"rank {victim} {words}", job, expected, by_ranks)


def forks(rounds: int) -> Iterator[Round]:
    """Yield rounds in which a rank forks in the middle of training, as a data loader does, and the child ends."""
    statuses = {"exit": 0, "_exit": 0, "raise": 1, "kill": -int(signal.SIGKILL)}
    turn = 0
    for front in (PLAIN, *FRONTS):
        for _ in range(rounds):
            for how in statuses:
                turn += 1
                victim, phase = turn % 3, (Phase("forward", 2), Phase("wrapped"), Phase("reduced", 1))[turn % 3]
                deed = Deed(victim, phase, "fork", {"how": how})
                job = Job(front, 3, timeout=10.0, keeper=_keeper(turn // 3 % 2), deeds=(deed,))

                def child(outcomes: list[Outcome], victim: int = victim, how: str = how) -> tuple[str, str] | None:
                    found = outcomes[victim].facts.get("child")
                    if found in (statuses[how], None):
                        return None  # a rank that has told nothing is judged for that
                    return "not ended" if "hung" in str(found) else "aborted", f"the child ({how}) ended with {found}"

                words = f"rank {victim} forks at {phase}; child: {how}"
                yield Round("fork", words, job, Expected((), harmless=True), by_ranks, also=child)


def disks(rounds: int) -> Iterator[Round]:
    """Yield rounds in which files cannot be written: the timeline, and an elastic commit."""
    for number in range(rounds):
        for front in ("optimizer:int8", "ddp:int8", "hvd:int8"):
            for where in ("device", "disk"):
                deeds = tuple(Deed(rank, Phase("start"), "timeline", {"where": where}) for rank in range(3))
                # The disk is full in the middle of the first events.
                job = Job(front, 3, 20, deeds=deeds)
                expected = Expected((), harmless=True, files=True)
                yield Round("disk full", f"timeline on a full {where}", job, expected, by_ranks)
        victim = number % 3
        job = Job("elastic:int8", 3, deeds=(Deed(victim, Phase("forward", 2), "full disk"),))

        def kept(outcomes: list[Outcome], victim: int = victim) -> tuple[str, str] | None:
            outcome = outcomes[victim]
            if "cannot keep a commit" not in outcome.text:
                return "no name", f"the commit failed with {outcome.error[:1]}: {outcome.text}"
            kept_, drafts = outcome.facts.get("kept"), outcome.facts.get("drafts")
            return None if kept_ == 2 and not drafts else ("left behind", f"commit {kept_} is kept, drafts: {drafts}")

        expected = Expected((victim,), own=(victim,), files=True)
        yield Round("disk full", f"elastic commit of rank {victim}", job, expected, by_ranks, also=kept)


def connections(rounds: int) -> Iterator[Round]:
    """Yield rounds in which strangers connect to every port that ranks listen on, from the first moment on."""
    turn = 0
    for front in (PLAIN, *FRONTS):
        for _ in range(rounds):
            for how in ("half-open", "garbage", "scan"):
                turn += 1

                def do(run: Run, how: str = how) -> None:
                    run.attacked = 0.0
                    with Scanner(how) as scanner:
                        while not run.await_ends(list(range(run.job.world)), run.now + 0.01):
                            if scanner.visit(run.pids.values()) and not run.attacked:
                                run.attacked = run.now
                            if run.overdue:
                                return

                # What gloo itself makes of garbage is not ours; but nothing may hang, abort or be wrong.
                expected = Expected(None, harmless=how == "half-open")
                job = Job(front, 3, 60, keeper=_keeper(turn % 2))
                yield Round(how, "to every port", job, expected, do)


def flips(rounds: int) -> Iterator[Round]:
    """Yield rounds in which one bit of one message is another, ``rounds`` for each front and kind of codec."""
    for turn in range(rounds):
        deed = Deed(1, Phase("start"), "flip bucket", {"number": turn % 4, "seed": turn})
        yield Round("bit flip", "in a sum", Job(PLAIN, 2, deeds=(deed,), quick=True), Expected(None), by_ranks)
    for front, codecs in FLIPPED.items():
        for codec in codecs:
            for turn in range(rounds):
                yield flip(f"{front}:{codec}", turn)


FLIPPED = {
    "optimizer": (
        *("raw", "bf16", "int8", "mxfp4", "fp8_block", "thc", "onebit", "zip", "powersgd?rank=2"),
        *("topk?density=0.1", "dgc?density=0.1", "omnireduce", "dynamiq"),
    ),
    "ddp": ("raw", "int8", "topk?density=0.1", "powersgd?rank=2"),
    "backend": ("int8",),
    "hvd": ("raw", "int8"),
    "hvd-calls": ("raw", "int8"),
    "sharded": ("raw", "int8"),
    "fsdp": ("int8", "zip"),
    "tensor-parallel": ("raw", "int8"),
    "functional": ("raw", "int8", "zip"),
    "halves": ("raw", "int8", "zip"),
}


def flip(front: str, turn: int) -> Round:
    """Return the round in which rank 1 receives one bit of one message wrong; each rank is a node of its own."""
    share = random.Random(f"{front} {turn}").random()
    # Ranks of one node do not use a network: they are told that each is a node.
    settings = {"ranks_per_node": 1}
    deed = Deed(1, Phase("start"), "flip", {"at": -1, "seed": 0})
    counting = Job(front, 2, timeout=8.0, settings=settings, deeds=(deed,), quick=True)

    def adapt(job: Job, reference: list[Outcome], attempt: int) -> Job:
        # Runs differ by a few messages, so there may not be as many as in the reference.
        at = int(share * 0.7**attempt * reference[1].facts["messages"])
        return replace(job, deeds=(Deed(1, Phase("start"), "flip", {"at": at, "seed": turn}),))

    what = f"message at {share:.2f} of the run"
    return Round("bit flip", what, counting, Expected(None), by_ranks, reference=counting, adapt=adapt)


def mismatches(rounds: int) -> Iterator[Round]:
    """Yield rounds in which one rank's program is another, and those in which none has a seed."""
    for number in range(rounds):
        odd, keeper = 1 + number % 2, _keeper(number % 2)
        for front in (PLAIN, *FRONTS):
            kind = front.partition(":")[0]
            named = NAMED.get(kind, {})
            shape = Job(front, 3, 8, timeout=8.0, keeper=keeper, settings=CHECKED, environment=named, quick=True)
            if kind in (PLAIN, *PARAMETERS):
                job = replace(shape, habits={"seed": None})
                yield Round("mismatch", "no rank has a seed", job, Expected(None, any_result=True))
            for what, changes, fronts in MISMATCHES:
                if kind in fronts:
                    habits = {"freeze": True} if "unfreeze" in changes else {}
                    job = replace(shape, habits=habits, changes={odd: changes})
                    # The other ranks must say that it was this one; of itself it cannot know.
                    expected = Expected((odd,), own=(odd,), compared=True)
                    yield Round("mismatch", f"rank {odd} {what}", job, expected)


CHECKED = {"check_replicas": 3}
"""Replicas are compared often enough for a job of a few steps."""

LIMIT = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
"""Without it operations by name wait for ranks that are late for ever, by Horovod's contract."""

NAMED = {
    "backend": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    "backend-calls": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    "hvd": LIMIT,
    "hvd-calls": LIMIT,
}
"""What has mismatches named where that is not the default: the level of torch that compares calls, and Horovod's limit
for ranks that wait for each other, without which they wait for ever by contract."""

ENGINES = ("optimizer", "ddp", "hvd")
PARAMETERS = (*ENGINES, "sharded")
"""Fronts that know the parameters. Calls of single tensors, and the backend, cannot know when replicas differ."""

CALLS = ("backend-calls", "functional", "hvd-calls")
DATA = (*ENGINES, "backend", "sharded", *CALLS)
"""Data parallelism by replicas."""

# DDP's constructor compares models by itself; gloo ends a process whose tensors are longer than its peer's.
MISMATCHES: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("has another seed", {"seed": 1}, DATA),
    ("has a layer more", {"extra": 1}, (PLAIN, "optimizer", "hvd", "sharded", "fsdp", *CALLS)),
    ("has a model in bfloat16", {"dtype": "bfloat16"}, (PLAIN, "optimizer", "hvd", "sharded", "fsdp", *CALLS)),
    ("has a model in float64", {"dtype": "float64"}, (PLAIN, "optimizer", *CALLS)),
    ("has another codec", {"codec": "int4"}, tuple(front.partition(":")[0] for front in FRONTS)),
    ("has another option of the codec", {"codec": "int8?group_size=64"}, (*ENGINES, "sharded", "functional")),
    ("sums where others average", {"sum": True}, ("optimizer", "hvd", *CALLS)),
    ("makes calls in another order", {"swap": True}, ("hvd", "functional", "backend-calls")),
    ("skips an update", {"skip": 2}, (PLAIN, *PARAMETERS)),
    ("unfreezes a layer", {"unfreeze": 2}, (PLAIN, *ENGINES)),
)


def links(rounds: int) -> Iterator[Round]:
    """Yield rounds in which a host's link goes down, for a second or for good."""
    turn = 0
    for front in (PLAIN, *FRONTS):
        for _ in range(rounds):
            for how, options in (("flap", {"back": 1.0}), ("link down", {})):
                turn += 1
                victim = turn // 2 % 3
                phase = (Phase("forward", 2), Phase("backward", 1), Phase("connecting", 0))[turn % 3]
                if front == PLAIN and phase.name == "connecting":
                    phase = Phase("joined")
                deed = Deed(victim, phase, "link down", options)
                # A link that comes back needs TCP's next attempt: three seconds after a second without it.
                limit = LIMIT if front.startswith("hvd") else {}
                job = Job(front, 3, timeout=8.0, deeds=(deed,), environment=limit)
                expected = Expected((victim,), harmless=how == "flap", own=(victim,))
                yield Round(how, f"of rank {victim} at {phase}", job, expected, by_ranks, hosts=3)


def controls() -> Iterator[tuple[str, Round]]:
    """Yield rounds that are bad on purpose, and what the judge must say of them: it must be able to."""
    ending = Phase("ending")

    def job(rank: int, phase: Phase, what: str, **options: Any) -> Job:
        return Job(PLAIN, 2, quick=True, deeds=(Deed(rank, phase, what, options),))

    # It has all the time that ranks need to come to their end, and little after the attack.
    hung = replace(job(1, ending, "hang"), patience=3.0)
    yield "not ended", Round("control", "a rank hangs", hung, Expected(None), by_ranks)
    yield "aborted", Round("control", "a rank aborts", job(1, ending, "abort"), Expected(None), by_ranks)
    parted = job(1, ending, "change")
    yield "silent wrong", Round("control", "a rank ends with another bit", parted, Expected(None), by_ranks)
    late = job(0, Phase("stepped", 3), "dawdle", seconds=Job.timeout + GRACE + 0.5)
    yield "too late", Round("control", "the right error comes late", late, Expected((1,)), by_ranks)
    killed = kill(PLAIN, 3, 1, Phase("stepped", 3), "at")
    innocent = Deed(0, Phase("stepped", 3), "blame", {"ranks": [2]})
    blamed = replace(killed, job=replace(killed.job, deeds=(innocent,)), attack="control", what="an error names rank 2")
    yield "wrong blame", blamed
    raised = Expected((), harmless=True)
    yield "false alarm", Round("control", "an error for nothing", job(0, ending, "raise"), raised, by_ranks)


def _keeper(number: int) -> str:
    return ("rank 0", "agent")[number]


def _width(number: int) -> int:
    return (40, 600)[number]


@dataclass(frozen=True)
class Theme:
    """A group of attacks.

    Attributes:
        make: yields its rounds, so many of each.
        rounds: how many of each the whole run has; the smoke run has one.
        few: how many rounds of the theme the smoke run takes, spread over all of them.
    """

    make: Callable[[int], Iterator[Round]]
    rounds: int
    few: int


ATTACKS = {
    "kills": Theme(kills, 1, 6),
    "stops": Theme(stops, 1, 2),
    "exits": Theme(exits, 1, 2),
    "forks": Theme(forks, 1, 2),
    "disks": Theme(disks, 2, 2),
    "connections": Theme(connections, 1, 2),
    "flips": Theme(flips, 30, 3),
    "mismatches": Theme(mismatches, 1, 4),
    "links": Theme(links, 1, 0),
}
