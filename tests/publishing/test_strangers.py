"""Callers who are no followers: floods of them leave descriptors and time to the training, and places to followers."""

import os
import resource
import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

import fusionlayer as fl
from benchmarks.strangers import flood
from fusionlayer.observe import metrics
from fusionlayer.publishing.address import parse
from fusionlayer.publishing.door import ConnectionLimits, Door, share
from fusionlayer.publishing.frames import HAVE, frame
from fusionlayer.transport.links import gate, introduction
from fusionlayer.transport.links.gate import Refusals
from fusionlayer.transport.links.introduction import Reception
from tests.publishing.states import plain_state, until
from tests.publishing.trainer import LONG, Trainer

SECRET = "a secret of the job"


@contextmanager
def descriptors(limit: int) -> Iterator[None]:
    """Let this process have no descriptor from ``limit`` on."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def held() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.medium
@pytest.mark.parametrize("secret", [SECRET, None])
def test_a_flood_of_callers_takes_neither_descriptors_nor_places(secret: str | None) -> None:
    """With a secret they prove nothing; without one each claims to have a version, and never says that it has ours."""
    says = b"" if secret else bytes(16) + b"stranger".ljust(64, b"\0") + bytes(32) + frame(HAVE, 32, None) + b"f" * 32
    before = held()
    with descriptors(1024), Trainer(secret=secret) as trainer:
        trainer.publish(plain_state(0))
        with fl.subscribe(trainer.publisher.address, secret=secret, name="the first") as first:
            assert first.wait(LONG) == 0
            with flood(trainer.port, 2000, says):
                until(lambda: trainer.publisher.refused >= 100 if secret else len(trainer.outlet._peers) >= 300)
                limits = share()
                assert held() - before < 40 + limits.strangers + (0 if secret else limits.followers)
                with ExitStack() as stack:  # the training's share
                    for _ in range(1024 // 4):
                        stack.enter_context(open(os.devnull))
                trainer.publish(plain_state(1))
                assert first.wait(LONG) == 1, "it has kept its place"
                with fl.subscribe(trainer.publisher.address, secret=secret, name="the second") as second:
                    assert second.wait(LONG) == 1
                    trainer.publish(plain_state(2))
                    assert second.wait(LONG) == 2
                    assert {"the first", "the second"} <= {*trainer.publisher.follower_names}
    until(lambda: held() <= before)


def test_strangers_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    before = metrics.read().get("callers_refused", 0)
    with Trainer(secret=SECRET) as trainer:
        strangers = [socket.create_connection(("127.0.0.1", trainer.port), 5) for _ in range(20)]
        for i, stranger in enumerate(strangers[:15]):
            stranger.sendall(b"GET / HTTP/1.1\r\n" * (i + 1))
        trainer.publish(plain_state(0))
        with fl.subscribe(trainer.publisher.address, secret=SECRET) as follower:
            assert follower.wait(LONG) == 0 and trainer.publisher.followers == 1
            assert metrics.read()["followers"] == 1
        for stranger in (strangers[14], strangers[19]):  # a wrong one and a silent one are sent away
            stranger.settimeout(180)
            with suppress(ConnectionError):
                while stranger.recv(100):
                    pass
        for stranger in strangers:
            stranger.close()
        until(lambda: not trainer.outlet._strangers)
    assert metrics.read()["followers"] == 0 and metrics.read()["callers_refused"] - before == 20
    assert "has not proved to be a follower in time" in caplog.text or trainer.outlet.refused > caplog.text.count(
        "sent"
    )
    assert 0 < caplog.text.count("was sent away") < trainer.outlet.refused == 20


def test_a_follower_that_says_nothing_more_is_sent_away_without_a_secret_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionlayer.publishing.peers._DECODING", 1)
    with Trainer(timeout=2) as trainer, socket.create_connection(("127.0.0.1", trainer.port), 5) as idle:
        idle.sendall(bytes(16) + b"idle".ljust(64, b"\0") + bytes(32) + frame(HAVE, 0, None))
        until(lambda: trainer.publisher.follower_names == ["idle"])
        trainer.publish(plain_state(0))
        until(lambda: not trainer.publisher.followers)


def test_a_quarter_of_the_places_is_for_those_that_have_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a secret any caller may download; followers that come back find a place."""
    monkeypatch.setattr("fusionlayer.publishing.server.share", lambda: ConnectionLimits(4, 8, 1 << 20))
    with Trainer() as trainer, ExitStack() as stack:
        trainer.publish(plain_state(0))
        for _ in range(3):
            assert stack.enter_context(fl.subscribe(trainer.publisher.address)).wait(LONG) == 0
        until(lambda: all(peer.has for peer in [*trainer.outlet._peers.values()]))
        assert trainer.publisher.digest is not None
        for digest, outcome in ((b"", (1, 3)), (trainer.publisher.digest.encode(), (1, 4))):
            caller = stack.enter_context(socket.create_connection(("127.0.0.1", trainer.port), 5))
            said = bytes(16) + b"caller".ljust(64, b"\0") + bytes(32) + frame(HAVE, len(digest), None) + digest
            caller.sendall(said)
            until(lambda outcome=outcome: (trainer.publisher.refused, trainer.publisher.followers) == outcome)


