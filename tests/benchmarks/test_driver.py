from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from benchmarks import driver, report
from fusionlayer.cli import drawing
from tests.tiers import DRAWS

pytestmark = pytest.mark.short

PICTURES = {"drawn": lambda: drawing.figure(1, 1)}


def test_what_is_timed_waits_for_a_quiet_machine_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, int]] = []
    monkeypatch.setattr(driver, "refuse_if_busy", lambda ok, ranks: asked.append((ok, ranks)))
    parser = driver.make_parser("something", __doc__)
    driver.add_options(parser, timed=True, smoke=True)
    for words in ([], ["--busy-ok"], ["--smoke"]):
        driver.begin(parser.parse_args(words), 3)
    driver.begin(parser.parse_args([]))
    assert asked == [(False, 3), (True, 3), (True, 3)]


def test_results_are_printed_and_kept_where_the_user_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = driver.make_parser("something", __doc__)
    driver.add_options(parser)
    rows = [{"a": 1}]
    for words in ([], ["--out", str(tmp_path), "--hardware", "abacus"]):
        options = parser.parse_args(words)
        environment = driver.begin(options)
        driver.finish(
            options,
            "theme",
            "Title",
            environment,
            rows,
            more=["more"],
            pictures=PICTURES,
        )
        told = capsys.readouterr()
        assert "## Title" in told.out and ("no pictures: matplotlib" in told.err) == (bool(words) and not DRAWS)
    (page,), (data,) = tmp_path.glob("theme_abacus_*.md"), tmp_path.glob("*.json")
    assert page.read_text().endswith("more") and json.loads(data.read_text())["rows"] == rows
    assert (tmp_path / "plots" / "drawn.svg").exists() == DRAWS


def test_results_go_elsewhere_when_their_folder_cannot_be_written_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = driver.make_parser("something", __doc__)
    driver.add_options(parser)
    out = tmp_path / "results"
    options = parser.parse_args(["--out", str(out)])
    out.rmdir()
    out.write_text("somebody has put a file here meanwhile")
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", str(out)])
    assert "cannot be written: its folder is a file; name another" in capsys.readouterr().err
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(report, "misplaced", kept := [])
    monkeypatch.setattr(driver, "misplaced", kept)
    rows = [{"a": 1}]
    driver.finish(options, "theme", "Title", driver.begin(options), rows, pictures=PICTURES)
    (data,) = tmp_path.glob("fusionlayer-results-*/theme_*.json")
    assert json.loads(data.read_text())["rows"] == rows and (data.parent / "plots" / "drawn.svg").exists() == DRAWS
    assert f"cannot be written: File exists; results are in {data}\n" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        driver.leave(lambda: 0)
    assert ended.value.code == 1


def test_an_interrupt_ends_with_its_status() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    for main, status in ((interrupted, 130), (lambda: 3, 3)):
        with pytest.raises(SystemExit) as ended:
            driver.leave(main)
        assert ended.value.code == status
