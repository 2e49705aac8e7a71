"""Followers that serve others: one copy leaves the publisher, the tree heals, and wrong bytes are never shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, WireError
from fusionlayer.publishing import frames
from fusionlayer.publishing.address import parse
from fusionlayer.publishing.client import TcpSource
from fusionlayer.publishing.referral import Referral, address_of, check_serves, miss_of
from fusionlayer.publishing.relays import Relays
from fusionlayer.publishing.server import TcpOutlet
from fusionlayer.publishing.snapshot import Snapshot
from tests.publishing.states import plain_state, until
from tests.publishing.trainer import LONG, Trainer
from tests.tiers import long

SECRET = "0123456789abcdef"
ANY_PORT = "tcp://127.0.0.1:0"


@contextmanager
def tree(trainer: Trainer, count: int, secret: str | None = None) -> Iterator[list[fl.Follower]]:
    """Return so many followers, each of which serves others."""
    address = trainer.publisher.address
    with ExitStack() as stack:
        made = (fl.subscribe(address, relay=ANY_PORT, name=f"{i}", timeout=2, secret=secret) for i in range(count))
        followers = [stack.enter_context(each) for each in made]
        until(lambda: trainer.publisher.followers == count)
        yield followers


def sent(trainer: Trainer) -> list[int]:
    """Return the bytes that each follower was sent by the publisher itself, the most first."""
    return sorted((peer.sent for peer in trainer.outlet._peers.values()), reverse=True)


def test_the_publisher_sends_each_version_once_and_late_followers_read_from_others() -> None:
    with Trainer(keep=4) as trainer, tree(trainer, 5) as followers:
        for version in range(4):
            trainer.publish(plain_state(version))
            for follower in followers:
                assert follower.wait(LONG) == version and trainer.is_its(follower)
            assert trainer.publisher.flush(LONG)
        most, *others = sent(trainer)
        assert all(10 * other < most for other in others)
        with fl.subscribe(trainer.publisher.address, name="late") as late:
            assert late.wait(LONG) == 3 and trainer.is_its(late)
            assert sent(trainer)[0] == most and not late.relay


def test_the_tree_heals_when_relays_end() -> None:
    with Trainer() as trainer, tree(trainer, 5) as followers:
        trainer.publish(plain_state(0))
        for follower in followers:
            follower.wait(LONG)
        # Each serves others now; after each version one of them is gone.
        for version in range(1, 5):
            followers.pop(0).close()
            trainer.publish(plain_state(version))
            for follower in followers:
                assert follower.wait(LONG) == version and trainer.is_its(follower)


def test_a_follower_whose_relay_fails_waits_for_no_one_who_waits_for_it() -> None:
    relays = Relays()
    version = Snapshot("run", 1, {})
    nothing = {"has": None, "parent": "", "assigned": None}
    peers: list[Any] = [SimpleNamespace(serves=f"tcp://h:{i}", missed=set(), name=str(i), **nothing) for i in range(6)]
    parents = [relays.parent(version, peer, peers) for peer in peers]
    assert parents == ["", *[peer.serves for peer in peers[:2] for _ in "ab"], peers[2].serves]
    peers[1].missed = {peers[0].serves}
    assert relays.parent(version, peers[1], peers) == "", "all others have nothing yet"
    peers[2].has = version.digest
    assert relays.parent(version, peers[1], peers) == peers[2].serves
    relays.exclude(peers[3].serves, "4")
    peers[4].missed = {"tcp://h:9"}
    peers[3].has = version.digest
    assert relays.parent(version, peers[4], peers) == ""
    assert relays.parent(Snapshot("run", 2, {}), peers[5], peers) == ""


def test_a_relay_is_not_sent_to_itself_or_to_one_that_waits_for_it() -> None:
    version = Snapshot("run", 1, {})
    nothing = {"has": None, "parent": "", "assigned": None}
    peers: list[Any] = [SimpleNamespace(serves=f"tcp://h:{i}", missed=set(), name=str(i), **nothing) for i in range(3)]
    relays = Relays()
    for peer in peers:
        peer.parent, peer.assigned = relays.parent(version, peer, peers), version
    assert [peer.parent for peer in peers] == ["", peers[0].serves, peers[0].serves]
    peers[2].parent = peers[1].serves
    peers[0].assigned = None  # it has connected again
    assert relays.parent(version, peers[0], peers) == ""
    peers[1].has = version.digest
    assert relays.parent(version, peers[0], peers) == peers[1].serves


def test_a_follower_can_only_miss_the_relay_to_which_it_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fusionlayer")
    outlet = TcpOutlet(parse(ANY_PORT), 2, None, None, 2.0)
    source = TcpSource(outlet.place, None, None, None, 2.0)
    assert source.next(None) is None
    (peer,) = outlet._peers.values()
    peer.finds, peer.parent = True, "tcp://h:1"
    assert source._channel is not None
    source._channel.say(frames.MISS, b'["tcp://h:2", true]')
    until(lambda: not outlet._peers)
    assert "relay 'tcp://h:2' in vain, to which it was not sent" in caplog.text and not peer.missed
    source.close()
    outlet.close(0)


def test_relays_follow_a_publisher_that_begins_again_with_lower_numbers() -> None:
    with Trainer() as trainer, tree(trainer, 3) as followers:
        for version in (7, 8):
            trainer.publish(plain_state(version), version)
            for follower in followers:
                assert follower.wait(LONG) == version
        port = trainer.port
        trainer.publisher.close(0)
        trainer.begin(port)
        until(lambda: trainer.publisher.followers == 3)
        trainer.publish(plain_state(0), 0)
        until(lambda: all(follower.latest == 0 for follower in followers))
        for version in range(3):
            if version:
                trainer.publish(plain_state(version), version)
            for follower in followers:
                assert follower.wait(LONG) == version and trainer.is_its(follower)
        assert not any(peer.missed for peer in trainer.outlet._peers.values()), "relays send what is asked of them"


@pytest.mark.parametrize("lie", ["bytes", "number"])
def test_a_relay_that_sends_other_weights_is_excluded(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    """It has the secret, and its update is consistent; only the publisher's digest shows what it is."""

    def forged(snapshot: Snapshot) -> Snapshot:
        if lie == "number":
            return Snapshot(snapshot.run, snapshot.version + 1, snapshot.tensors)
        tensors: dict[str, Tensor] = {name: x.clone() for name, x in snapshot.tensors.items()}
        tensors["bias"].view(torch.int32).view(-1)[0] ^= 1
        return Snapshot(snapshot.run, snapshot.version, tensors)

    with Trainer(secret=SECRET) as trainer, tree(trainer, 4, SECRET) as followers:
        for follower in followers:
            outlet = follower._outlet
            assert outlet is not None
            real = outlet.offer
            outlet.offer = lambda snapshot, real=real: real(forged(snapshot))  # type: ignore[method-assign]
        for version in range(3):
            trainer.publish(plain_state(version))
            for follower in followers:
                assert follower.wait(LONG) == version and trainer.is_its(follower)
        assert "of another digest: it is not used any more" in caplog.text


