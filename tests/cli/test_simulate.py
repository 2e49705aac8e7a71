import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusionlayer.cli import main
from fusionlayer.planning.profile import Profile, Validation
from tests.planning.profiles import write_example

VALIDATED = Validation("r.json", 3, (2, 4), ("100mbit", "1gbit"), ("ddp", "int4"), (0.1, 0.05, 0.25), 0.9, 1.0, 1.25)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_example(tmp_path)


@pytest.fixture
def validated(path: Path) -> Path:
    replace(Profile.from_yaml(path), validation=VALIDATED).to_yaml(path)
    return path


def table_rows(output: str) -> list[list[str]]:
    """Return the cells of the first table's rows: what stands between its rule and the next empty line."""
    lines = output.splitlines()
    rule = next(i for i, line in enumerate(lines) if line and not line.strip("- "))
    return [line.split() for line in lines[rule + 1 : lines.index("", rule)]]


def test_tables(validated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(validated), "--workers", "2,64", "--rate", "100mbit", "--codec", "int4"]) == 0
    output = capsys.readouterr().out
    rows = table_rows(output)
    assert [(row[0], row[1]) for row in rows] == [("2", "ddp"), ("2", "int4"), ("64", "ddp"), ("64", "int4")]
    for row in rows:
        step, (low, high) = float(row[2]), map(float, row[3].split(".."))
        assert low == pytest.approx(0.9 * step, abs=1) and high == pytest.approx(1.25 * step, abs=1)
    assert [row[7:] for row in rows] == [[], [], *[["EXTRAPOLATION:", "64", "workers"]] * 2]
    assert " step  " in output and "\n                   ms  " in output, "every number has a unit"
    assert float(rows[1][4]) > 3, "int4 beats ddp at 100 Mbit/s"
    assert "Faster than ddp, from 2 to 64 workers" in output
    assert "Validated with 3 measured steps (2 to 4 workers, 100mbit to 1gbit): error 10% mean, 5% median" in output


def test_json_says_the_same(validated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", str(validated), "--workers", "2,4096", "--codec", "int4,raw", "--overlap-forward"]
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    names = ["ddp", "int4", "int4+overlap", "raw", "raw+overlap"]
    assert [row["method"] for row in found["steps"]] == names * 2
    assert found["rate"] == "1gbit", "the fastest measured one"
    assert set(found["break_even"]) == set(names[1:])
    by_name = {row["method"]: row for row in found["steps"][5:]}
    assert by_name["int4"]["extrapolated"] == ["4096 workers"]
    assert by_name["raw"]["extrapolated"] == ["4096 workers", "raw"]
    for row in by_name.values():
        assert row["low"] <= row["step_seconds"] <= row["high"]
        assert row["speedup"] == pytest.approx(by_name["ddp"]["step_seconds"] / row["step_seconds"])
    main(arguments)
    rows = table_rows(capsys.readouterr().out)
    assert [float(row[2]) for row in rows] == pytest.approx(
        [row["step_seconds"] * 1e3 for row in found["steps"]], abs=0.5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codec", "int5"], "fusionlayer simulate: profile has no costs of codec 'int5'; did you mean 'int4'"),
        (["--rate", "fast"], "fusionlayer simulate: rate 'fast'; expected a number above 0"),
        (["--per-host", "2"], "fusionlayer simulate: 2 workers on a host, and the profile has no costs"),
        (["--per-host", "3", "--workers", "2,8"], "fusionlayer simulate: --workers: none is a multiple"),
        (["--curves", "--latency", "0.1"], "fusionlayer simulate: a given latency cannot be put"),
    ],
)
def test_errors_are_one_line(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["simulate", str(path), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message) and captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_reader_that_has_seen_enough_is_no_error(path: Path) -> None:
    program = "import sys; from fusionlayer.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "simulate", str(path), "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    # What takes seconds, as on a busy machine, says how far it is.
    errors = [line for line in process.stderr if "% done" not in line]
    assert (process.wait(180), errors) == (141, [])
