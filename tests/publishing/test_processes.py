"""A trainer and followers as processes: one is killed, one comes late, links are cut, the trainer is restarted."""

import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError
from fusionlayer.publishing.snapshot import Snapshot
from tests.harness import checkpoint, outcomes_of
from tests.publishing.gateway import Gateway
from tests.publishing.states import plain_state, until

pytestmark = pytest.mark.medium

TRAINER, KILLED, CUT, RESTARTED, LATE = range(5)
LAST = 1_002


def publish(publisher: fl.Publisher, version: int, folder: Path) -> None:
    publisher.update(plain_state(version % 40, 100_000), version)
    with open(folder / "published", "a") as file:
        file.write(f"{publisher.run} {version} {publisher.digest}\n")
    publisher.flush(5)


def follow(address: str, folder: Path, rank: int) -> list[str]:
    """Return what a follower has shown: run, version, and the digest of what it really has."""
    shown = []
    with fl.subscribe(address, timeout=5) as follower:
        for version in follower:
            now = follower._shown
            assert now is not None
            shown.append(f"{now.run} {version} {Snapshot(now.run, version, follower.state_dict()).digest}")
            if rank == KILLED and len(shown) == 3:
                checkpoint("kill")
            if rank == CUT:
                for name, count in (("late", 3), ("cut 1", 4), ("cut 2", 6), ("cut 3", 8), ("restart", 12)):
                    if len(shown) == count:
                        (folder / name).touch()
    return shown


def hold(rank: int, world: int, port: int, gateway: str, name: str) -> list[str]:
    folder, address = Path(name), f"tcp://127.0.0.1:{port}"
    if rank == TRAINER:
        publisher = fl.publish({}, address, timeout=5)
        version = 0
        while not (folder / "restart").exists():
            publish(publisher, version, folder)
            version += 1
        checkpoint("kill")
    elif rank == RESTARTED:
        until((folder / "restart").exists)
        restarted: list[fl.Publisher] = []

        def begin() -> bool:
            with suppress(ConfigError):  # the killed one still listens
                restarted.append(fl.publish({}, address, timeout=5))
            return bool(restarted)

        until(begin)
        until(lambda: restarted[0].followers == 2)
        for version in range(1_000, LAST + 1):
            publish(restarted[0], version, folder)
        restarted[0].close()
    elif rank == LATE:
        until((folder / "late").exists)
        return follow(address, folder, rank)
    else:
        return follow(gateway if rank == CUT else address, folder, rank)
    return []


def test_every_version_that_a_follower_shows_is_the_publishers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = threading.Event()
    with Gateway(port) as gateway:

        def cut() -> None:
            for number in (1, 2, 3):
                until(lambda number=number: done.is_set() or (tmp_path / f"cut {number}").exists(), 90)  # type: ignore[misc]
                gateway.cut()

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            signals = {(TRAINER, "kill"): signal.SIGKILL, (KILLED, "kill"): signal.SIGKILL}
            outcomes = outcomes_of(hold, 5, port, gateway.address, str(tmp_path), signals=signals, backend=None)
        finally:
            done.set()
            cutter.join()
    assert [outcomes[rank].exit_code for rank in (TRAINER, KILLED)] == [-signal.SIGKILL] * 2, outcomes
    assert all(outcomes[rank].kind == "returned" for rank in (CUT, RESTARTED, LATE)), outcomes
    published = (tmp_path / "published").read_text().splitlines()
    for rank in (CUT, LATE):
        shown = outcomes[rank].value
        assert set(shown) <= set(published) and len(set(shown)) == len(shown)
        assert sorted(shown, key=published.index) == shown, "in their order"
        assert shown[-1].split()[1] == str(LAST)
    assert len({line.split()[0] for line in outcomes[CUT].value}) == 2, "of both publishers"
    assert os.listdir(tmp_path).count("cut 3") == 1
