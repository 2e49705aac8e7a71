"""Secrets: what they must be, where they come from and how they are replaced; relays, announced lengths, addresses."""

import logging
import socket
import struct
import tracemalloc
import zlib
from hashlib import sha256
from pathlib import Path

import pytest
import torch

import fusionlayer as fl
from fusionlayer.base import secrets as _secrets
from fusionlayer.base.errors import ConfigError, WireError
from fusionlayer.base.secrets import Keys, Seal
from fusionlayer.publishing import keyring
from fusionlayer.publishing.frames import receive
from fusionlayer.publishing.greeting import Greeting, greet
from fusionlayer.publishing.update import make
from fusionlayer.transport._announced import take_in
from tests.publishing.gateway import Gateway
from tests.publishing.states import plain_state, snapshot, until
from tests.publishing.trainer import LONG, Trainer
from tests.transport.relays import Relay

SECRET, OTHER = "0123456789abcdef", "fedcba9876543210"


def secrets_in(path: Path, *lines: str) -> Path:
    """Put lines into a file with secrets, as a whole."""
    new = path.with_suffix(".new")
    new.touch(0o600)
    new.write_text("\n".join(lines) + "\n")
    new.replace(path)
    return path


def test_a_relay_cannot_replace_weights_behind_the_greeting() -> None:
    with Trainer(secret=SECRET) as trainer:
        trainer.publish(plain_state(0))
        relay, update = Relay(("127.0.0.1", trainer.port)), make(snapshot(0, {"weight": torch.zeros(3)}))
        prefix = struct.pack("<4sQ", b"DATA", update.nbytes)
        forged = prefix + struct.pack("<I", zlib.crc32(prefix)) + b"".join(update.parts)

        def replace(place: int, from_follower: bool, passed: int, data: bytes) -> bytes:
            before, found, _ = data.partition(b"DATA")
            if found:
                relay.alter = lambda *given: given[3] if given[1] else b""  # nothing more of the publisher
            return before + forged if found else data

        relay.alter = replace
        try:
            with fl.subscribe(f"tcp://127.0.0.1:{relay.address[1]}", secret=SECRET) as follower:
                until(lambda: isinstance(follower.trouble, WireError) or follower.latest is not None)
                assert "they were changed or damaged" in str(follower.trouble) and follower.latest is None
        finally:
            relay.close()


def test_a_publisher_must_prove_that_it_has_the_secret() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(Greeting(keyring.keyring_of(OTHER)).opening + b"\1" + bytes(32))
        with pytest.raises(ConfigError, match="different secrets"):
            greet(here, "a follower", SECRET.encode())


