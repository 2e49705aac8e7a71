"""Short messages, at any time and of any length, between rank 0 and every other rank, beside a transport's calls.

A transport's calls need all ranks at once and end within its timeout. What one rank has to say when it comes up, and
what may not come up for hours, goes through connections of this kind, which also tell at once that a peer is gone.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..errors import TransportError
from ._base import Transport
from ._interfaces import reachable_names

__all__ = ["Center", "Connection", "connect"]

_LENGTH = struct.Struct("<I")
_HELLO = struct.Struct("<16sI")
_PATIENCE = 5.0
_NEAR = "this host"
# Frames that a peer has not read yet must not make this end wait: what is under way at once fits in here.
_BUFFER_BYTES = 1 << 20
# Read at once while it is not known how long the next message is.
_FIRST_BYTES = 64 << 10
# As a struct timeval. A rank that stops in the middle of a message keeps rank 0 from hearing others only so long.
_NO_LONGER = struct.pack("@ll", 0, 50_000)
# Longer messages are not copied behind their length, but sent by a second call.
_WORTH_A_CALL = 16 << 10


class Connection:
    """One end of the connection of two ranks. One thread sends at a time, and one receives.

    Attributes:
        room: bytes that can be sent, if all before were read, without waiting for a reader.
    """

    def __init__(self, end: socket.socket) -> None:
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        else:
            _enlarge(end)
        end.settimeout(None)
        self.socket = end
        # The kernel tells twice what it was asked for, and counts what its own records take.
        self.room = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
        self._read = bytearray()

    def send(self, *messages: bytes) -> None:
        """Send messages one after the other. A peer that is gone is noticed by who receives."""
        with suppress(OSError):
            for message in messages:
                length = _LENGTH.pack(len(message))
                if len(message) < _WORTH_A_CALL:
                    self.socket.sendall(length + message)
                else:
                    self.socket.sendall(length, socket.MSG_MORE)
                    self.socket.sendall(message)

    def receive(self) -> memoryview | None:
        """Wait for the next message and return it; None when the peer has closed its end or is gone."""
        while (message := self._next()) is None:
            if not self._fill():
                return None
        return message

    def received(self) -> list[memoryview] | None:
        """Return the messages that have come, once the socket is readable; None as ``receive`` does."""
        if not self._fill():
            return None
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        """Close this end; whoever waits in ``receive`` here gets None. Twice is once."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _fill(self) -> bool:
        """Read what has come; of a message that has begun all, unless that lasts."""
        missing = 0
        if len(self._read) >= _LENGTH.size:
            missing = _LENGTH.size + _LENGTH.unpack_from(self._read)[0] - len(self._read)
        try:
            data = self.socket.recv(missing, socket.MSG_WAITALL) if missing else self.socket.recv(_FIRST_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._read += data
        return bool(data)

    def _next(self) -> memoryview | None:
        if len(self._read) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._read)
        end = _LENGTH.size + length
        if len(self._read) < end:
            return None
        # The message keeps the buffer that it lies in; what is behind it begins another.
        read = memoryview(self._read)
        self._read = bytearray(read[end:])
        return read[_LENGTH.size : end].toreadonly()


class Center:
    """Rank 0's ends of all connections.

    Args:
        connections: by rank.
    """

    def __init__(self, connections: dict[int, Connection]) -> None:
        self.connections = connections
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for rank, connection in connections.items():
            self._selector.register(connection.socket, selectors.EVENT_READ, rank)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_LONGER)

    def received(self, patience: float) -> Iterator[tuple[int, list[memoryview] | None]]:
        """Wait up to ``patience`` seconds, or for ``wake``; yield who has sent what, None where a rank is gone."""
        for key, _ in self._selector.select(patience):
            if key.fileobj is self._woken:
                self._woken.recv(1 << 10)
                continue
            messages = self.connections[key.data].received()
            if messages is None:
                self._selector.unregister(key.fileobj)
            yield key.data, messages

    def wake(self) -> None:
        """End the wait of the thread that is in ``received``."""
        self._wake.send(b"!")

    def close(self) -> None:
        """Close all ends. Only when no thread is in ``received``."""
        self._selector.close()
        for connection in self.connections.values():
            connection.close()
        self._wake.close()
        self._woken.close()


