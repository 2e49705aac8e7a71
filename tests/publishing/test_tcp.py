"""Over TCP: late joiners, lost links, damage, slow followers, restarted publishers, strangers; in one process."""

import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, FusionLayerError, TransportError, UsageError
from fusionlayer.publishing.server import TcpOutlet
from tests.publishing.gateway import Gateway
from tests.publishing.states import bits, odd_state, plain_state, until
from tests.publishing.trainer import LONG, Trainer
from tests.synthetic import mixed
from tests.tiers import tiered


def test_followers_show_what_was_published_and_late_ones_join() -> None:
    with Trainer() as trainer, fl.subscribe(trainer.publisher.address) as first:
        assert not first.poll() and first.version is None and first.digest is None
        with pytest.raises(UsageError, match="shows no version yet"):
            first.tensors()
        for version in range(3):
            trainer.publish(odd_state(version))
            assert first.wait(LONG) == version == first.version
            assert bits(first.state_dict()) == bits(odd_state(version)) and trainer.is_its(first)
            assert list(dict(first.tensors())) == list(odd_state(version))
        old = first.tensors()
        trainer.publish(odd_state(9), version=9)
        with fl.subscribe(trainer.publisher.address) as late:
            assert late.wait(LONG) == first.wait(LONG) == 9
            assert trainer.is_its(late) and bits(late.state_dict()) == bits(odd_state(9))
            assert trainer.publisher.flush(LONG) and trainer.publisher.followers == 2
        assert bits(dict(old)) == bits(odd_state(2)), "an iterator stays with its version"
        assert not first.poll(), "nothing newer"


def test_a_follower_may_come_before_the_publisher_and_iteration_ends_with_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with fl.subscribe(f"tcp://127.0.0.1:{port}") as follower:
        with pytest.raises(TransportError, match="no version came within 0.2 s.*is the publisher"):
            follower.wait(0.2)
        with Trainer(port) as trainer:
            shown = []
            trainer.publish(plain_state(0))
            for version in follower:
                shown.append(version)
                assert trainer.is_its(follower)
                if version < 4:
                    trainer.publish(plain_state(version + 1))
                else:
                    trainer.publisher.close()
        assert shown == [0, 1, 2, 3, 4] and follower.ended
        with pytest.raises(TransportError, match="has ended, and version 4 is its last"):
            follower.wait(LONG)
        with pytest.raises(UsageError, match="was closed; publish anew"):
            trainer.publisher.step()
        # One that begins again there is followed.
        with Trainer(port) as trainer:
            trainer.publish(plain_state(7), version=7)
            until(lambda: not follower.ended)
            assert follower.wait(LONG) == 7 and not follower.ended and trainer.is_its(follower)


def test_one_who_missed_versions_gets_one_difference() -> None:
    """While nothing is passed on, versions are left out; the trainer goes on, and memory is bounded."""
    with Trainer(keep=2) as trainer, Gateway(trainer.port) as gateway, fl.subscribe(gateway.address) as slow:
        state = plain_state(0, 1_000_000)
        trainer.publish(state)
        assert slow.wait(LONG) == 0
        whole = gateway.passed
        gateway.open.clear()
        for version in range(1, 9):
            state["weight"][version::1000] += 1
            trainer.publish(state)
        gateway.open.set()
        shown = [slow.wait(LONG)]
        while shown[-1] < 8:
            shown.append(slow.wait(LONG))
        assert len(shown) <= 2, "one version was on its way, and the next one is the newest"
        assert trainer.is_its(slow) and gateway.passed - whole < whole / 5
        assert trainer.publisher.flush(LONG)
        assert len(trainer.outlet._kept) <= 2


def test_whole_versions_go_where_there_is_no_base_and_few_are_kept() -> None:
    """The book-keeping of an outlet without its thread: one follower has a kept version, one has none of them."""
    outlet: Any = object.__new__(TcpOutlet)
    versions = {str(i): SimpleNamespace(digest=str(i), version=i, run="run") for i in range(5)}
    outlet._run = "run"
    outlet._kept, outlet._keep, outlet._missed, outlet._updates, sent = dict(versions), 2, {}, {}, []
    asks = {"since": 1.0, "announced": None, "update": None, "takes": b"", "least": 0, "parent": ""}
    outlet._peers = {
        has: SimpleNamespace(has=has, **asks, send=lambda _, has=has: sent.append(has))
        for has in (None, "gone", *versions)
    }
    outlet._send(SimpleNamespace(base=None, takes=b"", target=SimpleNamespace(digest="new", version=9)), [])
    assert sent == [None, "gone"]
    outlet._forget()
    assert sorted(outlet._kept) == ["3", "4"]


