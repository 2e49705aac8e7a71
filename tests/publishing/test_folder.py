"""Through a folder: ways over files, what is removed, damage, restarts, full disks."""

import itertools
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, FusionLayerError, TransportError, UsageError
from fusionlayer.publishing.folder import UpdateFile, files_of, way
from fusionlayer.publishing.stores import FolderStore
from tests.loops import looped
from tests.publishing.states import bits, odd_state, plain_state, until
from tests.synthetic import mixed

LONG = 180.0


@looped("seed", range(20))
def test_the_way_is_the_shortest_of_all(seed: int) -> None:
    numbers = iter(int(n) for n in mixed(np.arange(300, dtype=np.uint64) + np.uint64(seed * 300)))
    files = [
        UpdateFile("run", b, a, 1 + next(numbers) % 100, f"{a}-{b}")
        for a, b in itertools.combinations([-1, *range(6)], 2)
        if next(numbers) % 3
    ]
    files = [file._replace(since=None) if file.since == -1 else file for file in files]
    for have in (None, 0, 3):
        costs = []
        for count in range(1, 7):
            for row in itertools.permutations(files, count) if len(files) < 5 else _chains(files, have, count):
                places = [(have, None), *((file.since, file.version) for file in row)]
                fits = row[0].since in (None, have) and all(a[1] == b[0] for a, b in itertools.pairwise(places[1:]))
                if fits and row[-1].version == 5:
                    costs.append(sum(file.nbytes for file in row))
        found = way(files, have, 5)
        assert (found is None) == (not costs)
        if found is not None:
            assert sum(file.nbytes for file in found) == min(costs)
            assert found[0].since in (None, have) and found[-1].version == 5


def test_the_way_over_many_files_takes_memory_for_one() -> None:
    """Any process that can write there can make as many empty files as it likes."""
    files = [UpdateFile("run", version, version - 1 if version else None, 0, "x") for version in range(5000)]
    tracemalloc.start()
    try:
        assert way(files, None, 4999) == files
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def _chains(files: list[UpdateFile], have: int | None, count: int) -> list[tuple[UpdateFile, ...]]:
    rows = [(file,) for file in files if file.since in (None, have)]
    for _ in range(count - 1):
        rows = [(*row, file) for row in rows for file in files if file.since == row[-1].version]
    return rows


