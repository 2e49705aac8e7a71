"""Connections between rank 0 and every other rank, for messages of any length at any time, next to a transport's calls.

A transport's calls need all ranks at once and end within its timeout. These connections carry messages that one rank
sends alone, perhaps hours after the last one. They also show at once that a peer is gone. Each message carries a tag
that only the other end can make, and only once: a message that was changed, repeated, moved or left out is damage.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import selectors
import socket
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.errors import TransportError
from ..base.job_key import shared_secret
from ..base.secrets import TAG_BYTES, Seal
from ..launch.stores import listen
from ..process.interfaces import is_loopback, own_address, reachable_names
from ..process.processes import node_name
from .base import Transport
from .links.base import damaged
from .links.introduction import PATIENCE, ConnectionKeys, Reception, introduce

# Length and tag of a message, then a checksum of these two.
_FACTS = struct.Struct(f"<I{TAG_BYTES}s")
_PREFIX = struct.Struct(f"{_FACTS.format}I")
_MOST_LETTER_BYTES = 1 << 20
_NEAR = "this host"
_PURPOSE = "star"
_NAME = re.compile(r"fusionlayer-[0-9a-f]{16}")
# Size asked for a socket's buffers. All messages that are in flight at once fit, so that a sender need not wait for the
# reader.
_BUFFER_BYTES = 1 << 20
# Bytes to read at once while the length of the next message is unknown.
_FIRST_BYTES = 64 << 10
# Bytes to read at once of a message whose length is known: memory for more is taken when they have come.
_MOST_AT_ONCE = 16 << 20
# 50 ms as a struct timeval: the longest time for which a rank that stops in the middle of a message can block rank 0.
_NO_LONGER = struct.pack("@ll", 0, 50_000)
# From this length on a message is sent by a second call. A shorter one is copied after its length and sent with it.
_WORTH_A_CALL = 16 << 10


class StarConnection:
    """One end of the connection between two ranks. One thread receives at a time.

    Args:
        end: the connected socket.
        keys: the keys of this connection, of which the other end has the same in the other order.

    Attributes:
        room: bytes that can be sent without waiting for the reader, once it has read everything before.
        damage: returns the clause that reports damaged data from one rank to another; None if nothing has. No message
            is returned after that.
    """

    damage: Callable[[int, int], str] | None = None

    def __init__(self, end: socket.socket, keys: ConnectionKeys) -> None:
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        else:
            _enlarge(end)
        end.settimeout(None)
        self.socket = end
        # The kernel reports twice the size that was asked for, and its own records count too. So a quarter is safe.
        self.room = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
        self._read = bytearray()
        self._mine, self._theirs = Seal(keys.sending), Seal(keys.receiving)
        # Messages leave in the order of their tags: a farewell may be sent while another thread sends.
        self._sending = threading.Lock()
        _live.add(self)

    def send(self, *messages: bytes) -> None:
        """Send messages one after the other. It ignores an absent peer: the receiving thread notices that."""
        with suppress(OSError), self._sending:
            for message in messages:
                facts = _FACTS.pack(len(message), self._mine.tag(sha256(message).digest()))
                prefix = facts + struct.pack("<I", zlib.crc32(facts))
                if len(message) < _WORTH_A_CALL:
                    self.socket.sendall(prefix + message)
                else:
                    self.socket.sendall(prefix, socket.MSG_MORE)
                    self.socket.sendall(message)

    def receive(self, is_in_vain: Callable[[], bool] | None = None) -> memoryview | None:
        """Wait for the next message and return it; None if the peer has closed its end or is gone, or of ``damage``.

        Args:
            is_in_vain: whether to wait no longer, and return None; asked four times a second.
        """
        while (message := self._next()) is None:
            if self.damage or (is_in_vain and not self._await(is_in_vain)) or not self._fill():
                return None
        return message

    def _await(self, is_in_vain: Callable[[], bool]) -> bool:
        """Return True when the socket is readable, and False when the wait for that is in vain."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        while not poll.poll(250):
            if is_in_vain():
                return False
        return True

    def received(self) -> list[memoryview] | None:
        """Return the messages that have come, None as in ``receive``. Call it when the socket is readable."""
        if not self._fill():
            return None
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return None if self.damage else messages

    def close(self) -> None:
        """Close this end; a thread that waits in ``receive`` gets None. A second call does nothing."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _fill(self) -> bool:
        """Read the available data; return whether the peer is still there.

        If a message has begun, wait for its rest: as long as the socket's receive timeout allows (_NO_LONGER on rank
            0), else without limit.
        """
        count, flags = _FIRST_BYTES, 0
        if len(self._read) >= _PREFIX.size:
            missing = _PREFIX.size + _PREFIX.unpack_from(self._read)[0] - len(self._read)
            count, flags = min(missing, _MOST_AT_ONCE), socket.MSG_WAITALL
        try:
            data = self.socket.recv(count, flags)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._read += data
        return bool(data)

    def _next(self) -> memoryview | None:
        if self.damage or len(self._read) < _PREFIX.size:
            return None
        length, tag, checksum = _PREFIX.unpack_from(self._read)
        end = _PREFIX.size + length
        # The checksum first: no process waits for, or makes room for, a length that was damaged. A program that
        # changes the checksum too gains nothing: it could as well hold the rest back.
        if checksum != zlib.crc32(self._read[: _FACTS.size]):
            self.damage = partial(damaged, "the prefix of a message")
            return None
        if len(self._read) < end:
            return None
        # The message is a view that keeps its buffer alive, so the bytes after it are copied to a new buffer.
        read = memoryview(self._read)
        self._read = bytearray(read[end:])
        message = read[_PREFIX.size : end].toreadonly()
        if not self._theirs.is_next(tag, sha256(message).digest()):
            self.damage = partial(damaged, f"a message of {length} bytes", sealed=True)
            return None
        return message


_live: weakref.WeakSet[StarConnection] = weakref.WeakSet()


def _begin_child() -> None:
    """Close this process's copies of the sockets, without a word to the peers: they are the parent's."""
    for connection in list(_live):
        connection.socket.close()


os.register_at_fork(after_in_child=_begin_child)


class Center:
    """Rank 0's ends of all connections. One thread calls ``received``.

    Args:
        connections: the connections by rank.
    """

    def __init__(self, connections: dict[int, StarConnection]) -> None:
        self.connections = connections
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for rank, connection in connections.items():
            self._selector.register(connection.socket, selectors.EVENT_READ, rank)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_LONGER)

    def received(self, patience: float) -> Iterator[tuple[int, list[memoryview] | None]]:
        """Wait for messages; yield each rank that has sent some with them, or with None if the rank is gone.

        The wait ends after ``patience`` seconds, or when another thread calls ``wake``.
        """
        for key, _ in self._selector.select(patience):
            if key.fileobj is self._woken:
                self._woken.recv(1 << 10)
                continue
            messages = self.connections[key.data].received()
            if messages is None:
                self._selector.unregister(key.fileobj)
            yield key.data, messages

    def wake(self) -> None:
        """End the wait of the thread that is in ``received``. Any thread may call it."""
        self._wake.send(b"!")

    def close(self) -> None:
        """Close all ends. No thread may be in ``received``."""
        self._selector.close()
        for connection in self.connections.values():
            connection.close()
        self._wake.close()
        self._woken.close()


def connect(transport: Transport) -> Center | StarConnection:
    """Return a ``Center`` on rank 0, a ``StarConnection`` to it on others. All ranks of ``transport`` call it together.

    Raises:
        TransportError: a rank cannot reach rank 0, or did not come within the transport's timeout.
    """
    deadline = time.monotonic() + transport.timeout
    # Not transport.nodes: the settings may call ranks of several hosts one node.
    hosts = transport.all_gather_bytes(sha256(node_name().encode()).digest())
    if transport.rank:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        transport.broadcast(length, 0)
        if not 0 < int(length) <= _MOST_LETTER_BYTES:
            raise TransportError(f"rank 0 announces an address of {int(length)} bytes, which makes no sense", [0])
        letter = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        transport.broadcast(letter, 0)
        near = hosts[transport.rank] == hosts[0]
        return StarConnection(*_call(_Address.read(letter), transport.rank, near=near, deadline=deadline))
    nonce = secrets.token_bytes(16)
    secret = shared_secret(_PURPOSE, nonce)
    name = f"fusionlayer-{secrets.token_hex(8)}"
    place = "127.0.0.1" if len(set(hosts)) == 1 else own_address()
    with _listener(place) as listener, _near_listener(name) as near_listener:
        port = listener.getsockname()[1]
        text = json.dumps({"nonce": nonce.hex(), "port": port, "hosts": _hosts(place), "near": name}).encode()
        transport.broadcast(torch.tensor([len(text)], device="cpu"), 0)
        transport.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
        reception = Reception((listener, near_listener), secret, range(1, transport.size))
        try:
            return Center(_receive(reception, transport.size, deadline, transport.timeout))
        finally:
            reception.close()


def _receive(reception: Reception, size: int, deadline: float, timeout: float) -> dict[int, StarConnection]:
    """Return the connections of all other ranks.

    Raises:
        TransportError: some did not come until ``deadline``, ``timeout`` seconds after the start.
    """
    ends: dict[int, StarConnection] = {}
    while len(ends) < size - 1:
        now = time.monotonic()
        if now > deadline:
            missing = [rank for rank in range(1, size) if rank not in ends]
            for connection in ends.values():
                connection.close()
            raise TransportError(f"ranks {missing} did not reach rank 0 within {timeout:g} s", missing)
        for rank, end, keys in reception.admit(min(deadline - now, 0.5)):
            if rank in ends:  # its earlier call took too long for it
                ends[rank].close()
            ends[rank] = StarConnection(end, keys)
    return ends


def _listener(place: str) -> socket.socket:
    """Return a listener on one address of this host; on all of them if ``place`` is empty."""
    listener = listen(place)
    _enlarge(listener)
    return listener


def _enlarge(end: socket.socket) -> None:
    """Give a socket buffers for more than two segments of a loopback device. Accepted connections inherit them."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


