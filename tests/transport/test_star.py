"""Connections between rank 0 and the others."""

from __future__ import annotations

import socket

import pytest

from fusionlayer.transport import Transport
from fusionlayer.transport.star import Center, Connection, connect
from tests.ranks import over_threads

pytestmark = pytest.mark.short


def test_messages_of_any_length_and_a_peer_that_goes() -> None:
    def body(transport: Transport) -> list[str]:
        end = connect(transport)
        if isinstance(end, Connection):
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
    """Return the bytes that ``Connection.send`` sends."""
    near, far = socket.socketpair()
    with near, far:
        Connection(near).send(message)
        return far.recv(1 << 20)


def test_a_rank_that_stops_in_a_message_does_not_keep_others_from_being_heard() -> None:
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    center = Center({rank: Connection(near) for rank, (near, _) in pairs.items()})
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

    Connection(pairs[2][1]).send(b"early")
    assert listen(2) == b"early" and not heard[1]
    pairs[1][1].sendall(stopped[40_000:] + framed(b"on"))
    assert listen(1) == message
    assert listen(1) == b"on"
    center.close()
    for _, far in pairs.values():
        far.close()


@pytest.mark.parametrize("at", [0, 5, 10, 12, 3011])
def test_a_flipped_bit_in_a_message_is_damage_and_nobody_waits_for_the_rest(at: int) -> None:
    """In its length, its checksum, the prefix's checksum, its first and its last byte."""
    for hear in ("receive", "received"):
        near, far = socket.socketpair()
        with near, far:
            sent = bytearray(framed(b"before") + framed(bytes(3000)))
            sent[len(framed(b"before")) + at] ^= 1
            near.sendall(sent)
            connection = Connection(far)
            if hear == "receive":
                assert connection.receive() == b"before" and connection.receive() is None
            else:
                assert connection.received() is None
            assert connection.damage is not None and connection.receive() is None


def test_a_stranger_is_sent_away() -> None:
    def body(transport: Transport) -> bool:
        if transport.rank == 0:
            end = connect(transport)
            assert isinstance(end, Center) and list(end.connections) == [1]
            transport.barrier()
            end.close()
            return True
        original = socket.socket.connect

        def intrude(self: socket.socket, place: object) -> None:
            with socket.socket(self.family) as stranger:
                original(stranger, place)
                stranger.sendall(b"x" * 20)
                assert stranger.recv(1) in (b"",)
            original(self, place)

        socket.socket.connect = intrude  # type: ignore[assignment,method-assign]
        try:
            end = connect(transport)
        finally:
            socket.socket.connect = original  # type: ignore[method-assign]
        transport.barrier()
        assert isinstance(end, Connection)
        end.close()
        return True

    assert over_threads(2, body) == [True, True]