def test_versions_come_over_with_tags_and_changed_bits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces of an update, whose digests are made once for all followers."""
    monkeypatch.setattr("fusionlayer.publishing.frames.PIECE_BYTES", 1000)
    with Trainer(secret=SECRET) as trainer, Gateway(trainer.port) as gateway:
        followers = [fl.subscribe(gateway.address, secret=SECRET, name=f"replica {i}") for i in range(3)]
        until(lambda: trainer.publisher.followers == 3)
        assert sorted(trainer.publisher.follower_names) == ["replica 0", "replica 1", "replica 2"]
        for version in range(4):
            gateway.flips = 2
            trainer.publish(plain_state(version, 50_000))
            for follower in followers:
                assert follower.wait(LONG) == version and trainer.is_its(follower)
        assert not gateway.flips
        for follower in followers:
            follower.close()


def test_a_piece_cannot_be_changed_repeated_left_out_moved_or_sent_back() -> None:
    keys = Keys.derive(b"k" * 32, b"both nonces")
    assert len({*keys, *Keys.derive(b"k" * 32, b"others"), *Keys.derive(b"k" * 32, b"both nonces", b"else")}) == 6
    seal = Seal(keys.host)
    digests = [sha256(bytes([i])).digest() for i in range(3)]
    tags = [seal.tag(digest) for digest in digests]
    for order in ((0, 1, 2), (1,), (0, 0), (0, 2)):
        theirs = Seal(keys.host)
        assert [theirs.is_next(tags[i], digests[i]) for i in order][-1] is (order == (0, 1, 2))
    assert not Seal(keys.caller).is_next(tags[0], digests[0]) and not Seal(keys.host).is_next(tags[0], digests[1])


@pytest.mark.parametrize("way", ["publisher", "collective"])
def test_an_announced_length_takes_no_memory(way: str) -> None:
    tracemalloc.start()
    try:
        if way == "publisher":
            near, far = socket.socketpair()
            with near:
                far.sendall(b"abc")
                far.close()
                with pytest.raises(ConnectionError):
                    receive(near, 1 << 40)
        else:
            held: list[int] = []

            def move(piece: torch.Tensor) -> None:
                held.append(piece.numel())
                if len(held) == 2:
                    raise ConnectionError

            with pytest.raises(ConnectionError):
                take_in(1 << 40, move)
            assert max(held) <= 16 << 20
            with pytest.raises(WireError, match="makes no sense"):
                take_in(-1, move)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


# ---- what secrets must be -------------------------------------------------------------------------------------------


def test_secrets_that_can_be_guessed_are_refused(tmp_path: Path) -> None:
    for secret in ("s", "sesame", b"x" * 15):
        with pytest.raises(ConfigError, match="expected at least 16: make one with: python -c"):
            fl.publish({}, "tcp://:0", secret=secret)
        with pytest.raises(ConfigError, match="expected at least 16: make one with: python -c"):
            fl.subscribe("tcp://:1", secret=secret)
    path = tmp_path / "secret"
    for text, mode, told in (
        ("sesame", 0o600, "line 1: a secret of 6 bytes"),
        (f"a:{SECRET}\nb:short", 0o600, "line 2: a secret of 5 bytes"),
        (f":{SECRET}", 0o600, "line 1: no name of a follower"),
        ("# none\n\n", 0o600, "there is none in it; make one"),
        (SECRET, 0o644, r"others may read or change it \(mode 644\); chmod 600 it"),
        (SECRET, 0o660, r"\(mode 660\)"),
        (None, 0, "No such file"),
    ):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
            path.chmod(mode)
        with pytest.raises(ConfigError, match=told):
            fl.publish({}, "tcp://:0", secret=path)
        with pytest.raises(ConfigError, match=told):
            fl.subscribe("tcp://:1", secret=path)
    for name in ("", "a:b", "x" * 65, "line\nend", " a", 3):
        with pytest.raises(ConfigError, match="expected a follower's name"):
            fl.subscribe("tcp://:1", name=name)  # type: ignore[arg-type]


def test_a_guess_of_a_recorded_proof_costs_memory_and_rounds() -> None:
    """A word of six letters was found at 118,000 guesses a second. A secret itself is slowed down once in a process."""
    _secrets.slow_key.cache_clear()
    key = keyring.key(SECRET.encode(), bytes(16))
    assert len(key) == 32 and _secrets._SCRYPT["n"] * _secrets._SCRYPT["r"] * 128 >= 1 << 24, "16 MiB for each guess"
    assert key != keyring.key(SECRET.encode(), b"another publisher") and key == keyring.key(SECRET.encode(), bytes(16))
    assert _secrets.slow_key.cache_info().hits == 1


# ---- files with secrets ---------------------------------------------------------------------------------------------


def test_a_secret_is_replaced_while_followers_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The old one and the new one are accepted, then the old one is not; a broken file changes nothing."""
    caplog.set_level(logging.INFO, "fusionlayer")
    publishers, mine = tmp_path / "publishers", tmp_path / "mine"
    secrets_in(publishers, "# of this month", SECRET)
    secrets_in(mine, SECRET)
    with Trainer(secret=publishers) as trainer:
        address = trainer.publisher.address
        with fl.subscribe(address, secret=mine) as first, fl.subscribe(address, secret=SECRET, name="old") as old:
            trainer.publish(plain_state(0))
            assert first.wait(LONG) == old.wait(LONG) == 0
            secrets_in(publishers, SECRET, OTHER)
            secrets_in(mine, OTHER)
            with fl.subscribe(address, secret=OTHER) as second:
                trainer.publish(plain_state(1))
                assert [each.wait(LONG) for each in (first, second, old)] == [1] * 3
                publishers.write_text("short")
                until(lambda: "the secrets that it had before stay valid" in caplog.text)
                secrets_in(publishers, OTHER)
                with pytest.raises(ConfigError, match="different secrets"):
                    while True:
                        old.wait(LONG)
                trainer.publish(plain_state(2))
                assert first.wait(LONG) == second.wait(LONG) == 2, "it has connected again, by the new secret"
    assert "'old' at 127.0.0.1" in caplog.text and "the secret of 'old' is not valid any more" in caplog.text


def test_each_follower_may_have_a_secret_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainers = secrets_in(tmp_path / "all", f"east:{SECRET}", f"west:{OTHER}")
    monkeypatch.setenv("FUSIONLAYER_PUBLISH_SECRET_FILE", str(trainers))
    with Trainer() as trainer:
        monkeypatch.setenv("FUSIONLAYER_PUBLISH_SECRET_FILE", str(secrets_in(tmp_path / "east", f"east:{SECRET}")))
        address = trainer.publisher.address
        trainer.publish(plain_state(0))
        with fl.subscribe(address) as east, fl.subscribe(address, name="west", secret=OTHER) as west:
            assert east.wait(LONG) == west.wait(LONG) == 0
            assert sorted(trainer.publisher.follower_names) == ["east", "west"]
        for name, secret in (("west", SECRET), ("north", SECRET)):
            with (
                fl.subscribe(address, name=name, secret=secret) as liar,
                pytest.raises(ConfigError, match="different secrets"),
            ):
                liar.wait(LONG)
        until(lambda: trainer.publisher.refused == 2)
        with pytest.raises(ConfigError, match="has none for a follower of the name 'north'"):
            fl.subscribe(address, name="north")
    assert "it calls itself 'west', and has not the secret" in caplog.text
    with pytest.raises(ConfigError, match="has none for a follower of the name ''"):
        fl.publish({}, tmp_path / "folder")  # what signs its files is for all


# ---- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["[::1]", "localhost", "[::]"])
def test_followers_come_by_ipv6_and_by_names_of_both(host: str) -> None:
    if not socket.has_ipv6 or not _has_loopback_6():
        pytest.skip("this host has no IPv6")
    with Trainer(host=host) as trainer:
        trainer.publish(plain_state(0))
        hosts = {"[::1]": ["[::1]"], "localhost": ["127.0.0.1", "localhost"], "[::]": ["127.0.0.1", "[::1]"]}[host]
        for each in hosts:
            with fl.subscribe(f"tcp://{each}:{trainer.port}") as follower:
                assert follower.wait(LONG) == 0 and trainer.is_its(follower)


def _has_loopback_6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
