"""Where elastic commits are kept: others can write to the same place, and are not believed."""

import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from fusionlayer.base.errors import ConfigError
from fusionlayer.torch.elastic.storage import Storage, _own_folder
from tests.loops import looped

NOBODY = 65534


def test_what_others_have_put_into_shared_memory_is_ignored(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "job").symlink_to(elsewhere)
    (tmp_path / "job.1").write_text("a file")
    (tmp_path / "job.2").mkdir()
    (tmp_path / "job.2").chmod(0o777)
    chosen = _own_folder(tmp_path, "job").path
    assert chosen == tmp_path / "job.3" and chosen.stat().st_mode & 0o777 == 0o700
    assert _own_folder(tmp_path, "job").path == chosen, "all ranks of a host find the same"
    assert not list(elsewhere.iterdir())


class Attack:
    """Runs code of another user's when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


def plant(path: Path, mark: Path) -> None:
    torch.save({"state": Attack(mark)}, path)


def of_agent(root: Path, job: str = "job") -> Storage:
    found = Storage.of_agent(0, {"TORCHELASTIC_RUN_ID": job, "FUSIONLAYER_ELASTIC_DIR": str(root)})
    assert found is not None
    return found


def open_to_all(root: Path) -> Path:
    (root / "job").mkdir()
    (root / "job").chmod(0o777)
    return root / "job"


def open_to_the_group(root: Path) -> Path:
    (root / "job").mkdir()
    (root / "job").chmod(0o770)
    return root / "job"


def link(root: Path) -> Path:
    elsewhere = root / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (root / "job").symlink_to(elsewhere)
    return elsewhere


def of_another_user(root: Path) -> Path:
    (root / "job").mkdir(mode=0o755)
    if os.geteuid() == 0:
        os.chown(root / "job", NOBODY, NOBODY)
    else:
        (root / "job").chmod(0o777)
    return root / "job"


@looped("make", [open_to_all, open_to_the_group, link, of_another_user])
def test_a_folder_in_which_others_can_plant_commits_is_refused(make: Callable[[Path], Path], tmp_path: Path) -> None:
    mark, root = tmp_path / "was run", tmp_path / make.__name__
    root.mkdir()
    plant(make(root) / "99.shared", mark)
    with pytest.raises(ConfigError, match="commits cannot be kept in .*job: .*FUSIONLAYER_ELASTIC_DIR"):
        storage = of_agent(root)
        storage.shared(storage.newest())
    assert not mark.exists()


def writable_file(path: Path, mark: Path) -> None:
    plant(path, mark)
    path.chmod(0o666)


def link_to_a_file(path: Path, mark: Path) -> None:
    planted = path.parent.parent / f"planted for {path.name}"
    plant(planted, mark)
    path.symlink_to(planted)


def file_of_another_user(path: Path, mark: Path) -> None:
    plant(path, mark)
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    else:
        path.chmod(0o646)


def pipe(path: Path, mark: Path) -> None:
    os.mkfifo(path)


@looped("make", [writable_file, link_to_a_file, file_of_another_user, pipe])
def test_a_file_that_others_can_have_written_is_no_commit(make: Callable[[Path, Path], None], tmp_path: Path) -> None:
    root, mark = tmp_path / make.__name__, tmp_path / "was run"
    storage = of_agent(root)
    storage.keep(7, "right", "own")
    make(root / "job" / "99.shared", mark)
    make(root / "job" / "99.rank-0", mark)
    assert storage.newest() == 7 and storage.ranks(99) == [] and storage.shared(7) == "right"
    for read in (lambda: storage.shared(99), lambda: storage.own(99, 0)):
        with pytest.raises(OSError, match=r"others can write to it|is a link|no plain file"):
            read()
    assert not mark.exists()


def test_a_folder_that_is_exchanged_is_not_followed(tmp_path: Path) -> None:
    storage, mark = of_agent(tmp_path), tmp_path / "was run"
    storage.keep(1, "right", "own")
    (tmp_path / "job").rename(tmp_path / "moved")
    plant(open_to_all(tmp_path) / "99.shared", mark)
    assert storage.newest() == 1 and storage.shared(1) == "right"
    storage.keep(2, "later", "own")
    assert (tmp_path / "moved" / "2.shared").exists() and not mark.exists()


def test_the_owner_counts_at_the_descriptor(tmp_path: Path) -> None:
    """The same as with files of another user, for one who cannot make such files."""
    storage = of_agent(tmp_path)
    storage.keep(1, "right", "own")
    usual = os.fstat

    def of_another(file: int) -> os.stat_result:
        found = usual(file)
        return os.stat_result((*found[:4], NOBODY + 1, *found[5:])) if stat.S_ISREG(found.st_mode) else found

    with mock.patch("os.fstat", of_another), pytest.raises(PermissionError):
        storage.shared(1)


def test_plain_values_are_loaded_without_running_code(tmp_path: Path) -> None:
    storage = of_agent(tmp_path)
    storage.keep(1, {"w": torch.ones(3), "step": 3}, [torch.zeros(1)])
    storage.keep(2, {"object": Path("a")}, pickle.PickleError("of the user's"))
    with mock.patch("torch.load", wraps=torch.load) as load:
        assert storage.shared(1)["step"] == 3 and torch.equal(storage.own(1, 0)[0], torch.zeros(1))
        assert [call.kwargs["weights_only"] for call in load.call_args_list] == [True, True]
    assert storage.shared(2) == {"object": Path("a")} and str(storage.own(2, 0)) == "of the user's"


def test_drafts_of_workers_that_were_killed_go(tmp_path: Path) -> None:
    storage = of_agent(tmp_path)
    left = tmp_path / "job" / ".1.shared.0123456789abcdef.partial"
    left.write_text("half")
    left.chmod(0o600)
    storage.keep(3, "shared", "own")
    assert not left.exists()


@looped("job", ["job", ".", "..", ""])
def test_only_commits_are_removed_whatever_the_job_is_called(job: str, tmp_path: Path) -> None:
    """The folder's name comes from that of the job: it may be any folder of this user's."""
    root = tmp_path / f"root {job}" / "elastic"
    root.mkdir(mode=0o700, parents=True)
    of_others = [root / "notes", root.parent / "notes"]
    for each in of_others:
        each.touch(0o600)
    storage = of_agent(root, job)
    storage.keep(1, "shared", "own")
    storage.forget()
    assert all(each.exists() for each in of_others) and storage.newest() == 0
    assert not list(tmp_path.rglob("1.*")) and not list(tmp_path.rglob("token"))
    assert job != "job" or not (root / "job").exists()
