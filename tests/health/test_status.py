"""`fusionlayer status`: the file that the first rank keeps, and its table."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fusionlayer.base.errors import ConfigError
from fusionlayer.cli import main
from fusionlayer.health import report as status_file
from fusionlayer.health.calls import Call
from fusionlayer.health.report import Report
from fusionlayer.health.state import ChannelState, Finding, RankState
from fusionlayer.process.processes import Identity

ME = Identity.own()


def report(**more: object) -> Report:
    """Return the report of a job in which rank 1 is late."""
    states = [
        RankState(
            rank,
            ME,
            3,
            idle=7.4,
            waits=rank != 1,
            doing="waits for data" if rank == 1 else "is in all_reduce",
            where="examples/a_long_folder/train_a_large_model.py:31",
            channels={"group 0": ChannelState((0, 1, 2), 58 - (rank == 1), 57, Call("all_reduce of (4160) float32"))},
            counts={"steps": 57.0, "bytes_sent": 3.1e9},
        )
        for rank in range(3)
    ]
    text = "rank 1 is late: it waits for data at train.py:31; ranks 0, 2 wait for it 7 s in call 58"
    made = Report(
        status_file.VERSION,
        "train.py --lr 3",
        3,
        ME,
        1000.0,
        1100.0,
        "runs",
        tuple(states),
        (Finding("late", (1,), text),),
    )
    return replace(made, past=((1099.0, text),), **more)  # type: ignore[arg-type]


def test_the_table_fits_80_columns_and_names_the_late_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "status.json"
    status_file.write(report(), path)
    assert main(["status", str(path)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    (late,) = [line for line in shown.splitlines() if line.split()[:2] == ["1", "late"]]
    assert "57" in late and "waits for data" in late
    assert "! rank 1 is late" in shown


def test_json_has_all_that_is_known_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "status.json"
    status_file.write(report(), path)
    assert main(["status", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(report())))
    assert status_file.read(path) == report()


def test_a_job_whose_rank_0_was_killed_is_told_as_failed(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    status_file.write(report(writer=replace(ME, started="1")), path)
    found = status_file.read(path)
    assert found.life == "failed" and found.findings[-1].kind == "gone" and len(found.states) == 3


def test_only_this_user_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = status_file.folder() / "job-1.json"
    status_file.write(report(), path)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert [*status_file.reports()] == [path]
    path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="not a folder of this user alone"):
        status_file.folder()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no JSON"),
        ('{"version": 9}', "version 9, expected 2"),
        ('{"version": 2}', "lacks"),
        ("[]", "keys and values"),
        pytest.param("[" * 100_000, "no JSON", id="nested"),
        pytest.param('{"version": 2, "size": ' + "9" * 5000 + "}", "no JSON", id="digits"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "status.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        status_file.read(path)


ODD = "\x1b]0;owned\x07\x1b[2J\r\nrank 9 is late\u202e\u2028\ud800"


def test_what_others_have_written_cannot_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoiled(value: object) -> object:
        if isinstance(value, dict):
            return {key: spoiled(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [spoiled(each) for each in value]
        return value + ODD if isinstance(value, str) and value not in ("runs", ME.started, ME.place) else value

    path = tmp_path / "status.json"
    path.write_text(json.dumps(spoiled(asdict(report()))))
    assert main(["status", str(path)]) == 0
    path.write_text(json.dumps({**asdict(report()), ODD: 1, "life": ODD}))
    assert main(["status", str(path)]) == 2
    told = capsys.readouterr()
    lines = (told.out + told.err).splitlines()
    assert all(line.isprintable() for line in lines) and not any(line.startswith("rank 9") for line in lines)
    assert r"\x1b]0;owned\x07" in told.out


def test_odd_numbers_in_a_file_are_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, right = tmp_path / "status.json", asdict(report())
    for odd in (float("nan"), float("inf"), -1e300, 10**400, -(10**4000), -1, "3", [], True):
        for name in ("size", "started", "written"):
            path.write_text(json.dumps({**right, name: odd}))
            assert main(["status", str(path)]) == 2, (name, odd)
        for name in ("rank", "idle", "counts", "serial"):
            value = {"steps": odd, "bytes_sent": odd} if name == "counts" else odd
            path.write_text(json.dumps({**right, "states": [{**right["states"][0], name: value}]}))
            assert main(["status", str(path)]) in (0, 2), (name, odd)
        path.write_text(json.dumps({**right, "past": [[odd, "a line"]]}))
        assert main(["status", str(path)]) == 2, odd
    assert "Traceback" not in capsys.readouterr().err


def test_a_pipe_is_no_report(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "status.json")
    with pytest.raises(ConfigError, match="no plain file"):
        status_file.read(tmp_path / "status.json")


def test_without_a_job_it_says_how_to_watch_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["status"]) == 1
    assert "FUSIONLAYER_WATCH=1" in capsys.readouterr().err
    assert not os.listdir(tmp_path)
