"""What a publisher and followers say of relays: followers that serve others."""

from __future__ import annotations

import json
from typing import NamedTuple

from ..base.errors import ConfigError, WireError
from ..process.interfaces import is_loopback
from .address import Endpoint, parse

__all__ = ["Referral", "address_of", "check_serves", "miss_of"]


class Referral(NamedTuple):
    """What a publisher says instead of an update: where the version is, and its digest, by which any change is seen."""

    run: str
    version: int
    digest: str
    place: str

    def text(self) -> bytes:
        """Return it as a message."""
        return json.dumps(self).encode()

    @classmethod
    def of(cls, text: bytes | bytearray) -> Referral:
        """Return the referral of a message.

        Raises:
            WireError: it is none.
        """
        try:
            found = cls(*json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise WireError(f"a publisher refers to {bytes(text[:80])!r}, which makes no sense") from error
        if tuple(map(type, found)) != (str, int, str, str):
            raise WireError(f"a publisher refers to {bytes(text[:80])!r}, which makes no sense")
        return found


def address_of(text: bytes, caller: str) -> str:
    """Return the address at which a follower serves others; it may leave out the host from which it calls.

    Raises:
        WireError: it is no address.
    """
    try:
        place = parse(text.decode())
    except (ConfigError, UnicodeDecodeError) as error:
        raise WireError(f"a follower serves at {text[:80]!r}, which is no address") from error
    if not place.is_tcp or not place.port:
        raise WireError(f"a follower serves at {text[:80]!r}, which is no address")
    if place.host in ("0.0.0.0", "::"):
        return str(Endpoint(None, caller.rpartition(":")[0].strip("[]"), place.port))
    return str(place)


def check_serves(place: Endpoint, own: str, publisher: str) -> None:
    """Check the place at which a follower serves others before a publisher on another host refers them to it.

    Args:
        place: where it serves.
        own: its address on the connection to the publisher.
        publisher: the publisher's address there.

    Raises:
        ConfigError: only this host can reach it.
    """
    if is_loopback(place.host) and not is_loopback(publisher) and own != publisher:
        raise ConfigError(
            f"subscribe: relay {place} can be reached from this host alone, and the publisher is at {publisher}; "
            f"give relay='tcp://0.0.0.0:PORT'"
        )


def miss_of(text: bytes) -> tuple[str, bool]:
    """Return which relay a follower has tried in vain, and whether that has sent wrong bytes.

    Raises:
        WireError: it says something else.
    """
    try:
        place, wrong = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"a follower says {text[:80]!r} of a relay, which makes no sense") from error
    if not isinstance(place, str) or not isinstance(wrong, bool):
        raise WireError(f"a follower says {text[:80]!r} of a relay, which makes no sense")
    return place, wrong
