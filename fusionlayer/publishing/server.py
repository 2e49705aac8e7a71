"""Versions over TCP: followers ask for what is newer than what they have, and each gets one update for it.

Two threads: one serves all connections and never waits for a follower; one makes updates, one after the other. The
thread that trains waits for neither.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from contextlib import suppress
from queue import SimpleQueue

from ..errors import ConfigError, WireError
from .address import Place
from .frames import guard
from .outlet import Outlet
from .peers import BEAT_SECONDS, Peer
from .snapshot import Snapshot
from .update import Update, make

__all__ = ["TcpOutlet"]

_logger = logging.getLogger("fusionlayer")

_MOST_CALLERS = 1024
_FAREWELL_SECONDS = 1.0


class TcpOutlet(Outlet):
    """Serves the newest version to all who connect.

    What a follower gets is made when it asks: what changed since the version that it has, however many versions ago
    that was, or all of the newest where its version is not kept. So nothing is encoded while nobody asks, and one who
    is slow gets fewer and larger differences. Kept are versions that followers have, at most ``keep`` of them.

    Args:
        place: where to listen.
        keep: as above.
        secret: what followers must have; None: nothing.
        timeout: seconds in which a follower must take some of what is sent to it.
    """

    def __init__(self, place: Place, keep: int, secret: bytes | None, timeout: float) -> None:
        self._keep, self._secret, self._timeout = keep, secret, timeout
        try:
            family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
            self._listener = guard(socket.create_server((place.host, place.port), family=family, backlog=128))
        except OSError as error:
            raise ConfigError(
                f"publish: nobody can listen at {place}: {error.strerror or error}; give an address of this host and a "
                "free port"
            ) from error
        super().__init__(Place(None, place.host, self._listener.getsockname()[1]))
        if secret is None and not self._listener.getsockname()[0].startswith(("127.", "::1")):
            _logger.warning("%s: without secret=... whoever can connect gets the weights", self.place)
        self._listener.setblocking(False)
        self._peers: dict[socket.socket, Peer] = {}
        # Versions that followers have, by digest; and until when those of lost followers are kept, who may come back.
        self._kept: dict[str, Snapshot] = {}
        self._missed: dict[str, float] = {}
        self._updates: dict[str | None, Update] = {}  # of the newest version, by what they need
        self._jobs: SimpleQueue[tuple[Snapshot, Snapshot | None, str | None] | None] = SimpleQueue()
        self._made: SimpleQueue[Update] = SimpleQueue()
        self._making = False
        self._ending: float | None = None
        self._farewell = False
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = (guard(end) for end in socket.socketpair())
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        for end in (self._listener, self._woken):
            self._selector.register(end, selectors.EVENT_READ)
        self._start(publisher=self._serve, encoder=self._make)

    @property
    def followers(self) -> int:
        return sum(peer.known for peer in list(self._peers.values()))

    def _is_out(self) -> bool:
        newest = self._newest
        known = [peer for peer in list(self._peers.values()) if peer.known]
        return newest is None or all(peer.told == newest.version and peer.since is not None for peer in known)

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

    # ---- the thread that makes updates ------------------------------------------------------------------------------

    def _make(self) -> None:
        try:
            while (job := self._jobs.get()) is not None and not self._closed:
                target, base, has = job
                # A publisher that was restarted from a checkpoint may begin with what its followers have.
                self._made.put(make(target, target if target.digest == has else base))
                self._wake()
        except Exception as error:
            self._fail(error)

    # ---- the thread that serves -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closed and not self._has_ended():
                self._bring()
                for key, events in self._selector.select(BEAT_SECONDS / 2):
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    if end is self._woken:
                        with suppress(BlockingIOError):
                            self._woken.recv(1 << 10)
                    elif end is self._listener:
                        self._accept()
                    else:
                        self._attend(self._peers[end], events)
                now = time.monotonic()
                for peer in [peer for peer in self._peers.values() if peer.is_late(now)]:
                    self._lose(peer)
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:
            self._fail(error)
        finally:
            for end in [*self._peers, self._listener, self._woken]:
                end.close()
            self._peers.clear()
            self._selector.close()

    def _has_ended(self) -> bool:
        """Return whether all followers have been told of the end; begin to tell them when it has come."""
        if self._ending is None:
            return False
        if not self._farewell:
            self._farewell = True
            self._selector.unregister(self._listener)
            self._listener.close()
            for peer in self._peers.values():
                if peer.known:
                    peer.end_of_all()
        return time.monotonic() > self._ending or not any(peer.writes for peer in self._peers.values())

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError:  # it has gone again, or there are no descriptors left for it
            return
        if len(self._peers) >= _MOST_CALLERS:
            end.close()
            return
        peer = self._peers[end] = Peer(end, self._secret, self._timeout)
        self._selector.register(end, selectors.EVENT_READ)
        self._attend(peer, selectors.EVENT_WRITE)

    def _attend(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                peer.read()
            if peer.writes:
                peer.write()
        except (OSError, WireError):
            self._lose(peer)
            return
        self._selector.modify(peer.end, selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.writes else 0))

    def _lose(self, peer: Peer) -> None:
        """Forget a caller. What it has is kept for a while, so that a link that comes back needs no whole version."""
        for digest in (peer.has, peer.update.target.digest if peer.update else None):
            if digest in self._kept:
                self._missed[digest] = time.monotonic() + self._timeout
        self._selector.unregister(peer.end)
        del self._peers[peer.end]
        peer.end.close()

    # ---- who gets what ----------------------------------------------------------------------------------------------

    def _bring(self) -> None:
        """Send updates to those who wait for one, as far as they are made, and have one more made."""
        while not self._made.empty():
            update = self._made.get()
            self._making = False
            self._kept[update.target.digest] = update.target
            self._updates = {base: each for base, each in self._updates.items() if each.target is update.target}
            self._updates[update.base] = update
            # Also to those for whom a newer version is there by now: else a fast training would never send any.
            self._send(update)
        newest = self._newest
        if newest is not None:
            if any(update.target is not newest for update in self._updates.values()):
                self._updates.clear()
            for update in self._updates.values():
                self._send(update)
            self._order(newest)
        self._forget()
        for peer in list(self._peers.values()):
            if peer.writes:
                self._attend(peer, selectors.EVENT_WRITE)

    def _send(self, update: Update) -> None:
        for peer in self._peers.values():
            known = {*self._kept, update.target.digest}
            fits = peer.has == update.base or (update.base is None and peer.has not in known)
            if peer.since is not None and fits and (peer.told is None or peer.told < update.target.version):
                peer.send(update)

    def _order(self, newest: Snapshot) -> None:
        """Have the update made for which a follower has waited longest."""
        waiting = [peer for peer in self._peers.values() if peer.since is not None and peer.told != newest.version]
        on_their_way = {id(peer.update) for peer in self._peers.values() if peer.update is not None}
        # Each that is on its way takes memory: where all are slow, the next one waits for one of them.
        if waiting and not self._making and len(on_their_way) < self._keep + 2:
            first = min(waiting, key=lambda peer: peer.since or 0.0)
            self._making = True
            self._jobs.put((newest, self._kept.get(first.has or ""), first.has))

    def _forget(self) -> None:
        """Free the versions that no follower has, and those beyond the number that is kept."""
        now = time.monotonic()
        self._missed = {digest: until for digest, until in self._missed.items() if until > now}
        wanted = {*self._missed}
        for peer in self._peers.values():
            wanted |= {peer.has or "", peer.update.target.digest if peer.update else ""}
        wanted |= {update.target.digest for update in self._updates.values()}
        for digest in [digest for digest in self._kept if digest not in wanted]:
            del self._kept[digest]
        for digest in sorted(self._kept, key=lambda digest: self._kept[digest].version)[: -self._keep]:
            del self._kept[digest]