def connect(transport: Transport) -> Center | Connection:
    """Return rank 0's ends, or another rank's one end. All ranks of ``transport`` call it together.

    Raises:
        TransportError: a rank cannot be reached from another, or did not come within the transport's timeout.
    """
    near = next(node for node in transport.nodes if 0 in node)
    if transport.rank:
        length = torch.zeros(1, dtype=torch.int64)
        transport.broadcast(length, 0)
        letter = torch.empty(int(length), dtype=torch.uint8)
        transport.broadcast(letter, 0)
        address = json.loads(letter.numpy().tobytes())
        return Connection(_call(address, transport.rank, near=transport.rank in near, timeout=transport.timeout))
    token = secrets.token_bytes(16)
    name = f"fusionlayer-{secrets.token_hex(8)}"
    with _listener() as listener, _near_listener(name) as near_listener:
        port = listener.getsockname()[1]
        text = json.dumps({"token": token.hex(), "port": port, "hosts": _hosts(), "near": name}).encode()
        transport.broadcast(torch.tensor([len(text)]), 0)
        transport.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
        return Center(_answer((listener, near_listener), token, transport.size, transport.timeout))


def _listener() -> socket.socket:
    listener = None
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    listener = listener or socket.create_server(("", 0), backlog=1024)
    _enlarge(listener)
    return listener


def _enlarge(end: socket.socket) -> None:
    """Give a socket room for more than two segments of a loopback device; ends that are accepted inherit it."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


def _reach_near(name: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    try:
        end.settimeout(_PATIENCE)
        end.connect(f"\0{name}")
    except OSError:
        end.close()
        raise
    return end


def _reach(host: str, port: int) -> socket.socket:
    """Return a connection, with room that was asked for before it was made, as only then it counts."""
    why: OSError | None = None
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        end = socket.socket(family, kind, protocol)
        try:
            _enlarge(end)
            end.settimeout(_PATIENCE)
            end.connect(place)
            return end
        except OSError as error:
            end.close()
            why = error
    raise why or OSError(f"{host} has no address")


def _near_listener(name: str) -> socket.socket:
    """Return a listener for this host, by a name in no file system; TCP within a host stalls when windows fill up."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(1024)
    return listener


def _answer(listeners: Sequence[socket.socket], token: bytes, size: int, timeout: float) -> dict[int, Connection]:
    """Return the connections of all other ranks; who does not know the token is sent away."""
    ends: dict[int, Connection] = {}
    deadline = time.monotonic() + timeout
    while len(ends) < size - 1:
        waiting, _, _ = select.select(listeners, (), (), max(deadline - time.monotonic(), 0.001))
        if not waiting:
            missing = [rank for rank in range(1, size) if rank not in ends]
            raise TransportError(f"ranks {missing} did not reach rank 0 within {timeout:g} s", missing)
        end, _ = waiting[0].accept()
        end.settimeout(_PATIENCE)
        rank = 0
        with suppress(OSError, struct.error):
            given, rank = _HELLO.unpack(end.recv(_HELLO.size, socket.MSG_WAITALL))
            if not hmac.compare_digest(given, token):
                rank = 0
        if not 0 < rank < size:
            end.close()
            continue
        with suppress(OSError):
            end.sendall(b"!")
            ends[rank] = Connection(end)
    return ends


def _call(address: dict[str, Any], rank: int, *, near: bool, timeout: float) -> socket.socket:
    """Return a connection to rank 0 by the first of its addresses that leads there."""
    hosts = list(address["hosts"])
    hosts = [_NEAR, "127.0.0.1", *hosts] if near else [*hosts, "127.0.0.1"]
    hello = _HELLO.pack(bytes.fromhex(address["token"]), rank)
    deadline = time.monotonic() + timeout
    why: OSError | None = None
    while why is None or time.monotonic() < deadline:
        for host in hosts:
            try:
                end = _reach_near(address["near"]) if host == _NEAR else _reach(host, int(address["port"]))
                end.sendall(hello)
                if end.recv(1) == b"!":
                    return end
                end.close()
            except OSError as error:
                why = error
        time.sleep(0.1)
    raise TransportError(
        f"rank {rank} cannot reach rank 0 at port {address['port']} of any of {hosts}: {why}; name the network "
        "interface in GLOO_SOCKET_IFNAME on every rank, or open ports between the hosts",
        [0],
    )


def _hosts() -> list[str]:
    """Return names and addresses of this host by which another may reach it."""
    found = [*reachable_names(), os.environ.get("MASTER_ADDR", "")]
    return list(dict.fromkeys(host for host in found if host and not host.startswith("127.")))
