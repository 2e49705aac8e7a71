"""Members of an elastic job and its generations, as data that is sent as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..base.errors import TransportError
from ..process.processes import Identity

# More names than a host has, and no more than one has the time to try.
_MOST_NAMES = 256
_ID = re.compile(r"\w{1,64}", re.ASCII)


@dataclass(frozen=True)
class MemberAddress:
    """Where a store is.

    Attributes:
        node: name of the host and its network.
        names: names and addresses of the host, the likeliest first.
        port: the port of the store.
        token: the store's mark, so that another program's store is not taken for it.
    """

    node: str
    names: tuple[str, ...]
    port: int
    token: str


@dataclass(frozen=True)
class Member:
    """A process that takes part, or asks to.

    Attributes:
        id: unique for the process.
        address: where its own store is.
        identity: the process, as ``Identity.encode`` writes it.
    """

    id: str
    address: MemberAddress
    identity: str

    @property
    def process(self) -> Identity:
        """The process."""
        return Identity.decode(self.identity)


@dataclass(frozen=True)
class Generation:
    """The members between two changes. Their places in the list are their ranks; rank 0 leads the next change.

    Attributes:
        number: counts the changes; 0 at first.
        members: in the order of ranks. Members that stay keep their places before newcomers.
        fresh: ids of the members that have not got the job's state yet.
        done: number of steps whose results count: a member that is left has them.
        behind: ids of the members that lack the results of the last of these steps; the others have them.
        store: where rank 0 keeps the store of this generation.
    """

    number: int
    members: tuple[Member, ...]
    fresh: tuple[str, ...]
    done: int
    store: MemberAddress
    behind: tuple[str, ...] = ()

    def rank_of(self, member: str) -> int | None:
        """Return the rank of the member with this id; None if it is none."""
        return next((rank for rank, each in enumerate(self.members) if each.id == member), None)

    def encode(self) -> str:
        """Return the generation as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes | str) -> Generation:
        """Return what ``encode`` has written."""
        try:
            return cls._of(json.loads(text))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TransportError(f"what a member has written as its generation makes no sense: {error}") from None

    @classmethod
    def _of(cls, given: Mapping[str, Any]) -> Generation:
        members = tuple(_member(each) for each in given["members"])
        fresh = tuple(str(each) for each in given["fresh"])
        behind = tuple(str(each) for each in given["behind"])
        if not members:
            raise ValueError("no members")
        return cls(_number(given["number"]), members, fresh, _number(given["done"]), _address(given["store"]), behind)


@dataclass(frozen=True)
class MemberReport:
    """A member's report to the leader of a change.

    Attributes:
        generation: the newest that it knows of.
        done: number of steps whose results it has, all of them.
        between: whether it is between two steps, and has made the update of the last one.
    """

    generation: Generation
    done: int
    between: bool

    def encode(self) -> str:
        """Return the report as JSON."""
        return json.dumps({"generation": self.generation.encode(), "done": self.done, "between": self.between})

    @classmethod
    def decode(cls, text: bytes | str) -> MemberReport:
        """Return what ``encode`` has written."""
        try:
            given = json.loads(text)
            return cls(Generation.decode(given["generation"]), _number(given["done"]), bool(given["between"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TransportError(f"what a member reports makes no sense: {error}") from None


def encode_member(member: Member) -> str:
    """Return a member as JSON."""
    return json.dumps(asdict(member))


def decode_member(text: bytes | str) -> Member:
    """Return what ``encode_member`` has written."""
    try:
        return _member(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TransportError(f"what a process has written about itself makes no sense: {error}") from None


def _member(given: Mapping[str, Any]) -> Member:
    if not _ID.fullmatch(given["id"]):
        raise ValueError(f"{given['id']!r:.50} is no id of a member")
    return Member(given["id"], _address(given["address"]), str(given["identity"]))


def _address(given: Mapping[str, Any]) -> MemberAddress:
    names, port = tuple(map(str, given["names"])), given["port"]
    if type(port) is not int or not 0 < port < 1 << 16 or not 0 < len(names) <= _MOST_NAMES:
        raise ValueError(f"{port!r} is no port, or these are no names of a host: {names[:3]}")
    for name in names:
        name.encode("idna")  # or a look-up of it would raise an error of another kind
    return MemberAddress(str(given["node"]), names, port, str(given["token"]))


def _number(given: object) -> int:
    if type(given) is not int or not -1 <= given < 1 << 62:
        raise ValueError(f"{given!r} is no number of steps or changes")
    return given