def test_a_cut_link_comes_back_and_goes_on_with_differences() -> None:
    with Trainer() as trainer, Gateway(trainer.port) as gateway, fl.subscribe(gateway.address) as follower:
        trainer.publish(plain_state(0, 200_000))
        follower.wait(LONG)
        whole = gateway.passed
        for version in range(1, 4):
            gateway.cut()
            trainer.publish(plain_state(version, 200_000))
            assert follower.wait(LONG) == version and trainer.is_its(follower)
        assert gateway.passed < 1.6 * whole


def test_damage_is_noticed_and_a_whole_version_follows(caplog: pytest.LogCaptureFixture) -> None:
    with Trainer() as trainer, Gateway(trainer.port) as gateway, fl.subscribe(gateway.address) as follower:
        trainer.publish(plain_state(0, 200_000))
        follower.wait(LONG)
        whole = gateway.passed
        for version in range(1, 4):
            gateway.flips, before = 1, gateway.passed
            trainer.publish(plain_state(version, 200_000))
            assert follower.wait(LONG) == version and trainer.is_its(follower)
            assert not gateway.flips and gateway.passed - before > whole / 2, "no difference from what may be damaged"
        gateway.flips = 3
        with fl.subscribe(gateway.address) as late:
            assert late.wait(LONG) == 3 and trainer.is_its(late)
    assert "the follower goes on with what it has" in caplog.text


def test_a_restarted_publisher_is_followed_and_known_weights_do_not_travel_again() -> None:
    with Trainer() as trainer, Gateway(trainer.port) as gateway, fl.subscribe(gateway.address) as follower:
        trainer.publish(plain_state(5, 200_000), version=5)
        follower.wait(LONG)
        whole = gateway.passed
        for state, number, least, most in (
            (plain_state(5, 200_000), 3, 0, whole / 20),  # from a checkpoint, and a number that was before
            (plain_state(6, 200_000), 4, whole / 2, 2 * whole),  # something else
        ):
            trainer.publisher._outlet._stop()  # type: ignore[union-attr]  # without a word
            trainer.begin()
            gateway.port = trainer.port
            before = gateway.passed
            trainer.publish(state, version=number)
            assert follower.wait(LONG) == number and trainer.is_its(follower)
            assert least <= gateway.passed - before <= most


