"""The one format of the state that a rank writes into a store: any process that reaches the store can write it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from ..base import records
from ..base.errors import ConfigError, printable
from ..process.processes import Identity
from .calls import Call

BLOCK = 64
"""Calls whose checksums are compared together."""

_QUESTION = re.compile(r"([0-9]{1,18}\.){3}[0-3]\.[01]")
_PASSING = ("stopped", "silent", "late", "slow", "stuck", "store")
_MOST = 1e24


@dataclass(frozen=True)
class Finding:
    """A problem of a job, or the reason why a call does not end.

    Attributes:
        kind: "failed", "gone", "conflict", "stopped", "ended", "silent", "late", "disconnected", "slow" or "stuck";
            "missing": ranks did not come; "store": a store does not answer; "unknown".
        ranks: those that caused it; empty if there is no evidence against any.
        text: what is wrong, as a clause that names them.
        calls: where ranks differ, the channel and its first and last call in question, as ``Recorder`` reads it.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    calls: str = ""

    def __post_init__(self) -> None:
        # Other ranks, or strangers that reach the store, have written parts of the text.
        object.__setattr__(self, "text", printable(self.text, lines=True))

    @property
    def final(self) -> bool:
        """Whether waiting longer is useless: the job does not recover from it."""
        return self.kind not in _PASSING

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """The part of the report that does not change while the problem lasts."""
        return self.kind, self.ranks


@dataclass(frozen=True)
class ChannelState:
    """How far a rank is in one process group, or in one transport of fusionlayer.

    Attributes:
        ranks: its members; empty: all ranks that have it.
        entered: number of its last collective call.
        done: number of the last one that has ended.
        call: the one that lasts, or a message; None if none does, or it was not looked up.
        recent: the last calls, with their numbers.
        blocks: a checksum for every 64 calls, by number, so that those are compared which are no longer in ``recent``.
    """

    ranks: tuple[int, ...]
    entered: int
    done: int
    call: Call | None = None
    recent: tuple[tuple[int, Call], ...] = ()
    blocks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LinkState:
    """A TCP connection that has become slow.

    Attributes:
        here: address and port of this end.
        there: of the other end.
        rate: bytes per second while it has data to send.
        before: what that was.
    """

    here: str
    there: str
    rate: float
    before: float


