"""A folder to which others can write: what a follower with a secret takes of it, and that no follower is held up."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, WireError
from fusionlayer.publishing.address import Endpoint
from fusionlayer.publishing.folder import FolderSource, files_of
from fusionlayer.publishing.signing import seal
from fusionlayer.publishing.snapshot import Snapshot
from fusionlayer.publishing.stores import FolderStore
from fusionlayer.publishing.update import make
from tests.loops import looped
from tests.publishing.states import bits, plain_state, until

LONG = 180.0
SECRET = "a word of the job"
BAD = {"weight": torch.full((4,), 666.0)}


def published(folder: Path, *versions: int, secret: str | None = SECRET) -> str:
    """Publish these versions, and return the digest of the last."""
    with fl.publish({}, folder, secret=secret) as publisher:
        for version in versions:
            publisher.update(plain_state(version), version=version)
            assert publisher.flush(LONG)
        assert publisher.digest is not None
        return publisher.digest


def source(folder: Path, secret: bytes | None = SECRET.encode()) -> FolderSource:
    return FolderSource(Endpoint(folder), secret)


def test_signed_versions_come_over_whole_and_as_differences(tmp_path: Path) -> None:
    with (
        fl.publish({}, tmp_path, keep=3, secret=SECRET) as publisher,
        fl.subscribe(tmp_path, secret=SECRET) as follower,
    ):
        for version in range(7):
            publisher.update(plain_state(version))
            assert publisher.flush(LONG) and follower.wait(LONG) == version
            assert bits(follower.state_dict()) == bits(plain_state(version)) and follower.digest == publisher.digest
        publisher.close()
        until(lambda: follower.ended)
        with fl.publish({}, tmp_path, secret=SECRET) as later:  # another one begins there
            later.update(plain_state(3))
            until(follower.poll)
            assert follower.version == 0 and follower.digest == later.digest


def test_both_ends_have_one_secret_or_none(tmp_path: Path) -> None:
    published(tmp_path / "signed", 0)
    published(tmp_path / "plain", 0, secret=None)
    with fl.subscribe(tmp_path / "signed") as follower, pytest.raises(ConfigError, match="give subscribe"):
        follower.wait(LONG)
    for folder, secret, why in (("signed", b"other", "another secret"), ("plain", b"a", "is not signed")):
        with pytest.raises(WireError, match=why):
            source(tmp_path / folder, secret).next(None)
    assert source(tmp_path / "plain", None).next(None) is not None


def forged(folder: Path, secret: bytes | None) -> None:
    """Replace the newest version's file by one with other weights, of the same run and number."""
    (file,) = files_of(FolderStore(folder))
    update = make(Snapshot(file.run, file.version, BAD))
    mark = b"" if secret is None else seal(secret, update.parts[0])
    (folder / file.name).write_bytes(mark + b"".join(update.parts))


def moved_tensor(folder: Path) -> None:
    """Change one byte of what comes after the header."""
    (file,) = files_of(FolderStore(folder))
    path = folder / file.name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def changed(folder: Path, **facts: object) -> None:
    path = folder / "newest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights without a signature": (lambda folder: forged(folder, None), "not signed"),
    "weights with a signature of another secret": (lambda folder: forged(folder, b"guessed"), "another secret"),
    "a tensor": (moved_tensor, "digest|damaged"),
    "the number of the newest version": (lambda folder: changed(folder, version=7), "another secret"),
    "the end": (lambda folder: changed(folder, ended=False), "another secret"),
    "the time": (lambda folder: changed(folder, began=1 << 62), "another secret"),
    "no signature": (
        lambda folder: (
            (folder / "newest.json").write_text(
                json.dumps(
                    {k: v for k, v in json.loads((folder / "newest.json").read_text()).items() if k != "signature"}
                )
            )
            and None
        ),
        "not signed",
    ),
}


@looped("attack", ATTACKS)
def test_what_others_have_changed_is_not_taken(attack: str, tmp_path: Path) -> None:
    act, why = ATTACKS[attack]
    folder = tmp_path / attack
    published(folder, 5)
    assert source(folder).next(None) is not None
    act(folder)
    with pytest.raises(WireError, match=why):
        source(folder).next(None)


def test_an_old_version_is_not_shown_again(tmp_path: Path) -> None:
    folder, runs = tmp_path / "folder", []
    for number, versions in enumerate([(1,), (1, 2, 3), (0,)]):  # the second one is another run with later numbers
        published(folder, *versions)
        runs.append(tmp_path / f"copy {number}")
        shutil.copytree(folder, runs[-1])
    follower = source(folder)
    made = follower.next(None)
    assert made is not None and made.version == 0
    for old in runs[:2]:
        shutil.rmtree(folder)
        shutil.copytree(old, folder)
        with pytest.raises(WireError, match="older than one that was there before"):
            follower.next(made)


def test_an_old_version_of_the_same_run_is_not_shown_again(tmp_path: Path) -> None:
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    follower = source(folder)
    with fl.publish({}, folder, secret=SECRET) as publisher:
        for version in range(3):
            publisher.update(plain_state(version))
            assert publisher.flush(LONG)
            if version == 1:
                shutil.copytree(folder, copy)
        made = follower.next(None)
        assert made is not None and made.version == 2
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    with pytest.raises(WireError, match="announces version 1, which is older"):
        follower.next(made)


def test_nothing_that_strangers_put_there_ends_the_publisher(tmp_path: Path) -> None:
    published(tmp_path, 7)
    newest = tmp_path / "newest.json"
    forged = {"form": 1, "run": "f" * 16, "version": 9, "ended": False, "began": 1 << 62, "signature": "0" * 64}
    of_an_earlier_one = newest.read_bytes()
    with fl.publish({}, tmp_path, secret=SECRET) as publisher:
        for version, content in enumerate((b"junk", json.dumps(forged).encode(), of_an_earlier_one, b"")):
            publisher.update(plain_state(version))
            assert publisher.flush(LONG)
            newest.write_bytes(content)
        newest.unlink()
        os.mkfifo(newest)
        publisher.update(plain_state(4))
        assert publisher.flush(LONG)
        made = source(tmp_path).next(None)
        assert made is not None and made.version == 4


def test_pipes_links_and_endless_files_hold_no_follower_up(tmp_path: Path) -> None:
    published(tmp_path, 0, secret=None)
    newest, (file,) = tmp_path / "newest.json", files_of(FolderStore(tmp_path))
    right = newest.read_bytes()

    def outcome() -> str:
        told: list[str] = []

        def look() -> None:
            try:
                source(tmp_path, None).next(None)
            except (OSError, WireError) as error:
                told.append(str(error))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(60)
        assert told, "the follower waits, or has taken it"
        return told[0]

    def instead(path: Path, put: Callable[[Path], object], why: str) -> None:
        path.unlink()
        put(path)
        assert why in outcome()

    instead(newest, os.mkfifo, "no plain file")
    instead(newest, lambda path: path.symlink_to("/dev/zero"), "is a link")
    instead(newest, lambda path: path.write_bytes(b" " * (1 << 20)), "more than")
    instead(newest, lambda path: path.write_text('{"form": 1, "run": "0", "version": ' + "9" * 4000 + "}"), "says")
    instead(newest, lambda path: path.write_text("[" * 4000), "says")
    newest.write_bytes(right)
    instead(tmp_path / file.name, os.mkfifo, "no files of")
    instead(tmp_path / file.name, lambda path: path.symlink_to("/dev/zero"), "no files of")