def test_followers_of_a_folder_show_every_version_to_the_bit(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    with fl.subscribe(folder) as follower:
        with pytest.raises(TransportError, match="within 0.3 s"):
            follower.wait(0.3)
        with fl.publish({}, f"file://{folder}", keep=3) as publisher:
            for version in range(8):
                publisher.update(odd_state(version))
                assert publisher.flush(LONG)
                assert follower.wait(LONG) == version
                assert bits(follower.state_dict()) == bits(odd_state(version)) and follower.digest == publisher.digest
                left = {file.version for file in files_of(FolderStore(folder))}
                assert left == set(range(max(0, version - 2), version + 1))
                assert sum(file.since is None for file in files_of(FolderStore(folder))) == 1
            with fl.subscribe(folder) as late:
                assert late.wait(LONG) == 7 and late.digest == publisher.digest
    with fl.subscribe(folder) as late:
        assert [*late] == [7] and late.ended
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_one_who_was_away_takes_the_shortest_way(tmp_path: Path) -> None:
    with fl.publish({}, tmp_path, keep=8) as publisher:
        publisher.update(plain_state(0))
        assert publisher.flush(LONG)
        with fl.subscribe(tmp_path) as follower:
            follower.wait(LONG)
            here = follower._shown
        for version in range(1, 8):
            publisher.update(plain_state(version))
            assert publisher.flush(LONG)
        files = files_of(FolderStore(tmp_path))
        steps, whole = way(files, 0, 7), min(file.nbytes for file in files if file.since is None)
        assert steps is not None and len(steps) == 7 and sum(step.nbytes for step in steps) < whole
        source = follower._source
        made = source.next(here)
        assert made is not None and bits(made.tensors) == bits(plain_state(7)) and made.digest == publisher.digest


def test_a_damaged_file_is_told_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fl.publish({}, tmp_path, keep=4) as publisher:
        for version in range(3):
            publisher.update(plain_state(version))
            assert publisher.flush(LONG)
        (broken,) = [tmp_path / file.name for file in files_of(FolderStore(tmp_path)) if file.version == 1]
        data = bytearray(broken.read_bytes())
        data[-30] ^= 8
        broken.write_bytes(data)
        with fl.subscribe(tmp_path) as follower:
            until(lambda: follower.trouble is not None and "lead to version 2" in str(follower.trouble))
            assert broken.name in caplog.text and not follower.poll()
            for version in (3, 4):  # 4 is whole
                publisher.update(plain_state(version))
                assert publisher.flush(LONG)
            assert follower.wait(LONG) == 4 and follower.digest == publisher.digest
        (tmp_path / "newest.json").write_text("{")
        with fl.subscribe(tmp_path) as follower:
            until(lambda: "newest.json says" in str(follower.trouble))


def test_a_restarted_publisher_takes_over_and_the_old_one_is_told(tmp_path: Path) -> None:
    old = fl.publish({}, tmp_path)
    old.update(plain_state(5), version=5)
    assert old.flush(LONG)
    half = tmp_path / ".0123456789abcdef.000000000007.whole.17.partial"
    half.write_bytes(b"of a publisher that was killed")
    (tmp_path / ".mine.partial").write_bytes(b"of somebody else")
    with fl.subscribe(tmp_path) as follower:
        assert follower.wait(LONG) == 5
        before = follower.state_dict()
        with fl.publish({}, tmp_path) as new:
            new.update(plain_state(5) | {"more": odd_state()["scalar"]}, version=2)
            assert follower.wait(LONG) == 2 and follower.digest == new.digest
            assert follower.state_dict()["weight"] is before["weight"], "what is known is not held twice"
            assert {file.run for file in files_of(FolderStore(tmp_path))} == {new.run}
            assert not half.exists() and (tmp_path / ".mine.partial").exists()
            old.update(plain_state(6))
            old.flush(LONG)
            with pytest.raises(UsageError, match="another publisher writes into"):
                old.update(plain_state(7))
            old.close()
            told = json.loads((tmp_path / "newest.json").read_text())
            assert told["run"] == new.run and not told["ended"]
    assert json.loads((tmp_path / "newest.json").read_text())["ended"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot be used: (File exists|Not a directory)"):
        fl.publish({}, file)
    with fl.publish({}, tmp_path / "full") as publisher:
        publisher.update(plain_state(0))
        assert publisher.flush(LONG)
        with monkeypatch.context() as full:
            full.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            publisher.update(plain_state(1))
            publisher.flush(LONG)
        with pytest.raises(FusionLayerError, match="cannot be written: No space left on device"):
            publisher.update(plain_state(2))
    with fl.subscribe(tmp_path / "full") as follower:
        assert follower.wait(LONG) == 0, "what was complete stays"


def test_wrong_arguments_are_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for address in ("localhost:1", "tcp://localhost", "tcp://h:99999", "udp://h:1", "file://host/x", ""):
        for call in (fl.publish, fl.subscribe):
            with pytest.raises(ConfigError, match="expected"):
                call(model, address) if call is fl.publish else call(address)  # type: ignore[operator]
    for wrong in ({"keep": 0}, {"keep": True}, {"timeout": 1}, {"secret": ""}, {"secret": 3}):
        with pytest.raises(ConfigError, match="expected"):
            fl.publish(model, tmp_path, **wrong)  # type: ignore[arg-type]
    for options in ({"timeout": "5"}, {"secret": ""}, {"model": 3}):
        with pytest.raises(ConfigError, match="expected"):
            fl.subscribe(tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="port 0"):
        fl.subscribe("tcp://:0")
    with pytest.raises(ConfigError, match="expected a model, or tensors"):
        fl.publish([model], tmp_path)  # type: ignore[arg-type]
