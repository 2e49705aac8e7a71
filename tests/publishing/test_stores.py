"""Through file systems of fsspec: the same versions, files and chains as through a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError
from fusionlayer.publishing.address import parse
from fusionlayer.publishing.folder import files_of, way
from fusionlayer.publishing.stores import UrlStore, open_store
from tests.publishing.states import bits, odd_state, plain_state, until

LONG = 180.0


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return a URL of a folder that does not exist yet."""
    yield f"memory://{tmp_path.name}/weights" if request.param == "memory" else f"local://{tmp_path}/weights"
    fsspec.filesystem("memory").store.clear()


def test_versions_files_and_chains_are_those_of_a_folder(url: str, tmp_path: Path) -> None:
    store = open_store(parse(url))
    with fl.publish({}, url, keep=3, secret="0123456789abcdef") as publisher:
        assert publisher.address == url
        with fl.subscribe(url, secret="0123456789abcdef") as follower:
            for version in range(6):
                publisher.update(odd_state(version))
                assert publisher.flush(LONG)
                assert follower.wait(LONG) == version and follower.digest == publisher.digest
                assert bits(follower.state_dict()) == bits(odd_state(version))
            assert {file.version for file in files_of(store)} == {3, 4, 5}
            steps = way(files_of(store), 3, 5)
            assert steps is not None and [step.since for step in steps] == [3, 4]
        with fl.subscribe(url, secret="0123456789abcdef") as late:
            assert late.wait(LONG) == 5 and late.digest == publisher.digest
        with fl.subscribe(url, secret="another secret than") as stranger:
            until(lambda: "signed with another secret" in str(stranger.trouble))
    newest = json.loads(store.read("newest.json", 4096))
    assert newest["ended"] and newest["version"] == 5
    with fl.publish({}, url) as other:
        other.update(plain_state(0), version=1)
        assert other.flush(LONG)
        assert {file.run for file in files_of(store)} == {other.run}


def test_damage_and_long_files_are_noticed(url: str) -> None:
    store = open_store(parse(url))
    with fl.publish({}, url, keep=1) as publisher:
        publisher.update(plain_state(0))
        assert publisher.flush(LONG)
        (file,) = files_of(store)
        with store.opened(file.name) as opened:
            data = bytearray(opened.read())
        data[-20] ^= 4
        store.write(file.name, [memoryview(data)])
        with fl.subscribe(url) as follower:
            until(lambda: "no files of" in str(follower.trouble))
            publisher.update(plain_state(1))
            assert follower.wait(LONG) == 1 and follower.digest == publisher.digest
            store.write("newest.json", [memoryview(b" " * 5000)])
            until(lambda: "has more than 4096 bytes" in str(follower.trouble))
            assert follower.version == 1


def test_a_missing_folder_has_no_files_and_what_a_store_raises_is_told(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(parse(url))
    assert store.sizes() == {}
    looks: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(UrlStore, "prepare", lambda self: self._system.no_such_call())
        with pytest.raises(ConfigError, match="cannot be used: .*no_such_call"):
            fl.publish({}, url)
    store.prepare()
    store.write("x", [memoryview(b"1")])
    assert isinstance(store, UrlStore)
    monkeypatch.setattr(store._system, "invalidate_cache", looks.append)
    assert store.read("x", 9) == b"1" and looks == [store._folder]


def test_what_fsspec_cannot_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pip install s3fs|Install s3fs"):
        fl.subscribe("s3://bucket/weights")
    with pytest.raises(ConfigError, match="no connections"):
        fl.publish({}, "memory://weights", tls=fl.TLS("a", "b"))
