"""Followers that serve others: a tree in which the publisher sends each version once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from .peers import Peer
from .snapshot import Snapshot

__all__ = ["Relays"]

_logger = logging.getLogger("fusionlayer")

_OF_PUBLISHER, _OF_RELAY = 1, 2
"""How many followers each sends a version to, where there are relays."""


class Relays:
    """Decides where a follower gets a version: the publisher sends it to one, each relay to two.

    A follower whose relay fails is sent to one that has the version already, or to the publisher: so the tree heals,
    and no two wait for each other. A relay that has sent wrong bytes is used no more.
    """

    def __init__(self) -> None:
        self._version: Snapshot | None = None
        self._children: dict[str, int] = {}
        self._wrong: set[str] = set()

    def parent(self, version: Snapshot, peer: Peer, peers: Iterable[Peer]) -> str:
        """Return the address from which ``peer`` gets a version; empty: from the publisher."""
        if version is not self._version:
            self._version, self._children = version, {"": 0}
        here = {each.serves: each for each in peers if each.serves}
        found = ""
        for place, count in self._children.items():
            relay = here.get(place)
            usable = relay is not None and place not in self._wrong and place not in peer.missed
            usable = usable and relay is not None and not _waits_for(relay, peer, version, here)
            if peer.missed:  # others may wait for this one
                usable = usable and relay is not None and relay.has == version.digest
            if count < (_OF_RELAY if place else _OF_PUBLISHER) and (usable or not place):
                found = place
                break
        self._children[found] += 1
        if peer.serves and peer.serves not in self._wrong:
            self._children.setdefault(peer.serves, 0)
        return found

    def exclude(self, place: str, by: str) -> None:
        """Use a relay no more, which has sent wrong bytes to a follower."""
        if place not in self._wrong:
            self._wrong.add(place)
            _logger.error("relay %s sent %r bytes of another digest: it is not used any more", place, by)


def _waits_for(relay: Peer, peer: Peer, version: Snapshot, here: Mapping[str, Peer]) -> bool:
    """Return whether a relay is ``peer`` itself, or gets a version from it, be it by way of others."""
    for _ in here:
        if relay.serves == peer.serves:
            return True
        if relay.has == version.digest or relay.assigned is not version or relay.parent not in here:
            return False
        relay = here[relay.parent]
    return True
