"""Which rank is to blame, from where all of them are: pure functions of what they have written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .state import BLOCK, Channel, Noted, State

__all__ = ["Finding", "judge"]

# Seconds for which calls in a circle last before anybody is told: one of the ranks has waited for long by then.
_LASTING = 3.0


@dataclass(frozen=True)
class Finding:
    """What is wrong with a job.

    Attributes:
        kind: "gone", "stopped", "silent", "failed", "ended", "conflict", "late", "stuck" or "slow".
        ranks: those to blame; empty if there is no evidence against any.
        text: what is wrong, as a clause that names them and their places.
        calls: where ranks differ, the channel and its first and last call in question, as ``Recorder`` reads it.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    calls: str = ""

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """What stays the same while the trouble lasts."""
        return self.kind, self.ranks


def judge(states: Mapping[int, State], trouble: Mapping[int, str], size: int) -> list[Finding]:
    """Return what is wrong, the causes first; empty while the job is well.

    Args:
        states: the last that each rank has written.
        trouble: "gone", "stopped" or "silent" for ranks whose process is so.
        size: number of ranks.
    """
    conflicts = _conflicts(states)
    # A wrong shape or type makes torch raise, on this rank or on another one: the calls tell which is odd.
    failed = [
        Finding("failed", (rank,), f"rank {rank} failed: {state.error}{' at ' if state.where else ''}{state.where}")
        for rank, state in sorted(states.items())
        if state.life == "failed" and not is_consequence(state.error)
    ]
    lost = [
        Finding(kind, (rank,), f"rank {rank} {_TROUBLE[kind]}{_last_seen(states.get(rank))}")
        for rank, kind in sorted(trouble.items())
        if rank not in states or states[rank].life == "runs"
    ]
    if conflicts or failed or lost:
        return [*failed, *conflicts, *lost]
    torn = {rank: state for rank, state in states.items() if state.life == "failed"}
    left = [rank for rank, state in states.items() if state.life == "ended"]
    if torn and left:
        who = min(torn)
        ended = f"{_ranks(sorted(left))} ended while {_ranks(sorted(torn))} needed {'it' if len(left) == 1 else 'them'}"
        return [
            Finding("ended", tuple(sorted(left)), f"{ended} at {torn[who].where}; last, it {states[left[0]].place}")
        ]
    if torn:
        return [
            Finding("failed", (rank,), f"rank {rank} lost its connection: {state.error} at {state.where}")
            for rank, state in sorted(torn.items())
        ]
    return _late(states, size)


# What torch says on a rank when another one has gone or has failed.
_CONSEQUENCE = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Rr]ead error|[Ww]rite error|[Tt]imed out|[Tt]imeout|NCCL error|"
    r"Application timeout|remote process exited|DistNetworkError|Socket"
)


def is_consequence(error: str) -> bool:
    """Return whether an exception only says that another rank does not answer."""
    return bool(_CONSEQUENCE.search(error))


_TROUBLE = {
    "gone": "is gone",
    "stopped": "is stopped",
    "silent": "gives no sign of life",
}


def _last_seen(state: State | None) -> str:
    if state is None:
        return ""
    return f" ({state.process}); last seen, it {_past(state)}"


def _past(state: State) -> str:
    waits = next((channel.call for channel in state.channels.values() if channel.call), "")
    return state.place + (f" ({waits})" if waits else "")


# ---- different calls ------------------------------------------------------------------------------------------------


def _conflicts(states: Mapping[int, State]) -> list[Finding]:
    """Return the first difference between the calls of ranks in each channel."""
    findings = []
    for name in sorted({name for state in states.values() for name in state.channels}):
        here = {rank: state.channels[name] for rank, state in states.items() if name in state.channels}
        found = _differ(name, here) or _blocks_differ(name, here)
        if found is not None:
            findings.append(found)
    return findings


def _differ(name: str, channels: Mapping[int, Channel]) -> Finding | None:
    calls = {rank: {call.number: call for call in channel.recent} for rank, channel in channels.items()}
    for number in sorted(set().union(*calls.values())):
        made = {rank: noted[number] for rank, noted in sorted(calls.items()) if number in noted}
        kinds = {rank: call.common for rank, call in made.items()}
        if len(set(kinds.values())) > 1:
            odd = _odd(kinds, calls)
            rest = [rank for rank in made if rank not in odd]
            sides = [*((rank, [rank]) for rank in odd), *([(rest[0], rest)] if rest else [])]
            told = "; ".join(f"{_ranks(group)} in {_shown(made[rank])}" for rank, group in sides)
            return Finding("conflict", odd, f"ranks differ in call {number}: {told}", f"{name} {number} {number}")
    return None


def _shown(call: Noted) -> str:
    return f"{call.what}{' at ' if call.where else ''}{call.where}"


def _blocks_differ(name: str, channels: Mapping[int, Channel]) -> Finding | None:
    for block in sorted(set().union(*(channel.blocks for channel in channels.values())), key=int):
        sums = {rank: channel.blocks[block] for rank, channel in sorted(channels.items()) if block in channel.blocks}
        if len(set(sums.values())) > 1:
            odd, first = _odd(sums, {}), BLOCK * int(block)
            text = f"{_ranks(odd)} made other calls than the rest from {first} to {first + BLOCK - 1} of {name}"
            return Finding("conflict", odd, text, f"{name} {first} {first + BLOCK - 1}")
    return None