@dataclass(frozen=True)
class RankState:
    """A rank's position: of a transport with its only channel, of a watched process with all.

    Attributes:
        rank: its number.
        process: the process of the rank.
        serial: number of this state; it rises.
        life: "runs", "ended" or "failed".
        idle: seconds since a call began or ended, when the state was written.
        waits: whether it has waited in a call for longer than is usual.
        doing: what its training thread does, as a clause: "waits for data", "is in all_reduce", "is".
        where: line of the program.
        peer: rank that a send or a receive waits for; None: it is in none.
        error: of a rank that has failed.
        channels: by name.
        ends: addresses and ports of its process.
        links: connections that have become slow.
        held_up: other ends of connections whose round trips have become long.
        counts: the metrics of this process.
        finding: why it has failed, if it knows that.
        leaving: why it has failed in another transport, and will leave this one.
        heard: whether it has read the first cause of a failure.
        answers: the last question that it has read before it wrote this.
    """

    rank: int
    process: Identity
    serial: int
    life: str = "runs"
    idle: float = 0.0
    waits: bool = False
    doing: str = ""
    where: str = ""
    peer: int | None = None
    error: str = ""
    channels: Mapping[str, ChannelState] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    links: tuple[LinkState, ...] = ()
    held_up: tuple[str, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    finding: Finding | None = None
    leaving: Finding | None = None
    heard: bool = False
    answers: str = ""

    def __post_init__(self) -> None:
        rates = [rate for link in self.links for rate in (link.rate, link.before)]
        numbers = [self.idle, *self.counts.values(), *rates]
        if not all(abs(number) < _MOST for number in numbers):
            raise ConfigError(f"numbers of a state are {numbers}; expected finite ones")

    @property
    def place(self) -> str:
        """The rank's activity and its place in the program, as a clause."""
        return f"{self.doing or 'is'}{' at ' if self.where else ''}{self.where}"

    @property
    def channel(self) -> ChannelState:
        """The only channel of a transport's state."""
        return next(iter(self.channels.values()), ChannelState((), 0, 0))


class StateRequest(NamedTuple):
    """One rank's request that all ranks write their states again. The store holds its ``text``.

    Attributes:
        rank: the rank that asks, and reads the answers for all.
        number: number of its requests.
        sequence: number of the collective that the rank waits in.
        urgency: a request replaces one that is less urgent.
        whole: 1 if the lengths of all calls are wanted, too; 0 if not.
        outcome: None while the inquiry lasts; then its finding, as ``encode`` writes it, or "" if there is none.
    """

    rank: int
    number: int
    sequence: int
    urgency: int
    whole: int = 0
    outcome: str | None = None

    @classmethod
    def parse(cls, text: str) -> StateRequest | None:
        """Return the request with this ``text``; None if it belongs to none."""
        question, ends, outcome = text.partition("\n")
        if not _QUESTION.fullmatch(question):
            return None
        rank, number, sequence, urgency, whole = map(int, question.split("."))
        return cls(rank, number, sequence, urgency, whole, outcome if ends else None)

    @property
    def question(self) -> str:
        """The text of a request whose inquiry lasts."""
        return f"{self.rank}.{self.number}.{self.sequence}.{self.urgency}.{self.whole}"

    @property
    def text(self) -> str:
        """The text, with the outcome."""
        return self.question if self.outcome is None else f"{self.question}\n{self.outcome}"


def encode(record: RankState | Finding) -> str:
    """Return the text of a state or a finding, without what has its default."""
    data = records.plain(record)
    for channel in data["channels"].values() if isinstance(record, RankState) and record.channels else ():
        channel["ranks"] = _spans(channel["ranks"])
    return json.dumps(data)


def _spans(ranks: list[int]) -> list[list[int]]:
    """Return ``ranks`` as few ranges: first, end and step. Groups have a row or a column of the ranks, or all."""
    spans: list[list[int]] = []
    for rank in ranks:
        first, end, step = spans[-1] if spans else (rank, rank, 0)
        if spans and end == first + step and rank > first:  # of one rank so far
            spans[-1] = [first, rank + rank - first, rank - first]
        elif spans and rank == end:
            spans[-1][1] += step
        else:
            spans.append([rank, rank + 1, 1])
    return spans


def _expand(data: Any, size: int) -> Any:
    """Replace the ranges of ranks in a state by the ranks, at most ``size`` of them."""
    for channel in data["channels"].values() if "channels" in data else ():
        channel["ranks"] = [*islice((rank for span in channel["ranks"] for rank in range(*span)), size + 1)]
    return data


def decode(text: bytes, rank: int | None, size: int) -> RankState | None:
    """Return the state that a ``rank`` of ``size``, None: any, has written; None for a text that it has not."""
    # A state takes a few KB; one of a transport, where lengths are compared, some 100 bytes for each rank.
    if not text or len(text) > (1 << 20) + 1024 * size:
        return None
    try:
        state = records.build(RankState, _expand(json.loads(text), size), "state")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, ConfigError):
        return None
    fits = rank in (None, state.rank) and all(0 <= number < size for number in _numbers(state))
    return state if fits and all(_is_right(channel, size) for channel in state.channels.values()) else None


def decode_finding(text: bytes, size: int) -> Finding | None:
    """Return the finding that a rank of ``size`` has written; None for a text that is none."""
    try:
        finding = records.build(Finding, json.loads(text), "finding")
    except (ValueError, RecursionError, ConfigError):
        return None
    ranks = tuple(rank for rank in finding.ranks if 0 <= rank < size)
    # A rank that takes the job for a larger one may have named others, too.
    return replace(finding, ranks=ranks) if ranks or not finding.ranks else None


def _numbers(state: RankState) -> Iterator[int]:
    """Yield the numbers of ranks that a state has."""
    yield from (state.rank, *([] if state.peer is None else [state.peer]))
    for finding in (state.finding, state.leaving):
        yield from finding.ranks if finding else ()
    for channel in state.channels.values():
        yield from channel.ranks


def _is_right(channel: ChannelState, size: int) -> bool:
    calls = [call for _, call in channel.recent] + ([channel.call] if channel.call else [])
    for call in calls:
        most = size if call.partner is None else 1
        if not {len(call.sends), len(call.recvs)} <= {0, most} or not 0 <= (call.partner or 0) < size:
            return False
    return all(block.isascii() and block.isdecimal() and len(block) < 20 for block in channel.blocks)
