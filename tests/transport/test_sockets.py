"""Connections of our own: what the link promises beyond what every transport does, with connections that fail."""

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusionlayer.base.errors import ConfigError
from fusionlayer.transport import Transport
from fusionlayer.transport.links import faster, introduction
from fusionlayer.transport.links.base import DamagedMessage, LinkError, LinkMessage
from fusionlayer.transport.links.socket_options import SocketOptions
from fusionlayer.transport.links.sockets import WINDOW_BYTES, SocketLink
from tests.loops import looped
from tests.ranks import over_threads

from .relays import links, together
from .tags import FRAME_BYTES, frame

MIB = 1 << 20


def noise(nbytes: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def send(link: SocketLink, data: Tensor, key: int, to: int) -> None:
    link.exchange([LinkMessage(to, data, key)], [])


def receive(link: SocketLink, nbytes: int, key: int, source: int) -> Tensor:
    data = torch.full((nbytes,), 99, dtype=torch.uint8)
    link.exchange([], [LinkMessage(source, data, key)])
    return data


def swap(made: list[SocketLink], nbytes: int, key: int) -> None:
    """Let two links exchange messages, and compare what comes with what was sent."""

    def one(rank: int) -> None:
        got = torch.empty(nbytes, dtype=torch.uint8)
        made[rank].exchange([LinkMessage(1 - rank, noise(nbytes, key + rank), key)], [LinkMessage(1 - rank, got, key)])
        assert torch.equal(got, noise(nbytes, key + 1 - rank))

    together(lambda: one(0), lambda: one(1))


@looped("guards", [{}, {"authenticate": True}, {"encrypt": True}])
def test_connections_share_a_message_and_may_be_cut_in_its_middle(
    guards: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    """All bytes arrive, the log says what was lost, and connections that are made again carry bytes again."""
    caplog.clear()
    caplog.set_level(logging.WARNING)
    with links(connections=4, **guards) as (made, (relay,)):
        swap(made, 8 * MIB, 1)
        assert min(made[0].sent()[1]) > 0, made[0].sent()
        relay.open = False
        gone: Counter[int] = Counter()

        def cut(place: int, from_caller: bool, passed: int, data: bytes) -> bytes | None:
            gone[place] += len(data)
            return None if place in (1, 2) and gone[place] > 50_000 else data

        relay.alter = cut
        for key in (2, 4):
            swap(made, 8 * MIB, key)
        assert all(made[rank].states()[1 - rank].count(1) == 2 for rank in (0, 1))
        before = made[1].sent()[0]
        relay.alter = lambda *given: given[3]
        relay.open = True
        while any(made[rank].states()[1 - rank].count(1) < 4 for rank in (0, 1)):
            swap(made, 1000, 6)
            time.sleep(0.01)
        swap(made, 8 * MIB, 8)
        assert all(now > then for now, then in zip(made[1].sent()[0], before, strict=True))
        while caplog.text.count("used again") < 2:
            time.sleep(0.01)
    assert "are lost; 2 of 4 carry what is sent" in caplog.text or "are lost; 3 of 4 carry" in caplog.text


def test_what_was_sent_before_a_cut_is_sent_again_between_calls() -> None:
    """The call that sent it has returned, its memory is in other use, and what it sent never arrived."""
    with links(connections=2) as (made, (relay,)):
        swap(made, 100, 1)
        hold = threading.Event()
        relay.holding = {0: hold, 1: hold}
        data = noise(3000, 5)
        send(made[0], data, 5, 1)
        data.zero_()
        lost: list[int] = []

        def lose_once(place: int, from_caller: bool, passed: int, data: bytes) -> bytes | None:
            if from_caller or len(data) < 2000 or lost:
                return data
            lost.append(place)
            return None

        relay.holding = {}
        relay.alter = lose_once
        hold.set()
        assert torch.equal(receive(made[1], 3000, 5, 0), noise(3000, 5))
        assert lost and sum(made[0].sent()[1]) == 100 + 2 * 3000


def test_messages_that_are_equal_but_for_their_bytes_come_in_the_order_of_sending() -> None:
    with links(connections=2) as (made, (relay,)):
        held = threading.Event()
        relay.holding = {0: held}
        send(made[1], noise(5000, 1), 7, 0)
        send(made[1], noise(5000, 2), 7, 0)  # by the other connection, which is free
        assert min(made[1].sent()[0]) == 5000
        first, second = (torch.empty(5000, dtype=torch.uint8) for _ in range(2))
        threading.Timer(0.3, held.set).start()
        made[0].exchange([], [LinkMessage(1, first, 7), LinkMessage(1, second, 7)])
        assert torch.equal(first, noise(5000, 1)) and torch.equal(second, noise(5000, 2))


def test_messages_wait_for_the_call_that_wants_them_up_to_the_window() -> None:
    with links(connections=2, timeout=1.0) as (made, _):
        for key, nbytes in ((1, 1), (2, 70_000), (3, 3 * MIB)):
            send(made[0], noise(nbytes, key), key, 1)
        for key, nbytes in ((3, 3 * MIB), (1, 1), (2, 70_000)):
            assert torch.equal(receive(made[1], nbytes, key, 0), noise(nbytes, key))
        with pytest.raises(LinkError, match="no end within 1 s"):
            send(made[0], torch.zeros(2 * WINDOW_BYTES + 16 * MIB, dtype=torch.uint8), 4, 1)


def test_early_messages_leave_the_window_when_they_are_received() -> None:
    with links() as (made, _):
        for key in range(4):
            send(made[0], torch.full((WINDOW_BYTES // 2,), key, dtype=torch.uint8), key, 1)
            assert (receive(made[1], WINDOW_BYTES // 2, key, 0) == key).all()


@looped("at", [20, FRAME_BYTES + 5, FRAME_BYTES + 99_999])
def test_damage_is_told(at: int) -> None:
    """A flipped bit in a frame, or in what follows it."""
    with links(checked=True) as (made, (relay,)):
        swap(made, 1000, 1)

        def flip(place: int, from_caller: bool, passed: int, data: bytes) -> bytes:
            here = start + at - passed
            if not from_caller or not 0 <= here < len(data):
                return data
            return data[:here] + bytes([data[here] ^ 16]) + data[here + 1 :]

        # What has gone before: the hello, 52 bytes, and the frame of 1000 bytes with perhaps a note behind it.
        noted: list[int] = []
        relay.alter = lambda place, from_caller, passed, data: noted.append(passed) or data  # type: ignore[func-returns-value]
        swap(made, 1000, 3)
        start = max(noted) + FRAME_BYTES + 1000
        relay.alter = flip

        def listen() -> None:
            with pytest.raises(DamagedMessage, match="from rank 1 to rank 0 was damaged"):
                receive(made[0], 100_000, 5, 1)

        def speak() -> None:
            with suppress(LinkError):
                send(made[1], noise(100_000, 5), 5, 0)

        together(listen, speak)


def test_the_last_connection_that_is_lost_ends_the_call_and_names_the_peer() -> None:
    with links(3, connections=2) as (made, (relay,)):
        relay.open = False

        def wait_in_vain() -> int:
            with pytest.raises(LinkError, match="its connections are lost") as caught:
                made[0].exchange([], [LinkMessage(peer, torch.empty(9, dtype=torch.uint8), 1) for peer in (1, 2)])
            return caught.value.peer

        def leave() -> None:
            send(made[2], torch.zeros(9, dtype=torch.uint8), 1, 0)
            made[1].cut()

        assert together(wait_in_vain, leave)[0] == 1


def test_a_link_that_closes_delivers_first_what_it_has_sent() -> None:
    with links(connections=4) as (made, (relay,)):
        sent = noise(2 * MIB, 3)
        held = threading.Event()
        relay.holding = dict.fromkeys(range(4), held)
        thread = threading.Thread(target=send, args=(made[1], sent, 3, 0))
        thread.start()
        held.set()
        thread.join()
        made[1].close()
        assert torch.equal(receive(made[0], 2 * MIB, 3, 1), sent)
        with pytest.raises(LinkError, match="connections are lost"):
            receive(made[0], 1, 4, 1)
        with pytest.raises(LinkError, match="closed"):
            send(made[1], sent, 5, 0)


def test_a_call_that_waits_ends_when_another_thread_closes_the_link() -> None:
    with links(connections=2) as (made, _):
        threading.Timer(0.2, made[0].close).start()
        with pytest.raises(LinkError, match="the connections are closed"):
            receive(made[0], 10, 1, 1)
        with pytest.raises(LinkError, match="lost"):
            receive(made[1], 10, 1, 0)


def test_strangers_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """Silent, half-open and talkative ones, callers that guess, and one that knows the secret but no number of ours."""
    with links(connections=2) as (made, (relay,)):
        place = relay._to
        before = len(os.listdir("/proc/self/fd"))
        strangers = []
        for number in range(2 * introduction._MOST_STRANGERS):
            stranger = socket.create_connection(place)
            stranger.sendall([b"", b"x", b"\0" * 52, b"GET / HTTP/1.1\r\n\r\n" * 99][number % 4])
            if number % 4 == 3:
                stranger.close()
            strangers.append(stranger)
        known = socket.create_connection(place)
        assert made[0]._keeper is not None
        with pytest.raises(OSError):
            introduction.introduce(known, made[0]._keeper._secret, 2, time.monotonic() + 180)
        guess = socket.create_connection(place)
        with pytest.raises(OSError):
            introduction.introduce(guess, b"guess", 1, time.monotonic() + 180)
        assert "rank 0: a caller from 127.0.0.1:" in caplog.text and caplog.text.count("was sent away") < 30
        swap(made, MIB, 1)
        assert made[0].states()[1] == made[1].states()[0] == [1, 1]
        for stranger in (*strangers, known, guess):
            stranger.close()
        while len(os.listdir("/proc/self/fd")) > before:
            time.sleep(0.02)


@contextmanager
def raw(link: SocketLink, index: int) -> Iterator[socket.socket]:
    """Yield the far end of what ``link`` takes for a connection to rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as far:
        link.add(1, index, listener.accept()[0].detach(), KEYS)
        yield far


# A link adds them only where it is sealed.
KEYS = introduction.ConnectionKeys(bytes(range(32)), bytes(range(32, 64)))


NONSENSE = {
    "a length of nothing": {"length": 0, "nbytes": 0},
    "a length beyond all memory": {"length": 1 << 60, "nbytes": 4096},
    "chunks of no bytes": {"chunk": 0},
    "chunks that nobody makes": {"chunk": 2 << 20, "length": 2 << 20, "nbytes": 2 << 20},
    "a chunk beyond its message": {"index": 1},
    "more than the chunk has": {"nbytes": 8192},
    "a predecessor before all": {"back": 9},
    "acknowledgements of what was not sent": {"received": 7},
    "no kind that there is": {"kind": 9},
    "no magic": {"magic": 1},
}


@looped("what", NONSENSE)
def test_sizes_from_the_wire_are_checked(what: str) -> None:
    """A peer that has proved to be the job's may still send what makes no sense."""
    with links() as (made, _), raw(made[0], 0) as far:
        far.sendall(frame(**NONSENSE[what]) + bytes(4096))
        with pytest.raises(LinkError, match="makes no sense"):
            receive(made[0], 4096, 5, 1)


def test_what_comes_late_by_one_connection_changes_nothing_that_has_come_by_another() -> None:
    """A chunk is stuck half way when its sender gives it to another connection. Later the other half comes."""
    with links(connections=2) as (made, _), raw(made[0], 0) as slow, raw(made[0], 1) as fast:
        got = torch.zeros(4096, dtype=torch.uint8)
        call = threading.Thread(target=made[0].exchange, args=([], [LinkMessage(1, got, 5)]))
        call.start()
        slow.sendall(frame() + bytes([7]) * 2000)
        while not (got == 7).any():
            time.sleep(0.01)
        fast.sendall(frame() + bytes([3]) * 4096)
        call.join()
        assert (got == 3).all()
        slow.sendall(bytes([7]) * 2096 + frame(serial=2, key=6) + bytes([4]) * 4096)
        assert (receive(made[0], 4096, 6, 1) == 4).all()  # so all before it was read
        assert (got == 3).all()
        fast.sendall(frame() + bytes([9]) * 4096 + frame(serial=3, received=0) + bytes([5]) * 4096)
        assert (receive(made[0], 4096, 5, 1) == 5).all() and (got == 3).all()


def test_a_peer_cannot_fill_the_memory() -> None:
    with links() as (made, _), raw(made[0], 0) as far:

        def flood() -> None:
            with suppress(OSError):
                for number in range(WINDOW_BYTES // MIB + 16):
                    far.sendall(frame(serial=number + 1, length=MIB, chunk=MIB, nbytes=MIB) + bytes(MIB))

        def listen() -> None:
            with pytest.raises(LinkError, match="makes no sense"):
                receive(made[0], 4096, 5, 1)

        together(flood, listen)


def test_interfaces_and_numbers_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"interfaces=\['eth77'\]: 'eth77' is no interface .*expected some of: .*lo"):
        SocketOptions(2, ("eth77",))
    assert SocketOptions(2, ("lo",)).interfaces == ("lo",)


class Timed:
    """A link whose exchanges take a given time; sums go over a transport of threads."""

    device, only_queues = torch.device("cpu"), False

    def __init__(self, transport: Transport, seconds: float) -> None:
        self._transport, self.seconds = transport, seconds

    def all_reduce(self, x: Tensor, key: int) -> None:
        self._transport.all_reduce(x)


@pytest.mark.parametrize("seconds", [(0.0, 3.0), (3.0, 0.0), (0.0, 0.1)])
def test_what_is_faster_for_one_rank_alone_is_not_taken_by_it(
    seconds: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faster, "_time", lambda link, *_: link.seconds)

    def body(transport: Transport) -> bool:
        links = Timed(transport, seconds[transport.rank]), Timed(transport, 1.0)
        return faster.is_faster(*links, transport.rank, transport.size)  # type: ignore[arg-type]

    assert over_threads(2, body) == [sum(seconds) < 2.0 / 1.1] * 2
