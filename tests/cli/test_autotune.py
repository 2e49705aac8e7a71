"""``fusionlayer autotune``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusionlayer.cli import main
from fusionlayer.planning.autotune.log import COLUMNS
from tests.cli.test_simulate import table_rows
from tests.packaging.project_tree import ROOT
from tests.tiers import DRAWS

pytestmark = pytest.mark.short

ROWS = (
    "20,start,planned,4,0.050000,1.0000,planned,4",
    "40,walk,even,8,0.040000,0.8000,planned,4",
    "60,walk,even,16,0.060000,1.2000,planned,4",
    "80,duel,even,8,0.041000,0.8200,planned,4",
    "100,start,even,8,0.040000,1.0000,even,8",
    "200,look,even,8,0.042000,1.0500,even,8",
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "tried.csv"
    path.write_text("\n".join([",".join(COLUMNS), *ROWS, "220,lo"]))
    return path


def test_the_best_plan_is_told_first_and_then_what_was_tried(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/planning.md").read_text()
    (command,) = (line for line in page.splitlines() if line.startswith("fusionlayer autotune "))
    words = command.split()[1:]
    plot = words.index("--plot")
    assert main(words if DRAWS else words[:plot] + words[plot + 2 :]) == 0
    output = capsys.readouterr().out
    assert output.startswith(
        "After 200 steps and 5 trials the best plan is 8 buckets, even, 41 ms a step instead of 50 ms; "
        "it won in step 100 or just before.\n\n"
    )
    assert table_rows(output) == [
        ["8", "even", "4", "40.5", "0.81", "best"],
        ["4", "planned", "1", "50.0", "1.00"],
        ["16", "even", "1", "60.0", "1.20"],
    ]
    assert not DRAWS or "</svg>" in (tmp_path / "tried.svg").read_text()
    assert main(["autotune", str(log), "--json"]) == 0
    assert [row["stage"] for row in json.loads(capsys.readouterr().out)] == [row.split(",")[1] for row in ROWS]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("a,b\n", "is no log of autotuning; expected the columns step,stage"),
        ("", "is no log of autotuning; expected the columns"),
        (",".join(COLUMNS) + "\n", "has no trials yet"),
        (",".join(COLUMNS) + "\nx\n" + ROWS[0], "line 2: x; expected step,stage"),
    ],
)
def test_a_file_that_is_no_log_is_an_error(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tried.csv"
    if text is not None:
        path.write_text(text)
    assert main(["autotune", str(path)]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
