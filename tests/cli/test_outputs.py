"""What can be known about outputs is known before measuring, and nothing that was measured is lost."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fusionlayer.base.errors import FusionLayerError
from fusionlayer.cli import bench, outputs
from fusionlayer.cli.spawn import RANKS_PREFIX
from tests.cli.test_bench import measure


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_rows_go_elsewhere_when_their_file_cannot_be_written_any_more(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "rows.json"
    measured = bench._write

    def spoil_and_write(options: Any, rows: Any) -> None:
        (out.parent / "kept").unlink(missing_ok=True)
        out.parent.rmdir()
        out.parent.write_text("a file")  # such as somebody's who tidied up
        measured(options, rows)

    monkeypatch.setattr(bench, "_write", spoil_and_write)
    small = ["--max", "4K", "--collectives", "all_gather", "--format", "json", "--out", str(out)]
    assert 1 in measure(2, *small)
    printed = capsys.readouterr()
    (kept,) = temporary.glob("*/rows.json")
    assert f"bench: --out {out} cannot be written: " in printed.err and f"the result is in {kept}" in printed.err
    assert json.loads(kept.read_text()) == json.loads(printed.out) and "rows" in printed.out


def test_ranks_keep_results_where_they_outlive_them(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = temporary / f"{RANKS_PREFIX}x"
    inner.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(inner))
    with pytest.raises(FusionLayerError, match="--out /dev/full cannot be written: No space left on device; the resu"):
        outputs.keep(Path("/dev/full"), lambda place: place.write_text("text"), "--out")
    assert not [*inner.iterdir()] and len([*temporary.glob("fusionlayer-*/full")]) == 1


def test_a_result_that_cannot_be_printed_is_kept(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[bool] = []
    monkeypatch.setattr(outputs, "drop_output", lambda: dropped.append(True))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(
            FusionLayerError, match="standard output cannot be written: No space left on device"
        ) as told:
            outputs.tell("text", "bench.text")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what Python flushes at last goes nowhere
    (kept,) = temporary.glob("*/bench.text")
    assert kept.read_text() == "text" and str(kept) in str(told.value) and dropped
