"""Connections between rank 0 and the others."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import tracemalloc
import zlib
from contextlib import suppress

import pytest

from fusionlayer.transport import Transport, star
from fusionlayer.transport.links import introduction
from fusionlayer.transport.star import Center, StarConnection, connect
from tests.loops import looped
from tests.ranks import over_threads

pytestmark = pytest.mark.short


def test_messages_of_any_length_and_a_peer_that_goes() -> None:
    def body(transport: Transport) -> list[str]:
        end = connect(transport)
        if isinstance(end, StarConnection):
            end.send(b"", bytes([transport.rank]) * 300_000)
            assert end.receive() == b"answer"
            end.close()
            assert end.receive() is None
            return []
        assert isinstance(end, Center)
        lengths: dict[int, list[int]] = {1: [], 2: []}
        gone: set[int] = set()
        while len(gone) < 2:
            for rank, messages in end.received(5.0):
                if messages is None:
                    gone.add(rank)
                    continue
                lengths[rank] += [len(message) for message in messages]
                if len(lengths[rank]) == 2:
                    end.connections[rank].send(b"answer")
        end.close()
        assert lengths == {1: [0, 300_000], 2: [0, 300_000]}
        return []

    over_threads(3, body)


def framed(message: bytes) -> bytes:
    """Return the bytes that ``StarConnection.send`` sends."""
    near, far = socket.socketpair()
    with near, far:
        StarConnection(near).send(message)
        return far.recv(1 << 20)


def test_a_rank_that_stops_in_a_message_does_not_keep_others_from_being_heard() -> None:
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    center = Center({rank: StarConnection(near) for rank, (near, _) in pairs.items()})
    message = bytes(range(256)) * 300
    stopped = framed(message)
    pairs[1][1].sendall(stopped[:30_000])
    assert list(center.received(5.0)) == [(1, [])]
    pairs[1][1].sendall(stopped[30_000:40_000])
    heard: dict[int, list[memoryview]] = {1: [], 2: []}

    def listen(rank: int) -> memoryview:
        while not heard[rank]:
            for who, messages in center.received(5.0):
                heard[who] += messages or []
        return heard[rank].pop()

    StarConnection(pairs[2][1]).send(b"early")
    assert listen(2) == b"early" and not heard[1]
    pairs[1][1].sendall(stopped[40_000:] + framed(b"on"))
    assert listen(1) == message
    assert listen(1) == b"on"
    center.close()
    for _, far in pairs.values():
        far.close()


@looped("at", [0, 5, 10, 12, 3011])
def test_a_flipped_bit_in_a_message_is_damage_and_nobody_waits_for_the_rest(at: int) -> None:
    """In its length, its checksum, the prefix's checksum, its first and its last byte."""
    for hear in ("receive", "received"):
        near, far = socket.socketpair()
        with near, far:
            sent = bytearray(framed(b"before") + framed(bytes(3000)))
            sent[len(framed(b"before")) + at] ^= 1
            near.sendall(sent)
            connection = StarConnection(far)
            if hear == "receive":
                assert connection.receive() == b"before" and connection.receive() is None
            else:
                assert connection.received() is None
            assert connection.damage is not None and connection.receive() is None


def test_strangers_neither_delay_the_ranks_nor_take_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent, slow and wrong callers by the hundred, more than may wait at once, before each rank calls."""
    original = socket.socket.connect
    strangers: list[socket.socket] = []
    openings = [
        b"",
        b"x",
        b"x" * introduction._HELLO.size,
        (1).to_bytes(4, "little") + bytes(48),
        b"GET / HTTP/1.1\r\n\r\n" * 99,
    ]

    def intrude(self: socket.socket, place: object) -> None:
        for number in range(4 * introduction._MOST_STRANGERS):
            stranger = socket.socket(self.family)
            original(stranger, place)
            stranger.sendall(openings[number % len(openings)])
            strangers.append(stranger)
        original(self, place)

    monkeypatch.setattr(socket.socket, "connect", intrude)
    accept = introduction.Reception._accept
    waiting: list[int] = []

    def count(self: introduction.Reception, listener: socket.socket) -> None:
        accept(self, listener)
        waiting.append(len(self._callers))

    monkeypatch.setattr(introduction.Reception, "_accept", count)

    def body(transport: Transport) -> list[int]:
        end = connect(transport)
        transport.barrier()
        ranks = list(end.connections) if isinstance(end, Center) else []
        end.close()
        return sorted(ranks)

    before = len(os.listdir("/proc/self/fd"))
    assert over_threads(3, body) == [[1, 2], [], []]
    assert len(strangers) == 8 * introduction._MOST_STRANGERS and max(waiting) <= introduction._MOST_STRANGERS + 3
    for stranger in strangers:
        stranger.settimeout(180)
        with suppress(ConnectionError):
            while stranger.recv(1 << 10):  # nobody holds its other end any longer
                pass
        stranger.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_rank_0_must_prove_that_it_is_rank_0() -> None:
    here, there = socket.socketpair()
    here.sendall(bytes(introduction.NONCE_BYTES))
    answer = threading.Thread(
        target=lambda: here.recv(introduction._HELLO.size) and here.sendall(bytes(introduction.PROOF_BYTES))
    )
    answer.start()
    assert not introduction.introduce(there, b"secret", 1, time.monotonic() + 180)
    answer.join()
    here.close()
    there.close()


def test_a_length_takes_no_memory() -> None:
    near, far = socket.socketpair()
    facts = struct.pack("<II", 0xFFFFFFFF, 0)
    far.sendall(facts + struct.pack("<I", zlib.crc32(facts)) + b"abc")
    far.close()
    tracemalloc.start()
    assert StarConnection(near).receive() is None
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    near.close()


def test_ranks_of_one_host_listen_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    original = star._listener
    monkeypatch.setattr(star, "_listener", lambda place: places.append(place) or original(place))
    over_threads(2, lambda transport: connect(transport).close())
    assert places == ["127.0.0.1"]
