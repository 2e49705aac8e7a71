"""The benchmark of collectives: its arithmetic, its command line, and what its workers count."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.collective import __main__ as command
from benchmarks.collective.cell import Cell, Row
from benchmarks.collective.operations import YARDSTICK

KB, MB = 1 << 10, 1 << 20


def cell(rate: str | None = None, codecs: tuple[str, ...] = ("raw",), mpi: bool = False, **more: Any) -> Cell:
    """Return a cell of two workers."""
    hosts = 1 if rate is None and "interfaces" not in more else 2
    return Cell(rate, hosts, 2 // hosts, (64 * KB,), 2, codecs, ("dense", "one_shot", "two_shot"), mpi, **more)


class TestCommand:
    @pytest.fixture(autouse=True)
    def no_workers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(command, "run", self.fake_run)
        monkeypatch.setattr(command, "why_not", lambda network, mpi=False: self.no_namespaces)
        self.cells: list[Cell] = []
        self.no_namespaces: str | None = None
        self.failing: str | None = ""
        self.interrupting: str | None = ""

    def fake_run(self, cell: Cell, *, isolated: bool, timeout: float) -> list[Row] | None:
        self.cells.append(cell)
        assert isolated == (self.no_namespaces is None)
        if cell.rate == self.interrupting:
            raise KeyboardInterrupt
        return None if cell.rate == self.failing else [Row(YARDSTICK, "", 64 * KB, 1.0, 1, [0.1], [1e5], [0.1])]

    def call(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["collective", "--busy-ok", *arguments])
        return command.main()

    def test_writes_table_and_figures(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        status = self.call(monkeypatch, "--rates", "none,1gbit", "--worlds", "2,4", "--out", str(tmp_path))
        assert status == 0
        assert [(c.hosts, c.workers) for c in self.cells] == [(1, 2), (1, 4), (2, 1), (2, 2)]
        assert {c.turn_seconds for c in self.cells} == {0.1}
        (path,) = tmp_path.glob("collective_*.json")
        rows = json.loads(path.read_text())["rows"]
        assert [(r["rate"], r["world"]) for r in rows] == [(None, 2), (None, 4), ("1gbit", 2), ("1gbit", 4)]
        assert rows[0]["seconds"] == [0.1] and rows[0]["load"] >= 0
        assert "of the wire" in path.with_suffix(".md").read_text()

    def test_keeps_what_it_has_when_it_is_interrupted(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.interrupting = "1gbit"
        assert self.call(monkeypatch, "--rates", "none,1gbit", "--worlds", "2", "--out", str(tmp_path)) == 1
        assert "interrupted" in capsys.readouterr().err
        (path,) = tmp_path.glob("collective_*.json")
        assert [r["rate"] for r in json.loads(path.read_text())["rows"]] == [None]


@pytest.mark.medium
def test_workers_that_fail_are_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.run(cell(codecs=("no such codec",)), isolated=False, timeout=180) is None
    assert "unknown codec 'no such codec'" in capfd.readouterr().err