def _reach_near(name: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    try:
        end.settimeout(PATIENCE)
        end.connect(f"\0{name}")
    except OSError:
        end.close()
        raise
    return end


def _reach(host: str, port: int) -> socket.socket:
    """Return a connected TCP socket. Its buffers are enlarged before it connects, as TCP ignores that afterwards."""
    why: OSError | None = None
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        end = socket.socket(family, kind, protocol)
        try:
            _enlarge(end)
            end.settimeout(PATIENCE)
            end.connect(place)
            return end
        except OSError as error:
            end.close()
            why = error
    raise why or OSError(f"{host} has no address")


def _near_listener(name: str) -> socket.socket:
    """Return a Unix listener, by a name outside any file system. TCP within a host stalls when its windows fill up."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(1024)
    return listener


class _Address(NamedTuple):
    """The listening address of rank 0: a port of hosts, and a Unix socket's name. ``nonce``: from which its secret is
    derived."""

    hosts: list[str]
    port: int
    near: str
    nonce: bytes

    @classmethod
    def read(cls, letter: Tensor) -> _Address:
        """Return what rank 0 has sent.

        Raises:
            TransportError: it makes no sense.
        """
        try:
            told = json.loads(letter.numpy().tobytes())
            found = cls([str(host) for host in told["hosts"]], told["port"], told["near"], bytes.fromhex(told["nonce"]))
            if type(found.port) is int and 0 < found.port < 1 << 16 and _NAME.fullmatch(found.near):
                return found
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise TransportError("rank 0 announces an address that makes no sense", [0])


def _call(address: _Address, rank: int, *, near: bool, deadline: float) -> tuple[socket.socket, ConnectionKeys]:
    """Return a connection to rank 0 by the first of its addresses that works, and its keys."""
    hosts = [_NEAR, "127.0.0.1", *address.hosts] if near else [*address.hosts, "127.0.0.1"]
    secret = shared_secret(_PURPOSE, address.nonce)
    why: OSError | None = None
    while why is None or time.monotonic() < deadline:
        for host in hosts:
            if why is not None and time.monotonic() > deadline:
                break
            try:
                end = _reach_near(address.near) if host == _NEAR else _reach(host, address.port)
            except (OSError, UnicodeError) as error:
                why = OSError(str(error))
                continue
            try:
                if keys := introduce(end, secret, rank, deadline):
                    return end, keys
                why = OSError("another program answers there")
            except OSError as error:
                why = error
            end.close()
        time.sleep(0.1)
    raise TransportError(
        f"rank {rank} cannot reach rank 0 at port {address.port} of any of {hosts}: {why}; name the network "
        "interface in GLOO_SOCKET_IFNAME on every rank, or open ports between the hosts",
        [0],
    )


def _hosts(place: str) -> list[str]:
    """Return names and addresses of this host with which other hosts may reach a listener on ``place``."""
    found = [place] if place else [*reachable_names(), os.environ.get("MASTER_ADDR", "")]
    return list(dict.fromkeys(host for host in found if host and not is_loopback(host)))