def _odd(kinds: Mapping[int, object], calls: Mapping[int, Mapping[int, Noted]]) -> tuple[int, ...]:
    """Return the ranks that differ from most; all, if there is no majority.

    Where as many ranks make one call as make the other, the one counts that more ranks have made before.
    """
    votes = Counter(kinds.values())
    before = {kind: sum(any(c.common == kind for c in own.values()) for own in calls.values()) for kind in votes}
    if len(votes) == 1:
        return tuple(kinds)
    (most, second, *_) = sorted(votes, key=lambda kind: (votes[kind], before[kind]), reverse=True)
    if votes[most] == votes[second] and before[most] == before[second]:
        return tuple(kinds)
    return tuple(rank for rank, kind in kinds.items() if kind != most)


# ---- ranks that others wait for -------------------------------------------------------------------------------------


def _late(states: Mapping[int, State], size: int) -> list[Finding]:
    awaited: dict[int, dict[int, str]] = {}
    stuck: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        if not state.waits:
            continue
        if state.peer is not None:
            way = "send to" if "send" in state.doing else "recv from"
            awaited.setdefault(state.peer, {})[rank] = f"{way} it"
        for name, channel in state.channels.items():
            if channel.entered <= channel.done:
                continue
            others = {
                other: theirs.channels.get(name)
                for other, theirs in states.items()
                if other != rank and _is_member(other, name, channel, theirs)
            }
            behind = [other for other, theirs in others.items() if theirs is None or theirs.entered < channel.entered]
            if not behind and len(others) + 1 >= (len(channel.ranks) or 2):
                stuck.setdefault(name, []).append(rank)
            for other in behind:
                awaited.setdefault(other, {})[rank] = f"call {channel.entered}{_of(channel)}"
    # Who is awaited and is in a call itself is late because of others, unless all of them wait in a circle.
    first = [rank for rank in awaited if rank not in states or not _is_in_call(states[rank])]
    if awaited and not first and all(states[rank].idle > _LASTING for rank in awaited):
        return [_circle(states, sorted(awaited))]
    if awaited:
        return [_awaited(states, rank, awaited[rank]) for rank in sorted(first)]
    slow = _slow(states)
    if slow:
        return slow
    return [
        Finding("stuck", (), f"{_ranks(ranks)} are in one call of {name}, and no data arrive: {states[ranks[0]].place}")
        for name, ranks in stuck.items()
        if len(ranks) > 1
    ][:1]


def _slow(states: Mapping[int, State]) -> list[Finding]:
    """Return the links that have become slow, and who is to blame for them.

    That is a rank which all of them have in common. Where there is one link, it is the end at which other connections
    wait too: acknowledgements leave by the interface that is slow. Else both ends are.
    """
    owner = {end: rank for rank, state in states.items() for end in state.ends}
    pairs = {
        (rank, owner[link.there]): link
        for rank, state in sorted(states.items())
        for link in state.links
        if link.there in owner
    }
    if not pairs:
        return []
    common = set.intersection(*(set(pair) for pair in pairs))
    ends = common or {rank for pair in pairs for rank in pair}
    waiting = Counter(
        end
        for rank, state in states.items()
        for there in state.held_up
        if there in owner and {rank, owner[there]} not in map(set, pairs)
        for end in (rank, owner[there])
    )
    most = max(waiting[rank] for rank in ends)
    ranks = tuple(sorted(rank for rank in ends if waiting[rank] == most))
    told = "; ".join(
        f"from rank {a} to rank {b} {link.rate / 1e6:.3g} MB/s, before {link.before / 1e6:.3g} MB/s"
        for (a, b), link in list(pairs.items())[:4]
    )
    return [Finding("slow", ranks, f"links of {_ranks(ranks)} are slow: {told}")]


def _is_in_call(state: State) -> bool:
    # The last state of a rank that has ended may be older than the end of its last call.
    return state.life == "runs" and bool(_open_calls(state))


def _awaited(states: Mapping[int, State], rank: int, waiting: Mapping[int, str]) -> Finding:
    """Return the finding against a rank; ``waiting``: the ranks that need it, and their calls."""
    state, who = states.get(rank), min(waiting)
    ended = state is not None and state.life == "ended"
    life = "has not come" if state is None else "has ended" if ended else f"is late: it {state.place}"
    waits = "waits" if len(waiting) == 1 else "wait"
    lasts = max(states[each].idle for each in waiting)
    at = f" at {states[who].where}" if states[who].where else ""
    text = f"rank {rank} {life}; {_ranks(sorted(waiting))} {waits} for it {lasts:.0f} s in {waiting[who]}{at}"
    return Finding("ended" if ended else "late", (rank,), text)


def _is_member(rank: int, name: str, channel: Channel, state: State) -> bool:
    return rank in channel.ranks if channel.ranks else name in state.channels


def _of(channel: Channel) -> str:
    return f", {channel.call}" if channel.call else ""


def _circle(states: Mapping[int, State], ranks: Sequence[int]) -> Finding:
    """Return the finding for ranks that all wait for each other; the odd ones are those in another call than most."""
    calls = {rank: next(iter(_open_calls(states[rank])), ("", 0)) for rank in ranks}
    odd = _odd(calls, {})
    rest = [rank for rank in ranks if rank not in odd]
    told = "; ".join(f"rank {rank} {_past(states[rank])}" for rank in [*odd, *rest])
    return Finding("conflict", odd, f"ranks wait for each other in different calls: {told}")


def _open_calls(state: State) -> list[tuple[str, int]]:
    """Return the calls that a rank is in: channels and numbers."""
    peer = [] if state.peer is None else [(f"{state.doing} {state.peer}", 0)]
    return [*peer, *((name, each.entered) for name, each in state.channels.items() if each.entered > each.done)]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
