"""An event model of one training step: a thread that computes, lanes that communicate, and their cores and links.

All functions are pure and take plain numbers. ``docs/simulation.md`` has the assumptions.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .collective_phases import Phase


@dataclass(frozen=True)
class Compute:
    """Seconds of a step's computing without communication, with all threads of the rank running.

    Attributes:
        forward: the seconds of the forward pass.
        backward: the seconds of the backward pass.
        optimizer: of the update, spread over buckets by their elements.
    """

    forward: float
    backward: float
    optimizer: float


@dataclass(frozen=True)
class Resources:
    """The cores and threads of a rank.

    Attributes:
        cores: the cores that its threads share. Infinite: each thread has its own core, and the costs' ``disturbance``
            stands for their mutual delays. With shared cores the simulation computes that itself.
        threads: the threads that it computes with.
        lanes: communication threads, which take the buckets in turn.
        overlap_forward: forward waits for a bucket, and its parameters are updated, when it first needs them; otherwise
            the update waits for all buckets.
    """

    cores: float = math.inf
    threads: int = 1
    lanes: int = 1
    overlap_forward: bool = False


OWN_CORES = Resources()
"""The machine that planners assume: one lane, and a core for each thread."""


@dataclass(frozen=True)
class Load:
    """A bucket, as the simulation sees it.

    Attributes:
        ready: seconds of backward after which its last gradient has arrived.
        used: seconds of forward after which its first parameter is needed.
        elements: the elements of the bucket; the optimizer's time is shared out by them.
        phases: its lane's work for it.
        disturbance: seconds by which the bucket delays the rest of backward, once its last gradient has arrived.
    """

    ready: float
    used: float
    elements: float
    phases: Sequence[Phase]
    disturbance: float = 0.0


@dataclass(frozen=True)
class SimulatedSpan:
    """When a bucket is sent, in seconds after the start of backward.

    Attributes:
        ready: its last gradient has arrived.
        start: its lane takes it.
        end: its results have arrived.
        idle: seconds for which its lane had nothing to do before it; 0 for a lane's first bucket. SAFusion calls it W
            (section 3.3).
    """

    ready: float
    start: float
    end: float
    idle: float


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step.

    Attributes:
        seconds: from the start of backward to the start of the next.
        alone: of the same step without communication; equal for all plans of one codec.
        communication: the seconds of all phases, if each had cores and link for itself.
        sent: bytes that leave a host over its link.
        spans: the spans of the buckets, in sending order.
    """

    seconds: float
    alone: float
    communication: float
    sent: float
    spans: tuple[SimulatedSpan, ...]

    @property
    def waiting(self) -> float:
        """Seconds by which communication lengthens the step: because it is exposed or disturbs computing."""
        return self.seconds - self.alone

    @property
    def idle(self) -> float:
        """Seconds for which lanes waited between buckets."""
        return sum(span.idle for span in self.spans)

    @property
    def score(self) -> tuple[float, float]:
        """The score of a plan, compared with other plans of the same tensors; a smaller one is better.

        First come the seconds of the step, to the nanosecond, then the seconds for which buckets keep their lanes busy.
        """
        return (round(self.seconds, 9), sum(span.end - span.start for span in self.spans))


class _SimulatedWork(NamedTuple):
    """Work for ``seconds``, if the thread gets the ``cores`` and the ``share`` of the ``link`` that it wants."""

    seconds: float
    cores: float
    link: str | None = None
    share: float = 1.0


class _Signal(NamedTuple):
    """Makes an event happen; an event is (name, bucket)."""

    event: tuple[str, int]


class _Wait(NamedTuple):
    """Lasts until an event has happened."""

    event: tuple[str, int]


_Action = _SimulatedWork | _Signal | _Wait
_IDLE = _SimulatedWork(0.0, 0.0)


class _SimulatedThread:
    """A thread and its remaining actions; it may stand for several ``threads`` of the system that work alike."""

    def __init__(self, actions: Iterable[_Action], threads: int = 1) -> None:
        self._actions = deque(actions)
        self._left = 0.0
        self.threads = threads
        self.work = _IDLE

    @property
    def ended(self) -> bool:
        """Whether the thread has done all its actions."""
        return self.work is _IDLE and not self._actions

    def settle(self, events: dict[tuple[str, int], float], now: float) -> bool:
        """Do the actions that take no time, up to the next work or wait; return whether there were any."""
        done = False
        while self.work is _IDLE and self._actions:
            action = self._actions[0]
            if isinstance(action, _Wait) and action.event not in events:
                break
            if isinstance(action, _Signal):
                events[action.event] = now
            elif isinstance(action, _SimulatedWork) and action.seconds > 0:
                self.work, self._left = action, action.seconds
            self._actions.popleft()
            done = True
        return done

    def time_left(self, speed: float) -> float:
        """Return seconds until the present work is done; ``speed`` is the share of its full speed."""
        return self._left / speed

    def advance(self, speed: float, seconds: float) -> None:
        """Work for this long."""
        if seconds >= self.time_left(speed):
            self.work = _IDLE
        else:
            self._left -= seconds * speed


