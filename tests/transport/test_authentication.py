"""Connections of our own whose frames carry tags: what a program between two ranks cannot do."""

import itertools
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from fusionlayer.base import libraries
from fusionlayer.base.errors import ConfigError
from fusionlayer.transport.links import introduction, sockets
from fusionlayer.transport.links.base import DamagedMessage, LinkError
from fusionlayer.transport.links.socket_options import SocketOptions
from fusionlayer.transport.links.sockets import SocketLink
from tests.loops import looped

from .relays import Relay, links, together
from .tags import FRAME_BYTES, HEAD, PAYLOAD, TAG_BYTES, frame, sealed, tag
from .test_sockets import noise, raw, receive, send, swap

MINE, THEIRS = bytes(range(32)), bytes(range(32, 64))
HEAD_BYTES = FRAME_BYTES + 2 * TAG_BYTES
HELLO_BYTES = introduction._HELLO.size
REFUSED = r"was damaged or changed on its way: its authentication tag is wrong"


def read(far: socket.socket, nbytes: int) -> bytes:
    got = b""
    while len(got) < nbytes:
        got += far.recv(nbytes - len(got))
    return got


def test_frames_have_the_tags_of_the_reference_both_ways() -> None:
    """For payloads that fill blocks and leave rests, in frames one after the other."""
    with links(authenticate=True) as (made, _), raw(made[0], 0) as far:
        for number, nbytes in enumerate((1, 15, 16, 17, 63, 64, 65, 1000, 4096, 100_000), 1):
            payload = bytes(noise(nbytes, number).tolist())
            about = {"serial": number, "key": number, "length": nbytes, "nbytes": nbytes, "chunk": 128 << 10}
            far.sendall(sealed(frame(**about), payload, THEIRS, number))
            assert bytes(receive(made[0], nbytes, number, 1).tolist()) == payload
        ours: dict[int, bytes] = {}
        send(made[0], noise(70_000, 3), 77, 1)
        for number in itertools.count(1):
            head = read(far, HEAD_BYTES)
            assert head[-TAG_BYTES:] == tag(MINE, HEAD, number, head[:-TAG_BYTES])
            if head[2] == 1:  # a chunk; notes tell what has come
                ours[number] = payload = read(far, 70_000)
                assert head[FRAME_BYTES:-TAG_BYTES] == tag(MINE, PAYLOAD, number, payload)
                break
        assert [*ours.values()] == [bytes(noise(70_000, 3).tolist())]


