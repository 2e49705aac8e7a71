"""What a rank writes into the store about itself, for the rank that compares: whoever reaches the store can write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ..base import records
from ..base.errors import ConfigError
from ..process.processes import Identity

__all__ = ["BLOCK", "Channel", "Link", "Noted", "State", "decode", "encode"]

BLOCK = 64
"""Calls whose checksums are compared together."""

# Calls for which every rank must give tensors of the same shape and type. Others may differ, such as an uneven
# all-to-all or a gather: of these only the operation is compared.
_ALIKE = (
    "all_reduce",
    "broadcast",
    "reduce",
    "barrier",
    "_reduce_scatter_base",
    "_all_gather_base",
    "all_reduce_sparse",
)

# A longer text is not read. A state takes a few KB.
_MOST_BYTES = 1 << 20
_MOST = 1e24


@dataclass(frozen=True)
class Noted:
    """A collective call that a rank has made.

    Attributes:
        number: of the call in its channel.
        what: operation, shapes and types, such as "all_reduce of (10) float32".
        where: line of the program that has made it, such as "train.py:31"; "" where nobody has looked for it.
    """

    number: int
    what: str
    where: str = ""

    @property
    def common(self) -> str:
        """What must be equal on all ranks."""
        operation = self.what.partition(" of ")[0]
        return self.what if operation in _ALIKE else operation


@dataclass(frozen=True)
class Channel:
    """How far a rank is in one process group, or in one transport of fusionlayer.

    Attributes:
        ranks: its members; empty: all ranks that have it.
        entered: number of its last collective call.
        done: number of the last one that has ended.
        call: the one that lasts; "" if none does, or nobody has looked.
        recent: the last calls.
        blocks: a checksum for every 64 calls, by number, so that those are compared which are no longer in ``recent``.
    """

    ranks: tuple[int, ...]
    entered: int
    done: int
    call: str = ""
    recent: tuple[Noted, ...] = ()
    blocks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
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
class State:
    """Where a rank is.

    Attributes:
        rank: its number.
        process: of the rank.
        serial: number of this state; it rises.
        life: "runs", "ended" or "failed".
        idle: seconds since a call began or ended, when the state was written.
        waits: whether it has waited in a call for longer than is usual.
        doing: what its training thread does, as a clause: "waits for data", "is in all_reduce", "is".
        where: line of the program at which it does that.
        peer: rank that a send or a receive waits for; None: it is in none.
        error: of a rank that has failed.
        channels: by name.
        ends: addresses and ports of its process.
        links: connections that have become slow.
        held_up: other ends of connections whose round trips have become long.
        counts: the metrics of this process.
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
    channels: Mapping[str, Channel] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    held_up: tuple[str, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = [
            self.idle,
            *self.counts.values(),
            *(rate for link in self.links for rate in (link.rate, link.before)),
        ]
        if not all(abs(number) < _MOST for number in numbers):
            raise ConfigError(f"numbers of a state are {numbers}; expected finite ones")

    @property
    def place(self) -> str:
        """What the rank does, and where, as a clause."""
        return f"{self.doing or 'is'}{' at ' if self.where else ''}{self.where}"


def encode(state: State) -> str:
    """Return the text of a state."""
    return json.dumps(asdict(state))


def decode(text: bytes, rank: int, size: int) -> State | None:
    """Return the state that a ``rank`` of ``size`` has written; None for a text that it has not."""
    if not text or len(text) > _MOST_BYTES:
        return None
    try:
        state = records.build(State, json.loads(text), "state")
    except (ValueError, RecursionError, ConfigError):
        return None
    members = [member for channel in state.channels.values() for member in channel.ranks]
    blocks = [block for channel in state.channels.values() for block in channel.blocks]
    if not all(block.isascii() and block.isdecimal() and len(block) < 20 for block in blocks):
        return None
    peers = [state.rank, *members, *([] if state.peer is None else [state.peer])]
    return state if state.rank == rank and all(0 <= peer < size for peer in peers) else None
