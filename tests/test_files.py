"""Folders to which others can write: no link that they have put there is followed, and no pipe is waited for."""

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

import fusionlayer as fl
from fusionlayer.base import files
from fusionlayer.base.config import Config
from fusionlayer.base.errors import ConfigError
from fusionlayer.elastic.members import Members
from fusionlayer.health import report
from fusionlayer.launch import RankInfo, meeting
from fusionlayer.process.processes import Identity
from fusionlayer.torch.elastic.storage import Storage
from fusionlayer.transport import local
from tests.loops import looped

PID = os.getpid()
GUESSED = (f".{'0' * 16}.{0:012d}.whole.{PID}.partial", f".newest.json.{PID}.partial")
ME = Identity.own()


def publish(folder: Path) -> Path:
    with fl.publish({"w": torch.ones(3)}, folder) as publisher, mock.patch.object(publisher, "run", "0" * 16):
        for name in GUESSED:  # files that were there before are removed when it begins
            if (victim := folder.parent / "victim").exists() and not (folder / name).is_symlink():
                (folder / name).symlink_to(victim)
        publisher.step()
        assert publisher.flush(180)
    return folder / f"{'0' * 16}.{0:012d}.whole"


def keep(folder: Path) -> Path:
    Storage(folder, 0).keep(1, "shared", "own")
    return folder / "1.shared"


def save_delta(folder: Path) -> Path:
    fl.checkpoint.save_delta({"w": torch.ones(3)}, folder)
    return folder / "00000000.pt"


def save_ranks(folder: Path) -> Path:
    model = torch.nn.Linear(2, 2)
    fl.checkpoint.save_ranks(folder, group=local.alone(), model=model)
    (made,) = folder.glob("*.pt")
    return made


def status(folder: Path) -> Path:
    report.write(report.Report(2, "train.py", 1, ME, 1.0, 2.0), folder / "status.json")
    return folder / "status.json"


def member_list(folder: Path) -> Path:
    Members.begin(RankInfo(0, 1, 0, 1, "test"), None, Config(), True, str(folder / "members.json"))
    return folder / "members.json"


def meet(folder: Path) -> Path:
    with mock.patch("tempfile.gettempdir", lambda: str(folder)):
        board = meeting.FileBoard({"PMIX_NAMESPACE": "job"}, 1.0, None)
    board.write("an address")
    assert board.look() == "an address"
    meeting._published.clear()
    return board._path


WRITERS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "publish": (publish, GUESSED),
    "elastic commits": (keep, ("1.shared.draft", "1.rank-0.draft")),
    "save_delta": (save_delta, (f".00000000.{PID}",)),
    "save_ranks": (save_ranks, (f".rank 0 of 1.{PID}",)),
    "FUSIONLAYER_STATUS": (status, (f".status.json.{PID}",)),
    "FUSIONLAYER_MEMBERS": (member_list, (f".members.json.{PID}",)),
    "meeting": (meet, (f"fusionlayer-{os.getuid()}-job.{PID}",)),
}


@looped("what", WRITERS)
def test_no_link_is_followed_and_only_this_user_reads(what: str, tmp_path: Path) -> None:
    write, guessed = WRITERS[what]
    folder = tmp_path / what
    folder.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("of this user's")
    for name in guessed:
        (folder / name).symlink_to(victim)
    made = write(folder)
    assert victim.read_text() == "of this user's"
    assert made.is_file() and not made.is_symlink() and made.stat().st_mode & 0o777 == 0o600
    left = {path.name for path in folder.iterdir() if path.name.endswith(".partial")}
    assert left <= {*guessed}, "a draft stays"
    # A link at the name itself is replaced, and what it leads to stays.
    made.unlink()
    made.symlink_to(victim)
    if what not in ("publish", "save_delta", "save_ranks"):
        write(folder)
        assert victim.read_text() == "of this user's"


@looped("write", [publish, save_delta, save_ranks, keep])
def test_folders_of_weights_are_this_users_alone_unless_a_group_is_let_in(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        made = write(tmp_path / f"new {write.__name__}")
        shared = tmp_path / f"shared {write.__name__}"
        shared.mkdir()
        shared.chmod(0o2750)
        for_group = write(shared)
    finally:
        os.umask(before)
    assert made.parent.stat().st_mode & 0o777 == 0o700 and made.stat().st_mode & 0o777 == 0o600
    assert for_group.stat().st_mode & 0o777 == 0o640


def test_another_users_folder_lets_no_group_in(tmp_path: Path) -> None:
    """Its set-group-ID bit would give weights to a group of that user's choice."""
    tmp_path.chmod(0o2777)
    if os.geteuid() == 0:
        os.chown(tmp_path, 65534, -1)
        tmp_path.chmod(0o2777)
        made = save_delta(tmp_path)
    else:
        with mock.patch("os.geteuid", lambda: os.getuid() + 1):
            made = save_delta(tmp_path)
    assert made.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_not_complete_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    with pytest.raises(RuntimeError), files.whole(tmp_path / "a") as file:
        file.write(b"half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "before"
    with files.whole(tmp_path / "a", sync=True) as file:
        file.write(b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_only_plain_files_are_read_and_no_more_than_is_expected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "long").write_bytes(b"")
    os.truncate(tmp_path / "long", 1 << 40)
    (tmp_path / "right").write_text("text")
    for name, why in (("pipe", "no plain file"), ("zero", "is a link"), ("long", "more than 9 bytes"), ("none", "No")):
        with pytest.raises(OSError, match=why):
            files.read(tmp_path / name, 9)
    with pytest.raises(OSError, match="no plain file"):
        files.read("/dev/zero", 9, follow=True)
    assert files.read(tmp_path / "right", 9) == b"text"


def test_what_another_user_has_is_not_private(tmp_path: Path) -> None:
    own = tmp_path.stat()
    for uid, mode, private in (
        (os.geteuid(), 0o700, True),
        (os.geteuid() + 1, 0o700, False),
        (os.geteuid(), 0o770, False),
    ):
        found = os.stat_result((stat.S_IFDIR | mode, *own[1:4], uid, *own[5:]))
        assert files.is_private(found) == private
        with mock.patch("os.fstat", lambda _, found=found: found):
            make = partial(files.Folder, tmp_path)
            if private:
                make()
            else:
                with pytest.raises(PermissionError, match="others can write to it"):
                    make()


def test_an_address_that_cannot_be_published_is_told(tmp_path: Path) -> None:
    with mock.patch("tempfile.gettempdir", lambda: str(tmp_path / "missing")):
        board = meeting.FileBoard({"PMIX_NAMESPACE": "job"}, 1.0, None)
    with pytest.raises(ConfigError, match="cannot publish its address.*No such file.*TMPDIR"):
        board.write("an address")