def alter(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


PAST = bytes(4096)
GOOD = sealed(frame(), PAST, THEIRS, 1)
SECOND = frame(serial=2, key=6)
FORGERIES = {
    "another length in the frame": alter(GOOD, 16),
    "another key in the frame": alter(GOOD, 24),
    "another tag of the payload": alter(GOOD, FRAME_BYTES),
    "another tag of the frame": alter(GOOD, FRAME_BYTES + TAG_BYTES),
    "another first byte": alter(GOOD, HEAD_BYTES),
    "another last byte": alter(GOOD, len(GOOD) - 1),
    "the first frame again": GOOD + GOOD,
    "the second frame first": sealed(SECOND, PAST, THEIRS, 2) + GOOD,
    "another payload with the tag of an earlier one": GOOD
    + sealed(SECOND, PAST, THEIRS, 2)[: FRAME_BYTES + TAG_BYTES]
    + tag(THEIRS, HEAD, 2, SECOND + GOOD[FRAME_BYTES : FRAME_BYTES + TAG_BYTES])
    + PAST,
    "what this rank itself would send": sealed(frame(), PAST, MINE, 1),
    "tags for the other part": frame() + tag(THEIRS, HEAD, 1, PAST) + tag(THEIRS, PAYLOAD, 1, GOOD[:80]) + PAST,
    "no tags": frame() + PAST + bytes(2 * TAG_BYTES),
}


@looped("what", FORGERIES)
def test_forgeries_end_the_call_and_name_the_peer(what: str) -> None:
    """Those that come first, and those behind a frame that is good."""
    data = FORGERIES[what]
    with links(authenticate=True) as (made, _), raw(made[0], 0) as far:
        far.sendall(data)
        with pytest.raises(DamagedMessage, match="from rank 1 to rank 0 " + REFUSED) as caught:
            if data.startswith(GOOD):
                assert (receive(made[0], 4096, 5, 1) == 0).all()
                receive(made[0], 4096, 6, 1)
            else:
                receive(made[0], 4096, 5, 1)
        assert caught.value.peer == 1


@contextmanager
def on_hosts_of_their_own(
    monkeypatch: pytest.MonkeyPatch, connections: int = 1
) -> Iterator[tuple[list[SocketLink], Relay]]:
    """Yield links with the settings that a user gets, as if their ranks were on two hosts, and the relay between."""
    hosts = itertools.count()
    monkeypatch.setattr(sockets, "node_name", lambda: f"host {next(hosts)}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with links(connections=connections) as (made, relays):
        yield made, relays[0]


def test_a_relay_between_hosts_cannot_change_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_hosts_of_their_own(monkeypatch) as (made, relay):
        assert not made[0].is_alone and made[0].is_sealed
        relay.alter = lambda place, from_caller, passed, data: data[:-1] + b"\0"

        def listen() -> None:
            with pytest.raises(DamagedMessage, match=REFUSED):
                receive(made[0], 1000, 1, 1)

        together(listen, lambda: send(made[1], torch.full((1000,), 7, dtype=torch.uint8), 1, 0))


def test_frames_of_an_earlier_connection_are_refused_on_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_hosts_of_their_own(monkeypatch, connections=2) as (made, relay):
        recorded: list[bytes] = []

        def record(place: int, from_caller: bool, passed: int, data: bytes) -> bytes:
            if from_caller and place == 0:
                recorded.append(data)
            return data

        relay.alter = record
        while not recorded:
            swap(made, 100_000, 2)
        relay.alter = lambda place, from_caller, passed, data: (
            b"".join(recorded) + data if from_caller and place > 1 and passed >= HELLO_BYTES else data
        )
        relay.cut(0)

        def listen() -> None:
            with pytest.raises(DamagedMessage, match=REFUSED):
                for key in itertools.count(4):
                    receive(made[0], 1000, key, 1)
            made[0].cut()

        def speak() -> None:
            with suppress(LinkError):
                for key in itertools.count(4):
                    send(made[1], noise(1000, key), key, 0)

        together(listen, speak)


def test_a_caller_cannot_be_led_to_another_rank_than_it_calls() -> None:
    """All ranks know the secret, so a relay could otherwise let rank 2 take rank 1 for rank 0."""
    with links(3) as (made, _):
        keeper = made[1]._keeper
        assert keeper is not None
        for host, expected in ((0, False), (1, True)):
            end = socket.create_connection(keeper.addresses[0][0])
            keys = None
            with suppress(OSError):
                keys = introduction.introduce(end, keeper._secret, 2, time.monotonic() + 180, host)
            assert (keys is not None) == expected
            end.close()


def test_both_ends_have_the_same_keys_and_no_two_connections_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reception = introduction.Reception([listener], b"secret", [4])
        seen: set[bytes] = set()
        for _ in range(2):
            ends: list[socket.socket] = [socket.create_connection(listener.getsockname())]
            call: Callable[[], object] = lambda: introduction.introduce(ends[0], b"secret", 4, time.monotonic() + 180)  # noqa: B023, E731
            mine: list[object] = []
            thread = threading.Thread(target=lambda: mine.append(call()))  # noqa: B023
            thread.start()
            admitted: list[tuple[int, socket.socket, introduction.ConnectionKeys]] = []
            while not admitted:
                admitted = reception.admit(1)
            thread.join()
            number, end, theirs = admitted[0]
            assert number == 4 and mine == [introduction.ConnectionKeys(theirs.receiving, theirs.sending)]
            seen |= {theirs.sending, theirs.receiving}
            end.close()
            ends[0].close()
        reception.close()
    assert len(seen) == 4 and {len(each) for each in seen} == {32}


def test_what_is_encrypted_cannot_be_read() -> None:
    with links(connections=2, encrypt=True) as (made, (relay,)):
        assert made[0].is_sealed
        seen: list[bytes] = []
        relay.alter = lambda place, from_caller, passed, data: seen.append(data) or data  # type: ignore[func-returns-value]
        sent = torch.full((300_000,), 7, dtype=torch.uint8)
        got = together(lambda: receive(made[0], 300_000, 1, 1), lambda: send(made[1], sent, 1, 0))[0]
        assert torch.equal(got, sent)
        swap(made, 300_000, 2)
        read = b"".join(seen)
        assert (
            len(read) > 900_000 and bytes([7] * 16) not in read and bytes(noise(300_000, 3)[:16].tolist()) not in read
        )


def test_encrypted_bytes_that_were_changed_end_the_call_and_name_the_peer() -> None:
    with links(encrypt=True) as (made, (relay,)):
        swap(made, 1000, 1)
        relay.alter = lambda place, from_caller, passed, data: alter(data, len(data) // 2)

        def listen() -> None:
            with pytest.raises(DamagedMessage, match="from rank 1 to rank 0 " + REFUSED):
                receive(made[0], 1000, 3, 1)

        together(listen, lambda: send(made[1], noise(1000, 3), 3, 0))


def test_tls_needs_the_key_of_the_connection_on_both_ends() -> None:
    with links(encrypt=True) as (made, _), socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        made[0].add(1, 0, listener.accept()[0].detach(), introduction.ConnectionKeys(MINE, THEIRS))
        made[1].add(0, 0, far.detach(), introduction.ConnectionKeys(alter(THEIRS, 5), MINE))

        def fail(rank: int) -> None:
            with pytest.raises(LinkError, match=f"{REFUSED}|its connections are lost"):
                receive(made[rank], 10, 1, 1 - rank)
            made[rank].cut()

        together(lambda: fail(0), lambda: fail(1))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_a_certificate_does_not_stand_in_for_the_key(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=host -keyout"
    subprocess.run([*make.split(), key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with links(encrypt=True) as (made, _), socket.create_server(("127.0.0.1", 0)) as listener:
        made[1].add(
            0, 0, socket.create_connection(listener.getsockname()).detach(), introduction.ConnectionKeys(MINE, THEIRS)
        )
        end = listener.accept()[0]

        def pretend() -> None:
            with pytest.raises(OSError):
                context.wrap_socket(end, server_side=True)
            end.close()

        def call() -> None:
            with pytest.raises(LinkError, match=REFUSED):
                receive(made[1], 10, 1, 0)

        together(pretend, call)


def test_without_openssl_nothing_pretends_to_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.cpu(), "fl_link_can_encrypt", lambda: 0)
    with pytest.raises(ConfigError, match="encrypt=True: needs OpenSSL 3, libssl.so.3; install it"):
        SocketOptions(encrypt=True)