def test_a_door_rests_where_there_are_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its listener would stay readable, and a core busy."""
    monkeypatch.setattr(gate, "EXHAUSTED_SECONDS", 3600.0)
    for left in (0, 1):  # none at all; one of those that are the training's
        selector = selectors.DefaultSelector()
        entrance = Door(parse("tcp://:0"), selector)
        with socket.create_connection(("127.0.0.1", entrance.place.port), 5) as caller:
            ((key, _),) = selector.select(LONG)
            with socket.socket() as probe:
                lowest = probe.fileno()
            with descriptors(lowest + left):
                assert entrance.let_in(key.fileobj) is None  # type: ignore[arg-type]
            assert not selector.get_map() and entrance.look() > 1800
            if left:
                caller.settimeout(180)
                assert caller.recv(1) == b"", "it was sent away"
        entrance.close()
        selector.close()


def test_refusals_fill_no_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(gate.time, "monotonic", lambda: now[0])
    refusals = Refusals(parse("tcp://here:1"))
    for i in range(1000):
        refusals.add(f"10.0.0.1:{i}", "it has not the secret")
    now[0] += 1.0
    refusals.add("10.0.0.2:5", "it came too late")
    assert refusals.count == 1001 and [record.getMessage() for record in caplog.records] == [
        "tcp://here:1: a caller from 10.0.0.1:0 was sent away: it has not the secret",
        "tcp://here:1: a caller from 10.0.0.2:5 was sent away: it came too late; 999 more were sent away since the "
        "last line",
    ]


def test_a_reception_without_descriptors_sends_its_oldest_stranger_away() -> None:
    """A job's own connections: it did not, and asked for the next caller again and again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reception = Reception([listener], b"x" * 16, [1])
        callers = []
        for _ in range(2):
            callers.append(socket.create_connection(listener.getsockname(), 5))
            with socket.socket() as probe:
                lowest = probe.fileno()
            with descriptors(lowest + (len(callers) == 1)):
                reception.admit(LONG)
        callers[0].settimeout(180)
        assert len(callers[0].recv(100)) == 16 and callers[0].recv(1) == b""
        for caller in callers:
            caller.close()
        reception.close()


def test_a_reception_accepts_only_so_many_strangers_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood would keep a core busy that trains, and send callers of the job away before their answer can come."""
    now = [100.0]
    monkeypatch.setattr(gate.time, "monotonic", lambda: now[0])
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener, ExitStack() as stack:
        reception = Reception([listener], b"x" * 16, [1])
        for _ in range(128):
            stack.enter_context(socket.create_connection(listener.getsockname(), 5))
        most = 1 + 1 + introduction._MOST_STRANGERS
        for seconds, accepted in ((0.0, most), (1 / 16, most + 25), (1 / 16, most + 50), (9.0, 128)):
            now[0] += seconds
            for _ in range(200):
                reception.admit(0.0)
            assert len(reception._callers) + reception._refusals.count == accepted
            assert len(reception._callers) <= most
        reception.close()
