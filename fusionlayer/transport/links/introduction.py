"""How the two ends of a new connection prove to each other that they belong to the job, before anything else is read.

Each end sends a random number, and proves by HMAC-SHA256 of both numbers, and of the numbers of caller and host, that
it has the job's secret. Both derive keys from the same. So a program between them, which passes on their proofs, can
neither change what follows nor connect a caller to another host than it has called. Data of strangers are only read and
compared.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from ...base.secrets import NONCE_BYTES, PROOF_BYTES, is_proof, make_nonce, prove
from ...base.secrets import Keys as BothKeys
from ...process.interfaces import with_port
from .gate import Gate, Refusals

# Numbers of the caller and of the host.
_NUMBERS = struct.Struct("<II")
# A caller's number, its nonce, and the proof that it has the job's secret.
_HELLO = struct.Struct(f"<I{NONCE_BYTES}s{PROOF_BYTES}s")
_TOO_MANY = "it had proved nothing yet when too many others came"
# Seconds that a peer may take to connect and to prove its identity.
PATIENCE = 5.0
# Callers that have proved nothing yet and are listened to at once: each needs a file descriptor.
_MOST_STRANGERS = 64
# So a stranger has a sixth of a second at least, however many there are, and a caller waits for 1,024 others no longer
# than its patience.
_STRANGERS_PER_SECOND = 400.0


class ConnectionKeys(NamedTuple):
    """Keys of one connection, which only its two ends know; 32 bytes each.

    Attributes:
        sending: authenticates what this end sends.
        receiving: authenticates what the other end sends.
    """

    sending: bytes
    receiving: bytes


class _Caller:
    """A connection that has not proved yet to be the job's. ``place``: where it calls from."""

    def __init__(self, end: socket.socket, place: str) -> None:
        self.end = end
        self.place = place
        self.nonce = make_nonce()
        self.heard = b""
        self.until = time.monotonic() + PATIENCE


class Reception:
    """Takes the calls of the job's processes, and none of anybody else.

    It waits for all callers at once, so silent ones keep no process waiting. A caller has ``PATIENCE`` seconds; when
    there are too many, the oldest must go. A process that was sent away like that calls again.

    Args:
        listeners: where callers come. They stay open.
        secret: what the job's processes know.
        numbers: identify callers.
        host: identifies the called end, default 0.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], secret: bytes, numbers: Collection[int], host: int = 0
    ) -> None:
        self._secret = secret
        self._numbers = numbers
        self._host = host
        self._most = len(numbers) + 1 + _MOST_STRANGERS
        self._callers: dict[socket.socket, _Caller] = {}
        self._refusals = Refusals(f"rank {host}")
        # Guards _wake: a descriptor that was closed may be another file's by now.
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._gate = Gate(listeners, self._selector, self._most, _STRANGERS_PER_SECOND)

    def admit(self, patience: float) -> list[tuple[int, socket.socket, ConnectionKeys]]:
        """Wait for ``patience`` seconds at most; return callers' numbers, connections that are the job's, and keys."""
        admitted: list[tuple[int, socket.socket, ConnectionKeys]] = []
        now = time.monotonic()
        for caller in [caller for caller in self._callers.values() if caller.until < now]:
            self._send_away(caller, f"it has not proved within {PATIENCE:g} s that it belongs to the job")
        for key, _ in self._selector.select(min(patience, self._gate.look() or patience)):
            if key.fileobj == self._wake:
                os.eventfd_read(self._wake)
                continue
            known = self._callers.get(key.fileobj)  # type: ignore[call-overload]
            if known is not None:
                admitted += self._listen_to(known)
            elif key.fileobj in self._gate:
                self._accept(key.fileobj)  # type: ignore[arg-type]
        return admitted

    def wake(self) -> None:
        """End the wait of a thread that is in ``admit``. Any thread may call it; after ``close`` it does nothing."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send away callers that have proved nothing. No thread may be in ``admit``. A second call does nothing."""
        with self._lock:
            wake, self._wake = self._wake, -1
        if wake < 0:
            return
        for end in self._callers:
            end.close()
        self._callers.clear()
        self._selector.close()
        os.close(wake)

    def _accept(self, listener: socket.socket) -> None:
        try:
            found = self._gate.accept(listener)
        except OSError:
            if self._callers:
                self._send_away(next(iter(self._callers.values())), _TOO_MANY)
            return
        if found is None:
            return
        end, address = found
        end.setblocking(False)
        if len(self._callers) >= self._most:
            self._send_away(next(iter(self._callers.values())), _TOO_MANY)
        place = with_port(*address[:2]) if end.family != socket.AF_UNIX else "this host"
        caller = self._callers[end] = _Caller(end, place)
        self._selector.register(end, selectors.EVENT_READ)
        with suppress(OSError):
            end.send(caller.nonce)

    def _listen_to(self, caller: _Caller) -> list[tuple[int, socket.socket, ConnectionKeys]]:
        try:
            heard = caller.end.recv(_HELLO.size - len(caller.heard))
        except BlockingIOError:
            return []
        except OSError:
            heard = b""
        caller.heard += heard
        if not heard:
            self._send_away(caller, "it has closed the connection")
        if not heard or len(caller.heard) < _HELLO.size:
            return []
        number, nonce, proof = _HELLO.unpack(caller.heard)
        said = _NUMBERS.pack(number, self._host) + caller.nonce + nonce
        knows = is_proof(proof, self._secret, b"caller", said)
        if not knows or number not in self._numbers:
            self._send_away(caller, "it has not the job's secret")
            return []
        self._gate.refund()
        self._selector.unregister(caller.end)
        del self._callers[caller.end]
        try:
            caller.end.send(prove(self._secret, b"host", said))
        except OSError:  # it has gone again, and calls again
            caller.end.close()
            return []
        both = BothKeys.derive(self._secret, said)
        return [(number, caller.end, ConnectionKeys(both.host, both.caller))]

    def _send_away(self, caller: _Caller, why: str) -> None:
        self._refusals.add(caller.place, why)
        self._selector.unregister(caller.end)
        del self._callers[caller.end]
        caller.end.close()


def introduce(end: socket.socket, secret: bytes, number: int, deadline: float, host: int = 0) -> ConnectionKeys | None:
    """Prove to the ``Reception`` of ``host`` that this is caller ``number``; return the connection's keys.

    Returns:
        None where the other end has not proved that it is this host of the job.

    Raises:
        OSError: the connection was lost, or no answer has come within ``PATIENCE`` seconds or until ``deadline``.
    """
    until = min(deadline, time.monotonic() + PATIENCE)

    def read(length: int) -> bytes:
        heard = b""
        while len(heard) < length:
            end.settimeout(max(until - time.monotonic(), 0.001))
            more = end.recv(length - len(heard))
            if not more:
                raise OSError("the connection was closed before both ends knew each other")
            heard += more
        return heard

    theirs, mine = read(NONCE_BYTES), make_nonce()
    said = _NUMBERS.pack(number, host) + theirs + mine
    end.sendall(_HELLO.pack(number, mine, prove(secret, b"caller", said)))
    if not is_proof(read(PROOF_BYTES), secret, b"host", said):
        return None
    both = BothKeys.derive(secret, said)
    return ConnectionKeys(both.caller, both.host)