def run_step(
    compute: Compute,
    loads: Sequence[Load],
    resources: Resources = OWN_CORES,
) -> SimulatedStep:
    """Return the simulated step; the buckets ``loads`` are sent in the given order.

    The computing thread goes through backward, update and forward. A bucket can be sent when its gradients and those of
    all earlier buckets are complete. The lanes take buckets in turn; each sends one after the other. Transfers that use
    a link at once get fair shares of it. Threads that want more cores than the rank has get fair shares of them. All
    buckets have arrived when the next backward begins, so all steps are alike.
    """
    cores, threads, lanes = resources.cores, resources.threads, resources.lanes
    computing = _SimulatedThread(_computation(compute, loads, resources.overlap_forward), threads)
    events, now = _simulate(computing, [_lane(loads, lane, lanes) for lane in range(lanes)], cores)
    phases = [phase for load in loads for phase in load.phases]
    return SimulatedStep(
        now,
        (compute.forward + compute.backward + compute.optimizer) * max(1.0, threads / cores),
        sum(phase.seconds for phase in phases),
        sum(phase.sent for phase in phases),
        tuple(_spans(events, len(loads), lanes)),
    )


def run_local_steps(
    compute: Compute,
    loads: Sequence[Load],
    leaving: Sequence[Sequence[int]],
    resources: Resources = OWN_CORES,
    *,
    delay: int = 0,
) -> SimulatedStep:
    """Return the mean step of a period of local steps, in which each bucket is sent once or more; it has no spans.

    The computing thread takes whole steps without waiting. At the end of a step it makes that step's buckets ready,
    which takes ``ready`` seconds each. It waits for their results at the end of the step ``delay`` steps later, so they
    are sent while those steps compute. The last of some equal periods counts, but no step is shorter than the
    work of a lane or of a link: queues of buckets may take long to reach their final length.
    """
    cores, threads, lanes = resources.cores, resources.threads, resources.lanes
    periods = 2 + 2 * -(-delay // len(leaving))
    sends: list[list[_Action]] = [[] for _ in range(lanes)]
    computing: list[_Action] = []
    sent: list[range] = []  # by step: numbers of what was sent, of all periods
    total = 0
    for step in range(periods * len(leaving)):
        due = leaving[step % len(leaving)]
        computing.append(_SimulatedWork(compute.forward + compute.backward + compute.optimizer, 1.0))
        sent.append(range(total, total + len(due)))
        for place, (number, index) in enumerate(zip(sent[-1], due, strict=True)):
            computing += [_SimulatedWork(loads[index].ready, 1.0), _Signal(("ready", number))]
            computing.append(_SimulatedWork(loads[index].disturbance, 1.0))
            sends[place % lanes] += [_Wait(("ready", number)), *_travel(loads[index], number)]
        total += len(due)
        if step >= delay:
            computing += [_Wait(("arrived", number)) for number in sent[step - delay]]
        if (step + 1) % len(leaving) == 0:
            computing.append(_Signal(("period", step // len(leaving))))
    events, end = _simulate(_SimulatedThread(computing, threads), sends, cores)
    phases = [(place, phase) for due in leaving for place, i in enumerate(due) for phase in loads[i].phases]
    busy: defaultdict[int | str, float] = defaultdict(float)
    for place, phase in phases:
        busy[place % lanes] += phase.seconds
        if phase.link is not None:
            busy[phase.link] += phase.seconds * phase.share
    return SimulatedStep(
        max(end - events["period", periods - 2], *busy.values(), 0.0) / len(leaving),
        (compute.forward + compute.backward + compute.optimizer) * max(1.0, threads / cores),
        sum(phase.seconds for _, phase in phases) / len(leaving),
        sum(phase.sent for _, phase in phases) / len(leaving),
        (),
    )


def _simulate(
    computing: _SimulatedThread, lanes: Sequence[Iterable[_Action]], cores: float
) -> tuple[dict[tuple[str, int], float], float]:
    """Return when events happened, and when the computing thread has done all its work."""
    every = [computing, *map(_SimulatedThread, lanes)]
    events: dict[tuple[str, int], float] = {}
    now = 0.0
    while True:
        while any([thread.settle(events, now) for thread in every]):
            pass
        if computing.ended:
            return events, now
        busy = [thread for thread in every if thread.work is not _IDLE]
        speeds = _speeds(busy, cores)
        seconds = min(thread.time_left(speed) for thread, speed in zip(busy, speeds, strict=True))
        for thread, speed in zip(busy, speeds, strict=True):
            thread.advance(speed, seconds)
        now += seconds


def _spans(events: Mapping[tuple[str, int], float], buckets: int, lanes: int) -> Iterator[SimulatedSpan]:
    for i in range(buckets):
        start = events["started", i]
        free = events["arrived", i - lanes] if i >= lanes else start
        yield SimulatedSpan(events["ready", i], start, events["arrived", i], start - free)


def _computation(compute: Compute, loads: Sequence[Load], overlap_forward: bool) -> Iterator[_Action]:
    """Yield backward, update and forward. A ``ready`` or ``used`` beyond the end of its pass counts as the end."""
    done = disturbed = 0.0
    for i in sorted(range(len(loads)), key=lambda i: loads[i].ready):
        until = min(loads[i].ready, compute.backward)
        # The disturbance of the last bucket does not count: backward has nothing left that it could delay.
        yield _SimulatedWork(disturbed, 1.0)
        yield _SimulatedWork(until - done, 1.0)
        yield _Signal(("ready", i))
        done, disturbed = max(done, until), loads[i].disturbance
    yield _SimulatedWork(compute.backward - done, 1.0)

    total = sum(load.elements for load in loads)
    done = 0.0
    if overlap_forward and total:
        for i in sorted(range(len(loads)), key=lambda i: loads[i].used):
            until = min(loads[i].used, compute.forward)
            yield _SimulatedWork(until - done, 1.0)
            yield _Wait(("arrived", i))
            yield _SimulatedWork(compute.optimizer * loads[i].elements / total, 1.0)
            done = max(done, until)
    else:
        yield from (_Wait(("arrived", i)) for i in range(len(loads)))
        yield _SimulatedWork(compute.optimizer, 1.0)
    yield _SimulatedWork(compute.forward - done, 1.0)


def _lane(loads: Sequence[Load], lane: int, lanes: int) -> Iterator[_Action]:
    for i in range(lane, len(loads), lanes):
        yield from (_Wait(("ready", before)) for before in range(max(0, i - lanes + 1), i + 1))
        yield from _travel(loads[i], i)


def _travel(load: Load, number: int) -> Iterator[_Action]:
    yield _Signal(("started", number))
    for phase in load.phases:
        if phase.seconds > 0:
            yield _SimulatedWork(phase.seconds, phase.cpu / phase.seconds, phase.link, phase.share)
    yield _Signal(("arrived", number))


def _speeds(busy: Sequence[_SimulatedThread], cores: float) -> list[float]:
    """Return each thread's share of its full speed: max-min fair shares of links, and of cores."""
    parts = [1.0] * len(busy)
    for link in {thread.work.link for thread in busy} - {None}:
        users = [i for i, thread in enumerate(busy) if thread.work.link == link]
        shares = _fair_parts([busy[i].work.share for i in users], [1] * len(users), 1.0)
        for i, part in zip(users, shares, strict=True):
            parts[i] = part
    wanted = [thread.work.cores * part for thread, part in zip(busy, parts, strict=True)]
    of_cores = _fair_parts(wanted, [thread.threads for thread in busy], cores)
    return [part * more for part, more in zip(parts, of_cores, strict=True)]


def _fair_parts(wanted: Sequence[float], users: Sequence[int], capacity: float) -> list[float]:
    """Return each one's part of its demand: max-min fair shares of ``capacity``.

    Args:
        wanted: by each of its users.
        users: the users that each stands for.
        capacity: for all of them together.
    """
    parts = [1.0] * len(wanted)
    left, sharers = capacity, sum(users)
    for i in sorted(range(len(wanted)), key=wanted.__getitem__):
        given = min(wanted[i], left / sharers)
        if given < wanted[i]:
            parts[i] = given / wanted[i]
        left -= given * users[i]
        sharers -= users[i]
    return parts
