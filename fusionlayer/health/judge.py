"""Which ranks are at fault: pure functions of evidence, of the states of ranks, and of operations that wait."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .calls import Call
from .state import BLOCK, ChannelState, Finding, RankState

# The possible defects of a rank. Earlier kinds come first, because a later kind may be the consequence of an earlier
# one. A rank's own statement comes first: it has left after finding that out.
_CAUSES_FIRST = ("failed", "gone", "conflict", "stopped", "ended", "silent", "late", "disconnected")
# With one of these the cause is certain, so there is no need to wait for the answers of other ranks.
EVIDENT = _CAUSES_FIRST[:4]
# Seconds for which calls in a circle last before they are reported: one of the ranks has waited for long by then.
_LASTING = 3.0
# Ranks that a text says something about, each; all ranks read it.
_NAMED = 8
# torch's messages on a rank after another one has left or failed.
_CONSEQUENCE = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Rr]ead error|[Ww]rite error|[Tt]imed out|[Tt]imeout|NCCL error|"
    r"Application timeout|remote process exited|DistNetworkError|Socket"
)
_Call = TypeVar("_Call", bound=Hashable)
_TROUBLE = {"gone": "is gone", "stopped": "is stopped", "silent": "gives no sign of life"}


# ---- a call that does not end ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evidence:
    """A piece of evidence about one rank, found out by a rank that waits for it.

    Attributes:
        rank: the rank.
        kind: that of a ``Finding``, or "alike": the rank makes the same call as this one.
        text: the evidence, as a clause.
        ranks: those that the rank names, or that differ.
        call: the differing call; for a failed rank the call if it is also this rank's.
    """

    rank: int
    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    call: Call | None = None


def verdict(evidence: Iterable[Evidence], call: Call | None) -> Finding | None:
    """Return the finding that follows from the evidence, or None if there is none."""
    evidence = list(evidence)
    if call is not None and call.partner is not None:
        evidence = [each for each in evidence if each.rank == call.partner] or evidence
    for kind in _CAUSES_FIRST:
        found = [each for each in evidence if each.kind == kind]
        if found and kind == "failed":
            return Finding(kind, found[0].ranks, found[0].text)
        if found and kind == "conflict":
            return Finding(kind, _differing(found, evidence), found[0].text)
        if found:
            more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            text = "; ".join(each.text for each in found[:_NAMED])
            return Finding(kind, tuple(each.rank for each in found), text + more)
    return None


def _differing(conflicts: list[Evidence], evidence: Iterable[Evidence]) -> tuple[int, ...]:
    """Return the ranks whose calls differ from those of most; without a majority the two that were compared first."""
    first = conflicts[0]
    if first.call is None:  # two others were compared, and none of them with the rest
        return first.ranks
    calls: dict[int, Hashable] = {rank: None for rank in first.ranks if rank != first.rank}
    alike = (each for each in evidence if each.kind == "alike" or (each.kind == "disconnected" and each.call))
    calls |= {each.rank: None for each in alike}
    for each in conflicts:
        fits = each.call and not first.call.conflict(first.rank, each.call, each.rank)
        calls[each.rank] = "as first" if fits or each is first else each.rank
    return _odd(calls) or first.ranks


def _odd(calls: Mapping[int, _Call], before: Mapping[_Call, int] | None = None) -> tuple[int, ...]:
    """Return the ranks whose call differs from that of most; () without a majority.

    Args:
        calls: by rank; equal values are equal calls.
        before: how many ranks have made each call before, which decides between two that equally many make now.
    """
    votes = Counter(calls.values())
    if len(votes) == 1:
        return ()
    weights = {call: (count, before[call] if before else 0) for call, count in votes.items()}
    most, second, *_ = sorted(weights, key=lambda call: weights[call], reverse=True)
    if weights[most] == weights[second]:
        return ()
    return tuple(rank for rank, call in calls.items() if call != most)


# ---- operations by name ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stall:
    """An operation that waits for ranks.

    Attributes:
        name: readable name of the operation.
        seconds: seconds since the first rank requested it.
        missing: ranks that have not requested it.
        is_late: whether most ranks of its process set have requested it, so the missing ones are stragglers.
    """

    name: str
    seconds: float
    missing: tuple[int, ...]
    is_late: bool


def overdue(stalls: Sequence[Stall], limit: float) -> Finding | None:
    """Return which ranks keep operations waiting for longer than ``limit`` seconds, or None."""
    late = [stall for stall in stalls if stall.seconds > limit]
    if not late:
        return None
    # If one rank calls in another order than the rest, all wait: stragglers are then those that most ranks wait for.
    late = [stall for stall in late if stall.is_late] or late
    # The other operations are named too: the missing ranks may wait in one of them.
    shown = [f"{stall.name} (ranks {list(stall.missing)} missing for {stall.seconds:.0f} s)" for stall in stalls[:8]]
    text = "; ".join(shown) + (f"; and {len(stalls) - 8} more" if len(stalls) > 8 else "")
    return Finding("late", tuple(sorted({rank for stall in late for rank in stall.missing})), text)


# ---- a job, from the states of its ranks ----------------------------------------------------------------------------


def judge(states: Mapping[int, RankState], trouble: Mapping[int, str]) -> list[Finding]:
    """Return the defects, the causes first; empty while the job is healthy."""
    # A wrong shape or type makes torch raise, on this rank or on another one: the calls show which is odd.
    failed = [
        Finding("failed", (rank,), f"rank {rank} failed: {state.error}{' at ' if state.where else ''}{state.where}")
        for rank, state in sorted(states.items())
        if state.life == "failed" and not _CONSEQUENCE.search(state.error)
    ]
    dead = [
        Finding(kind, (rank,), f"rank {rank} {_TROUBLE[kind]}{_last_seen(states.get(rank))}")
        for rank, kind in sorted(trouble.items())
        if rank not in states or states[rank].life == "runs"
    ]
    causes = [*failed, *_conflicts(states), *dead]
    torn = {rank: state for rank, state in sorted(states.items()) if state.life == "failed"}
    left = sorted(rank for rank, state in states.items() if state.life == "ended")
    if causes or not torn:
        return causes or _waiting(states)
    if left:
        ended = f"{_ranks(left)} ended while {_ranks(sorted(torn))} needed {'it' if len(left) == 1 else 'them'}"
        text = f"{ended} at {next(iter(torn.values())).where}; last, it {states[left[0]].place}"
        return [Finding("ended", tuple(left), text)]
    return [
        Finding("disconnected", (rank,), f"rank {rank} lost its connection: {state.error} at {state.where}")
        for rank, state in torn.items()
    ]


def _last_seen(state: RankState | None) -> str:
    return "" if state is None else f" ({state.process}); last seen, it {_past(state)}"


def _past(state: RankState) -> str:
    call = next((channel.call for channel in state.channels.values() if channel.call), None)
    return state.place + (f" ({call.text})" if call else "")


def _conflicts(states: Mapping[int, RankState]) -> list[Finding]:
    """Return the first difference between the calls of ranks in each channel."""
    findings = []
    for name in sorted({name for state in states.values() for name in state.channels}):
        here = {rank: state.channels[name] for rank, state in states.items() if name in state.channels}
        found = _differ(name, here) or _blocks_differ(name, here)
        if found is not None:
            findings.append(found)
    return findings


def _differ(name: str, channels: Mapping[int, ChannelState]) -> Finding | None:
    calls = {rank: dict(channel.recent) for rank, channel in channels.items()}
    for number in sorted(set().union(*calls.values())):
        made = {rank: recent[number] for rank, recent in sorted(calls.items()) if number in recent}
        kinds = {rank: call.common for rank, call in made.items()}
        if len(set(kinds.values())) > 1:
            before = {
                kind: sum(any(call.common == kind for call in recent.values()) for recent in calls.values())
                for kind in kinds.values()
            }
            odd = _odd(kinds, before) or tuple(kinds)
            rest = [rank for rank in made if rank not in odd]
            sides = [*((rank, [rank]) for rank in odd), *([(rest[0], rest)] if rest else [])]
            shown = "; ".join(f"{_ranks(group)} in {_shown(made[rank])}" for rank, group in sides)
            return Finding("conflict", odd, f"ranks differ in call {number}: {shown}", f"{name} {number} {number}")
    return None


def _shown(call: Call) -> str:
    return f"{call.what}{' at ' if call.where else ''}{call.where}"


def _blocks_differ(name: str, channels: Mapping[int, ChannelState]) -> Finding | None:
    for block in sorted(set().union(*(channel.blocks for channel in channels.values())), key=int):
        sums = {rank: channel.blocks[block] for rank, channel in sorted(channels.items()) if block in channel.blocks}
        if len(set(sums.values())) > 1:
            odd, first = _odd(sums) or tuple(sums), BLOCK * int(block)
            text = f"{_ranks(odd)} made other calls than the rest from {first} to {first + BLOCK - 1} of {name}"
            return Finding("conflict", odd, text, f"{name} {first} {first + BLOCK - 1}")
    return None


def _waiting(states: Mapping[int, RankState]) -> list[Finding]:
    """Return the stragglers, ranks that wait for each other, slow links, or a call that is stuck."""
    awaited, stuck = _awaited(states)
    # A straggler that is in a call itself waits for others, unless all of them wait in a circle.
    first = [rank for rank in awaited if rank not in states or not _is_in_call(states[rank])]
    if awaited and not first and all(states[rank].idle > _LASTING for rank in awaited):
        return [_circle(states, sorted(awaited))]
    if awaited:
        return [_straggler(states, rank, awaited[rank]) for rank in sorted(first)]
    slow = _slow(states)
    if slow:
        return slow
    return [
        Finding("stuck", (), f"{_ranks(ranks)} are in one call of {name}, and no data arrive: {states[ranks[0]].place}")
        for name, ranks in stuck.items()
        if len(ranks) > 1
    ][:1]


def _awaited(states: Mapping[int, RankState]) -> tuple[dict[int, dict[int, str]], dict[str, list[int]]]:
    """Return the ranks that others wait for, with their calls; and the channels in whose call all ranks are."""
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
                if other != rank and (other in channel.ranks if channel.ranks else name in theirs.channels)
            }
            behind = [other for other, theirs in others.items() if theirs is None or theirs.entered < channel.entered]
            if not behind and len(others) + 1 >= (len(channel.ranks) or 2):
                stuck.setdefault(name, []).append(rank)
            for other in behind:
                call = f", {channel.call.text}" if channel.call else ""
                awaited.setdefault(other, {})[rank] = f"call {channel.entered}{call}"
    return awaited, stuck


def _is_in_call(state: RankState) -> bool:
    # The last state of a rank that has ended may be older than the end of its last call.
    return state.life == "runs" and bool(_open_calls(state))


def _open_calls(state: RankState) -> list[tuple[str, int]]:
    """Return the calls that a rank is in: channels and numbers."""
    peer = [] if state.peer is None else [(f"{state.doing} {state.peer}", 0)]
    return [*peer, *((name, each.entered) for name, each in state.channels.items() if each.entered > each.done)]


def _straggler(states: Mapping[int, RankState], rank: int, waiting: Mapping[int, str]) -> Finding:
    """Return the finding against a rank; ``waiting``: the ranks that need it, and their calls."""
    state, first = states.get(rank), min(waiting)
    ended = state is not None and state.life == "ended"
    life = "has not come" if state is None else "has ended" if ended else f"is late: it {state.place}"
    waits = "waits" if len(waiting) == 1 else "wait"
    lasts = max(states[each].idle for each in waiting)
    at = f" at {states[first].where}" if states[first].where else ""
    text = f"rank {rank} {life}; {_ranks(sorted(waiting))} {waits} for it {lasts:.0f} s in {waiting[first]}{at}"
    return Finding("ended" if ended else "late", (rank,), text)


def _circle(states: Mapping[int, RankState], ranks: Collection[int]) -> Finding:
    """Return the finding for ranks that all wait for each other; the odd ones are those in another call than most."""
    odd = _odd({rank: next(iter(_open_calls(states[rank])), ("", 0)) for rank in ranks}) or tuple(ranks)
    rest = [rank for rank in ranks if rank not in odd]
    shown = "; ".join(f"rank {rank} {_past(states[rank])}" for rank in [*odd, *rest])
    return Finding("conflict", odd, f"ranks wait for each other in different calls: {shown}")


def _slow(states: Mapping[int, RankState]) -> list[Finding]:
    """Return the links that have become slow, and which ranks cause that.

    It is a rank that all of them have in common. With one slow link, it is the end at which other connections wait
    too: acknowledgements use the slow interface. Else both ends are.
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
    shown = "; ".join(
        f"from rank {a} to rank {b} {link.rate / 1e6:.3g} MB/s, before {link.before / 1e6:.3g} MB/s"
        for (a, b), link in list(pairs.items())[:4]
    )
    return [Finding("slow", ranks, f"links of {_ranks(ranks)} are slow: {shown}")]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