def test_arguments_and_messages_are_checked() -> None:
    for options in ({"relay": "file:///x"}, {"relay": ANY_PORT, "tls": fl.TLS(host="x")}):
        with pytest.raises(ConfigError, match="over TCP and without tls"):
            fl.subscribe("tcp://127.0.0.1:9", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no relay"):
        fl.subscribe("file:///x", relay=ANY_PORT)
    right = Referral("run", 3, "ab", "tcp://127.0.0.1:5")
    assert Referral.of(right.text()) == right
    for text in (b"", b"[]", b"[1, 2, 3, 4]", b'["a", true, "b", "c"]', b"[" * 5000, b"\xff"):
        with pytest.raises(WireError):
            Referral.of(text)
        with pytest.raises(WireError):
            miss_of(text)
        with pytest.raises(WireError):
            address_of(text, "127.0.0.1:1")
    near = parse("tcp://127.0.0.1:7")
    with pytest.raises(ConfigError, match=r"relay='tcp://0\.0\.0\.0:PORT'"):
        check_serves(near, "10.0.0.3", "10.0.0.4")
    for own, publisher in (("127.0.0.1", "127.0.0.1"), ("10.0.0.3", "10.0.0.3")):
        check_serves(near, own, publisher)
    check_serves(parse("tcp://0.0.0.0:7"), "10.0.0.3", "10.0.0.4")
    assert address_of(b"tcp://0.0.0.0:7", "10.0.0.3:99") == "tcp://10.0.0.3:7"
    assert address_of(b"tcp://[::]:7", "[fd00::3]:99") == "tcp://[fd00::3]:7"
    assert address_of(b"tcp://10.0.0.9:7", "10.0.0.3:99") == "tcp://10.0.0.9:7"


@long(guarded_by="tests/publishing/test_relays.py::test_the_tree_heals_when_relays_end")
@pytest.mark.timeout(1800)
def test_two_hundred_relays_end_one_after_the_other() -> None:
    with Trainer() as trainer, fl.subscribe(trainer.publisher.address, name="constant", timeout=2) as constant:
        relays: list[fl.Follower] = []
        for version in range(200):
            while len(relays) < 4:
                relays.append(fl.subscribe(trainer.publisher.address, relay=ANY_PORT, timeout=2))
                until(lambda: trainer.publisher.followers == len(relays) + 1)
            trainer.publish(plain_state(version))
            relays.pop(version % 4).close()  # in the middle of it
            assert constant.wait(LONG) == version and trainer.is_its(constant)
        for relay in relays:
            relay.close()
