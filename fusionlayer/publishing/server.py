"""Versions over TCP: followers ask for newer versions, and each gets one update for it.

Two threads: one serves all connections and never waits for a follower; one makes updates, one after the other. The
thread that trains waits for neither. Plain sockets, since ZeroMQ drops messages of slow subscribers, which breaks a
chain of differences, and hides when a peer is gone.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from ..base.errors import WireError
from ..observe import counts
from ..transport.links.gate import Refusals
from .address import Endpoint
from .boxes import boxes_of, cut
from .door import Door, share
from .frames import Parcel, guard
from .keyring import Keyring
from .outlet import Outlet
from .peers import BEAT_SECONDS, Peer
from .referral import Referral
from .relays import Relays
from .snapshot import Snapshot
from .tls import TLS
from .update import make

__all__ = ["TcpOutlet"]

_logger = logging.getLogger("fusionlayer")

_FAREWELL_SECONDS = 1.0
_AT_ONCE = 16  # callers that come in before all others are attended to again
_MOST_CUTS = 32  # sets of parts that followers take: of each set a copy is kept


class TcpOutlet(Outlet):
    """Serves the newest version to all callers.

    A follower's update is made on request: the difference to its version, however old, or all of the newest if its
    version is not kept. So nothing is encoded without a request, and a slow follower gets fewer and larger differences.
    Kept are versions that followers have, at most ``keep`` of them.

    Callers are strangers until they have proved to be followers and have asked for a version. Few strangers are
    listened to at once, and the oldest goes when there are too many.

    Args:
        place: where to listen.
        keep: as above.
        keyring: the required proof of followers; None: nothing.
        tls: encrypts connections; None: no encryption.
        timeout: seconds in which a follower must take some of the data sent to it.
        offers: how many versions it can send: with 1 only the newest. Followers of several ranks need one version.
    """

    def __init__(
        self, place: Endpoint, keep: int, keyring: Keyring | None, tls: TLS | None, timeout: float, offers: int = 1
    ) -> None:
        self._keep, self._keyring, self._timeout = keep, keyring, timeout
        self._offered: deque[Snapshot] = deque(maxlen=offers)  # guarded by _changed
        if keyring:
            keyring.read()
        self._guarded = bool(keyring or (tls and tls.authorities))
        self._tls = tls.for_publisher(keyring) if tls else None
        self._selector = selectors.DefaultSelector()
        self._door = Door(place, self._selector)
        super().__init__(self._door.place)
        if not self._guarded and not self._door.is_near:
            _logger.warning("%s: without secret=... every caller that can connect gets the weights", self.place)
        self._refusals = Refusals(self.place)
        # The oldest come first in both.
        self._strangers: dict[socket.socket, Peer] = {}
        self._peers: dict[socket.socket, Peer] = {}
        # Versions of followers, by digest; and the time until which those of disconnected followers are kept, which may
        # return.
        self._kept: dict[str, Snapshot] = {}
        self._missed: dict[str, float] = {}
        # Of the versions on offer, by the parts that receivers take, and what they need.
        self._updates: dict[tuple[Snapshot, bytes, str | None], Parcel] = {}
        self._jobs: SimpleQueue[tuple[Snapshot, bytes, Snapshot | None, str | None] | None] = SimpleQueue()
        self._made: SimpleQueue[Parcel] = SimpleQueue()
        self._making = False
        self._relays = Relays()
        self._run: str | None = None  # of the versions that followers have been sent
        self._ending: float | None = None
        self._farewell = False
        self._waker, self._woken = (guard(end) for end in socket.socketpair())
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._start(publisher=self._serve, encoder=self._make)
        counts.register(self)

    @property
    def followers(self) -> list[str]:
        return [peer.name for peer in list(self._peers.values())]

    @property
    def refused(self) -> int:
        return self._refusals.count

    def counts(self) -> dict[str, float]:
        """Return this publisher's values for ``fusionlayer.metrics``."""
        return {"followers": len(self._peers), "callers_refused": self._refusals.count}

    def offer(self, snapshot: Snapshot) -> None:
        with self._changed:
            if self._offered and self._offered[-1].run != snapshot.run:  # a relay's publisher has begun again
                self._offered.clear()
            self._offered.append(snapshot)
        super().offer(snapshot)

    def _is_out(self) -> bool:
        newest = self._newest
        peers = list(self._peers.values())
        return newest is None or all(
            peer.announced == newest.version and (peer.since is not None or (peer.rests and not peer.finds))
            for peer in peers
        )

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # it is awake, or has ended
            self._waker.send(b"!")

    def _end(self) -> None:
        with self._changed:
            self._ending = time.monotonic() + _FAREWELL_SECONDS
        self._wake()
        self._threads[0].join()

    def _stop(self) -> None:
        self._closed = True
        self._jobs.put(None)
        self._wake()
        for thread in self._threads:
            thread.join()
        self._waker.close()
        counts.retire(self)

    # ---- the thread that makes updates ------------------------------------------------------------------------------

    def _make(self) -> None:
        try:
            cuts: dict[bytes, Snapshot] = {}
            while (job := self._jobs.get()) is not None and not self._closed:
                whole, takes, base, has = job
                if cuts.get(b"") is not whole:
                    cuts = {b"": whole}
                if takes not in cuts:
                    cuts[takes] = cut(whole, boxes_of(takes))
                while len(cuts) > _MOST_CUTS:  # followers come and go, each with parts of its own
                    del cuts[next(key for key in cuts if key)]
                target = cuts[takes]
                # A publisher restarted from a checkpoint may begin with the version of its followers.
                self._made.put(Parcel(make(target, target if target.digest == has else base), whole, takes))
                self._wake()
        except Exception as error:
            self._fail(error)

    # ---- the thread that serves -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closed and not self._has_ended():
                self._bring()
                rest = self._door.look()
                for key, events in self._selector.select(min(rest or BEAT_SECONDS, BEAT_SECONDS / 2)):
                    self._hear(key.fileobj, events)  # type: ignore[arg-type]
                self._send_away_the_late()
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:
            self._fail(error)
        finally:
            self._door.close()
            for end in [*self._strangers, *self._peers, self._woken]:
                end.close()
            self._strangers.clear()
            self._peers.clear()
            self._selector.close()

    def _hear(self, end: socket.socket, events: int) -> None:
        if end is self._woken:
            with suppress(BlockingIOError):
                self._woken.recv(1 << 10)
        elif end in self._door:
            for _ in range(_AT_ONCE):
                if not self._accept(end):
                    break
        elif peer := self._peers.get(end) or self._strangers.get(end):  # else it has been sent away just now
            self._attend(peer, events)

    def _send_away_the_late(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._strangers.values() if peer.is_late(now)]:
            self._lose(peer, "it has not proved to be a follower in time")
        for peer in [peer for peer in self._peers.values() if peer.is_late(now)]:
            self._lose(peer, f"it has taken nothing for {self._timeout:g} s, or not said that it has a version")
        if self._keyring and self._keyring.refresh():
            for peer in list(self._peers.values()):
                if peer.secret not in self._keyring.accepted(peer.name):
                    self._lose(peer, f"the secret of {peer.name!r} is not valid any more")

    def _has_ended(self) -> bool:
        """Return whether all followers have been notified of the end; begin to notify them when it has come."""
        if self._ending is None:
            return False
        if not self._farewell:
            self._farewell = True
            self._door.close()
            for peer in self._peers.values():
                peer.end_of_all()
        return time.monotonic() > self._ending or not any(peer.writes for peer in self._peers.values())

    def _accept(self, listener: socket.socket) -> bool:
        """Listen to a caller; return whether there was one."""
        caller = self._door.let_in(listener)
        if caller is None:
            return False
        end, place = caller
        while len(self._strangers) >= share().strangers:
            self._lose(next(iter(self._strangers.values())), "it had proved nothing yet when too many others came")
        try:
            if self._tls:
                end = guard(self._tls.wrap_socket(end, server_side=True, do_handshake_on_connect=False))
            peer = Peer(end, place, self._keyring, self._timeout)
        except OSError:  # it has gone again
            end.close()
            return True
        self._strangers[end] = peer
        self._selector.register(end, peer.events)
        self._attend(peer, selectors.EVENT_WRITE)
        return True

    def _attend(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                peer.read()
            if peer.known and peer.end in self._strangers:
                self._settle(peer)
            if peer.writes:
                peer.write()
        except (OSError, WireError) as error:
            self._lose(peer, str(error))
            return
        self._selector.modify(peer.end, peer.events)

    def _settle(self, peer: Peer) -> None:
        """Give a follower one of the places.

        If any caller may follow, a quarter of the places is for those that have a version of this publisher. When there
        are too many callers, one without a version that received least is disconnected.

        Raises:
            WireError: all are taken.
        """
        most = share().followers
        ours = {*self._kept, *self._missed}  # strangers do not know their digests
        if self._guarded:
            self._door.refund()
        elif peer.has not in ours:
            most -= most // 4
        if len({peer.takes, *(each.takes for each in self._peers.values())}) > _MOST_CUTS:
            raise WireError(f"followers take {_MOST_CUTS} different sets of parts of tensors, and this one another")
        if len(self._peers) >= most:
            idle = [each for each in self._peers.values() if each.has not in ours]
            if self._guarded or not idle:
                raise WireError(f"{len(self._peers)} followers are there, and no more have room")
            self._lose(min(idle, key=lambda each: each.sent), "it had no version yet when too many others came")
        self._peers[peer.end] = self._strangers.pop(peer.end)
        _logger.info("%s: %r follows from %s", self.place, peer.name, peer.place)

    def _lose(self, peer: Peer, why: str) -> None:
        """Forget a caller. Its version is kept for a while, so that a restored link needs no whole version."""
        for digest in (peer.has, peer.update.target.digest if peer.update else None):
            if digest in self._kept:
                self._missed[digest] = time.monotonic() + self._timeout
        if self._strangers.pop(peer.end, None):
            self._refusals.add(peer.place, why)
        else:
            del self._peers[peer.end]
            _logger.info("%s: %r at %s follows no longer: %s", self.place, peer.name, peer.place, why)
        self._selector.unregister(peer.end)
        peer.end.close()

    # ---- which follower gets which update ---------------------------------------------------------------------------

    def _bring(self) -> None:
        """Send the updates that are made to the followers that wait for them, and have one more made."""
        with self._changed:
            offered = list(self._offered)
        if offered and self._run != offered[-1].run:
            for peer in list(self._peers.values()) if self._run else []:  # numbers may begin again
                self._lose(peer, "the publisher has begun again")
            self._run = offered[-1].run
        while not self._made.empty():
            update = self._made.get()
            self._making = False
            if update.whole.run != self._run:
                continue
            self._kept[update.target.digest] = update.target
            self._updates[update.whole, update.takes, update.base] = update
            # Also where a newer version is there by now: else a fast training would never send any.
            self._send(update, offered)
        if offered:
            self._refer(offered[-1])
            taken = {b"", *(peer.takes for peer in self._peers.values())}
            self._updates = {
                key: each for key, each in self._updates.items() if each.whole in offered and each.takes in taken
            }
            for update in self._updates.values():
                self._send(update, offered)
            self._order(offered)
        self._forget()
        for peer in list(self._peers.values()):
            if peer.writes:
                self._attend(peer, selectors.EVENT_WRITE)

    def _refer(self, newest: Snapshot) -> None:
        """Send the followers that wait to relays, if there are any."""
        peers = [peer for peer in self._peers.values() if not peer.takes]
        # Relays of callers that have proved nothing could make others wait.
        if newest.places or not any(peer.serves for peer in peers) or not (self._guarded or self._door.is_near):
            return
        for peer in peers:
            if peer.wrong:
                self._relays.exclude(peer.wrong, peer.name)
                peer.wrong = ""
            if peer.since is None or peer.least or peer.announced == newest.version:
                continue
            if peer.assigned is not newest:
                peer.missed = peer.missed if peer.assigned is None else set()
                peer.parent, peer.assigned = self._relays.parent(newest, peer, peers), newest
            if peer.parent and not any(each.assigned is newest and not each.parent for each in peers):
                peer.parent = ""  # the one to which this was sent has gone
            if peer.parent and newest.digest in self._kept:  # this one has sent it to one follower
                referral = Referral(newest.run, newest.version, newest.digest, peer.parent)
                peer.refer(referral.text(), newest.version)

    def _send(self, update: Parcel, offered: Sequence[Snapshot]) -> None:
        number = update.target.version
        for peer in self._peers.values():
            known = {*self._kept, update.target.digest}
            fits = peer.has == update.base or (update.base is None and peer.has not in known)
            fits = fits and peer.since is not None and peer.takes == update.takes
            fits = fits and (peer.announced is None or peer.announced < number)
            fits = fits and not (peer.parent and peer.assigned is update.whole)
            if fits and (not peer.least or ((to := _wanted(peer, offered)) and peer.least <= number <= to.version)):
                peer.send(update)

    def _order(self, offered: Sequence[Snapshot]) -> None:
        """Make the update that a follower has awaited longest."""
        asking = [
            peer
            for peer in self._peers.values()
            if peer.since is not None and not (peer.parent and peer.assigned is offered[-1])
        ]
        wanted = {peer: to for peer in asking if (to := _wanted(peer, offered)) and peer.announced != to.version}
        on_their_way = {id(peer.update) for peer in self._peers.values() if peer.update is not None}
        # Each one in flight takes memory: if all are slow, the next one waits for one of them.
        if wanted and not self._making and len(on_their_way) < self._keep + 2:
            first = min(wanted, key=lambda peer: peer.since or 0.0)
            self._making = True
            self._jobs.put((wanted[first], first.takes, self._kept.get(first.has or ""), first.has))

    def _forget(self) -> None:
        """Free the versions that no follower has, and those beyond the limit."""
        now = time.monotonic()
        self._missed = {digest: until for digest, until in self._missed.items() if until > now}
        wanted = {*self._missed}
        for peer in self._peers.values():
            wanted |= {peer.has or "", peer.update.target.digest if peer.update else ""}
        wanted |= {update.target.digest for update in self._updates.values()}
        for digest in [digest for digest in self._kept if digest not in wanted]:
            del self._kept[digest]
        # Of one version there may be many cuts.
        numbers = sorted({(each.run == self._run, each.version) for each in self._kept.values()})
        old = set(numbers[: -self._keep])
        for digest in [key for key, each in self._kept.items() if (each.run == self._run, each.version) in old]:
            del self._kept[digest]


def _wanted(peer: Peer, offered: Sequence[Snapshot]) -> Snapshot | None:
    """Return the version to send next to a follower, or None while there is none."""
    return next((each for each in offered if each.version >= peer.least), None) if peer.least else offered[-1]
