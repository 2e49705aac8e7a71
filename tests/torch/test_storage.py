"""Where elastic commits are kept: others can write to the same place, and are not believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionlayer.torch.elastic.storage import _own_folder

pytestmark = pytest.mark.short


def test_what_others_have_put_into_shared_memory_is_ignored(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "job").symlink_to(elsewhere)
    (tmp_path / "job.1").write_text("a file")
    (tmp_path / "job.2").mkdir()
    (tmp_path / "job.2").chmod(0o777)
    chosen = _own_folder(tmp_path, "job")
    assert chosen == tmp_path / "job.3" and chosen.stat().st_mode & 0o777 == 0o700
    assert _own_folder(tmp_path, "job") == chosen, "all ranks of a host find the same"
    assert not list(elsewhere.iterdir())
