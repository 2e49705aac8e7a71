"""Connections between rank 0 and the others."""

import os
import re
import socket
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from fusionlayer.base.errors import TransportError
from fusionlayer.coordination.session import Session
from fusionlayer.transport import Transport, star
from fusionlayer.transport.links import introduction
from fusionlayer.transport.links.introduction import ConnectionKeys
from fusionlayer.transport.star import Center, StarConnection, connect
from tests.loops import looped
from tests.ranks import over_threads

from .relays import Relay


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


KEYS = ConnectionKeys(bytes(range(32)), bytes(range(32, 64)))
OTHER_END = ConnectionKeys(KEYS.receiving, KEYS.sending)


def framed(*messages: bytes, keys: ConnectionKeys = OTHER_END) -> list[bytes]:
    """Return the bytes that ``StarConnection.send`` sends, those of each message."""
    near, far = socket.socketpair()
    with near, far:
        connection, sent = StarConnection(near, keys), []
        for message in messages:
            connection.send(message)
            sent.append(far.recv(1 << 20))
        return sent


def test_a_rank_that_stops_in_a_message_does_not_keep_others_from_being_heard() -> None:
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    center = Center({rank: StarConnection(near, KEYS) for rank, (near, _) in pairs.items()})
    message = bytes(range(256)) * 300
    stopped, last = framed(message, b"on")
    pairs[1][1].sendall(stopped[:30_000])
    assert list(center.received(5.0)) == [(1, [])]
    pairs[1][1].sendall(stopped[30_000:40_000])
    heard: dict[int, list[memoryview]] = {1: [], 2: []}

    def listen(rank: int) -> memoryview:
        while not heard[rank]:
            for who, messages in center.received(5.0):
                heard[who] += messages or []
        return heard[rank].pop()

    StarConnection(pairs[2][1], OTHER_END).send(b"early")
    assert listen(2) == b"early" and not heard[1]
    pairs[1][1].sendall(stopped[40_000:] + last)
    assert listen(1) == message
    assert listen(1) == b"on"
    center.close()
    for _, far in pairs.values():
        far.close()


FIRST, SECOND, THIRD = framed(b"first", bytes(3000), b"third")


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def forged(message: bytes, tag: bytes) -> bytes:
    """Return what a program sends that knows the format, and has seen a tag."""
    facts = star._FACTS.pack(len(message), tag)
    return facts + struct.pack("<I", zlib.crc32(facts)) + message


TAG = SECOND[4:20]
ATTACKS = {
    "a bit of the length": flipped(SECOND, 0),
    "a bit of the tag": flipped(SECOND, 5),
    "a bit of the checksum": flipped(SECOND, 21),
    "a bit of the first byte": flipped(SECOND, 24),
    "a bit of the last byte": flipped(SECOND, len(SECOND) - 1),
    "another message with the tag of this one": forged(bytes(2999) + b"x", TAG),
    "a shorter message": forged(bytes(10), TAG),
    "the first again": FIRST,
    "the third before the second": THIRD + SECOND,
    "what this end itself would send": framed(b"first", bytes(3000), keys=KEYS)[1],
    "the second of another connection": framed(b"first", bytes(3000), keys=ConnectionKeys(bytes(32), bytes(32)))[1],
}


@looped("what", ATTACKS)
def test_nobody_between_two_ranks_changes_repeats_moves_or_invents_a_message(what: str) -> None:
    for hear in ("receive", "received"):
        near, far = socket.socketpair()
        with near, far:
            near.sendall(FIRST + ATTACKS[what])
            connection = StarConnection(far, KEYS)
            if hear == "receive":
                assert connection.receive() == b"first" and connection.receive() is None
            else:
                assert connection.received() is None
            assert connection.damage is not None and connection.receive() is None
            assert re.fullmatch(
                r".* from rank 1 to rank 0 was damaged.* on its way: its .* is wrong", connection.damage(1, 0)
            )


@pytest.mark.parametrize("from_caller", [True, False])
@pytest.mark.parametrize("change", [lambda data: flipped(data, len(data) - 1), lambda data: data * 2])
def test_a_relay_behind_the_introduction_cannot_change_a_sum(
    change: Callable[[bytes], bytes], from_caller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It flips a bit of the last byte, which is a tensor's, or repeats what it passes on, either way."""
    reach, relays = star._reach, []

    def through(host: str, port: int) -> socket.socket:
        relays.append(Relay(("127.0.0.1", port)))
        return reach(*relays[-1].address)

    def nowhere(name: str) -> socket.socket:
        raise OSError

    monkeypatch.setattr(star, "_reach", through)
    monkeypatch.setattr(star, "_reach_near", nowhere)

    def attack(place: int, caller: bool, passed: int, data: bytes) -> bytes:
        return change(data) if caller is from_caller else data

    def body(transport: Transport) -> str:
        session = Session(transport)

        def sum_of(name: str) -> list[float]:
            given = torch.full((4,), transport.rank + 1.0)
            return session.wait(session.submit("allreduce", [given], name=name, op="Sum"))[0].tolist()

        assert sum_of("untouched") == [3.0] * 4
        transport.barrier()
        relays[-1].alter = attack
        transport.barrier()
        with pytest.raises(TransportError) as error:
            for number in range(10):  # a message and its copy: the sum of the first one is right
                assert sum_of(f"attacked {number}") == [3.0] * 4
        transport.barrier()
        session.close()
        return str(error.value)

    told = over_threads(2, body)
    way = "from rank 1 to rank 0" if from_caller else "from rank 0 to rank 1"
    assert any(f"{way} was damaged or changed on its way: its authentication tag is wrong" in text for text in told)
    relays[-1].close()


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
    facts = star._FACTS.pack(0xFFFFFFFF, bytes(16))
    far.sendall(facts + struct.pack("<I", zlib.crc32(facts)) + b"abc")
    far.close()
    tracemalloc.start()
    assert StarConnection(near, KEYS).receive() is None
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    near.close()


def test_ranks_of_one_host_listen_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    original = star._listener
    monkeypatch.setattr(star, "_listener", lambda place: places.append(place) or original(place))
    over_threads(2, lambda transport: connect(transport).close())
    assert places == ["127.0.0.1"]
