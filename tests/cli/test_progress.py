"""Long work tells how far it is, on a terminal and in a log."""

import io

import pytest

from fusionlayer.cli.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(file: io.StringIO, seconds: float, parts: int = 10, shown: bool = True) -> str:
    """Do equal parts that take so many seconds together; return what was told."""
    now = 100.0
    with ProgressLine("bench", parts, shown=shown, file=file, clock=lambda: now) as told:
        for part in range(parts):
            told.at(part, f"part {part}")
            now += seconds / parts
        told.say("it has ended")
    return file.getvalue()


def test_a_log_has_a_line_every_ten_seconds_with_what_is_left() -> None:
    assert work(io.StringIO(), 9.0) == "it has ended\n", "short work says nothing"
    assert work(io.StringIO(), 40.0).splitlines() == [
        "bench: 30% done, about 28 s left; part 3",
        "bench: 60% done, about 16 s left; part 6",
        "bench: 90% done, about 4 s left; part 9",
        "it has ended",
    ]
    assert work(io.StringIO(), 400.0).startswith("bench: 10% done, about 6 min left; part 1\n")
    assert work(io.StringIO(), 400.0, shown=False) == "", "one rank of a job is enough"


def test_a_terminal_has_one_line_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    lines = work(Terminal(), 40.0).split("\r\x1b[K")
    assert lines[1:3] == ["bench: 0% done; part 0", "bench: 10% done, about 36 s l"], "it is never longer than a line"
    assert len(lines) == 12 and lines[-1] == "it has ended\n"
    assert len(work(Terminal(), 0.5).split("\r\x1b[K")) < 12, "it is not drawn more often than anybody can read"
    monkeypatch.setenv("TERM", "dumb")
    assert "\r" not in work(Terminal(), 40.0)
