import json
import tempfile
from pathlib import Path

import pytest

from benchmarks import driver, report
from fusionlayer.cli import drawing
from tests.tiers import DRAWS

PICTURES = {"drawn": lambda: drawing.figure(1, 1)}


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