@pytest.mark.parametrize("seed", tiered(range(10), lambda seed: seed == 0, lambda seed: seed < 3))
def test_whatever_happens_a_follower_shows_versions_of_the_publisher(seed: int) -> None:
    """Steps, cuts, flips, followers that come and go, restarts, in any order: digests hold, numbers ascend."""
    events = mixed(torch.arange(60).numpy().astype("uint64") + seed * 1000)
    with Trainer(keep=2) as trainer, Gateway(trainer.port) as gateway:
        followers = [fl.subscribe(gateway.address)]
        shown: dict[int, tuple[str, int]] = {}

        def look(follower: fl.Follower) -> None:
            if follower.poll():
                assert trainer.is_its(follower)
                assert follower._shown is not None and follower.version is not None
                run, last = shown.get(id(follower), ("", -1))
                assert follower._shown.run != run or follower.version > last
                shown[id(follower)] = follower._shown.run, follower.version

        number = 0
        for event in (int(event) for event in events):
            kind = event % 16
            if kind < 8:
                number += 1
                trainer.publish(odd_state(number % 5) | plain_state(number), version=number)
            elif kind == 8:
                gateway.cut()
            elif kind == 9:
                gateway.flips += 1
            elif kind == 10 and len(followers) < 4:
                followers.append(fl.subscribe(gateway.address))
            elif kind == 11 and len(followers) > 1:
                followers.pop(event // 16 % len(followers)).close()
            elif kind == 12:
                trainer.publisher._outlet._stop()  # type: ignore[union-attr]
                trainer.begin()
                gateway.port = trainer.port
            elif kind > 12 and trainer.publisher.version is not None:
                trainer.publisher.flush(0.05)
            for follower in followers:
                look(follower)
        gateway.flips = 0
        trainer.publish(plain_state(1), version=number + 1)
        for follower in followers:
            while follower.version != number + 1:
                follower.wait(LONG)
                assert trainer.is_its(follower)
            follower.close()


# ---- who may follow -------------------------------------------------------------------------------------------------


def test_a_secret_keeps_others_out() -> None:
    with Trainer(secret="the secret of the job") as trainer:
        address = trainer.publisher.address
        trainer.publish(plain_state(0))
        with fl.subscribe(address, secret=b"the secret of the job") as follower:
            assert follower.wait(LONG) == 0
        for secret, told in ((None, "asks for a secret"), ("another one of 16 bytes", "different secrets")):
            with fl.subscribe(address, secret=secret) as stranger, pytest.raises(ConfigError, match=told):
                stranger.wait(LONG)
    with Trainer() as trainer:
        trainer.publish(plain_state(0))
        with (
            fl.subscribe(trainer.publisher.address, secret="mine, of 16 bytes") as follower,
            pytest.raises(ConfigError, match="nothing shows that it is yours"),
        ):
            follower.wait(LONG)


def test_another_program_at_the_address_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(180)
        with fl.subscribe(f"tcp://127.0.0.1:{listener.getsockname()[1]}", timeout=2) as follower:
            end, _ = listener.accept()
            end.sendall(b"HTTP/1.1 400 Bad Request\r\n")
            end.close()
            silent, _ = listener.accept()  # says nothing, until the follower gives it up
            with silent:
                assert isinstance(follower.trouble, FusionLayerError)
                assert "another program answers there" in str(follower.trouble)
                third, _ = listener.accept()
                assert "has not said a word for 2 s" in str(follower.trouble)
                third.close()


def test_a_follower_that_takes_nothing_is_given_up() -> None:
    with (
        Trainer(timeout=2) as trainer,
        Gateway(trainer.port) as gateway,
        fl.subscribe(gateway.address, timeout=600) as stuck,  # it does not give up by itself
        fl.subscribe(trainer.publisher.address) as other,
    ):
        until(lambda: trainer.publisher.followers == 2)
        gateway.open.clear()
        trainer.publish({"w": torch.randn(8_000_000)})  # more than the buffers of sockets and gateway
        assert other.wait(LONG) == 0
        until(lambda: trainer.publisher.followers == 1)
        gateway.open.set()
        assert stuck.wait(LONG) == 0 and trainer.is_its(stuck)


def test_threads_and_connections_end() -> None:
    before = threading.active_count()
    with Trainer() as trainer:
        trainer.publish(plain_state(0))
        with fl.subscribe(trainer.publisher.address) as follower:
            follower.wait(LONG)
        with pytest.raises(UsageError, match="the follower was closed"):
            follower.poll()
        assert follower.version == 0 and follower.state_dict()
    assert threading.active_count() == before


def test_a_publisher_beyond_this_host_without_a_secret_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for address, secret in (("tcp://:0", None), ("tcp://0.0.0.0:0", "x" * 16)):
        fl.publish({}, address, secret=secret).close()
        assert not caplog.text
    fl.publish({}, "tcp://0.0.0.0:0").close()
    assert "without secret=... every caller that can connect gets the weights" in caplog.text


def test_a_forked_child_leaves_publisher_and_follower_to_its_parent() -> None:
    with Trainer() as trainer, fl.subscribe(trainer.publisher.address) as follower:
        trainer.publish(plain_state(0))
        follower.wait(LONG)
        child = os.fork()
        if not child:
            status = 1
            try:
                for call in (follower.poll, lambda: trainer.publisher.update(plain_state(1))):
                    with pytest.raises(UsageError, match="was forked"):
                        call()
                follower.close()
                trainer.publisher.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        trainer.publish(plain_state(1))
        assert follower.wait(LONG) == 1 and trainer.is_its(follower)
