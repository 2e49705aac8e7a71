"""The benchmark of collectives: its arithmetic, its command line, and what its workers count."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.collective import __main__ as command
from benchmarks.collective.cell import Cell, Row, in_words
from benchmarks.collective.operations import YARDSTICK
from benchmarks.collective.options import Link, parse
from benchmarks.collective.picture import draw_shares
from benchmarks.collective.summary import cpu_per_gigabyte, summarize, wire_share
from tests.examples.places import needs_namespaces
from tests.loops import looped
from tests.tiers import exhaustive, long, needs

KB, MB = 1 << 10, 1 << 20


def cell(rate: str | None = None, codecs: tuple[str, ...] = ("raw",), mpi: bool = False, **more: Any) -> Cell:
    """Return a cell of two workers."""
    hosts = 1 if rate is None and "interfaces" not in more else 2
    return Cell(rate, hosts, 2 // hosts, (64 * KB,), 2, codecs, ("dense", "one_shot", "two_shot"), mpi, **more)


def row(name: str, seconds: list[float], sent: float = 1e6, bus_factor: float = 1.0) -> Row:
    operation, _, codec = name.partition("+")
    return Row(operation, codec, MB, bus_factor, 1, seconds, [sent] * len(seconds), [0.001] * len(seconds))


@pytest.mark.short
class TestArithmetic:
    @pytest.mark.parametrize(
        ("size", "words"), [(64 * KB, "64 KB"), (4 * MB, "4 MB"), (1536 * KB, "1.5 MB"), (8, "8 B")]
    )
    def test_sizes_are_words(self, size: int, words: str) -> None:
        assert in_words(size) == words

    def test_the_wire_is_held_to_its_full_rate(self) -> None:
        assert wire_share(cell("100mbit"), row("x", [0.1, 0.08, 0.16])) == pytest.approx(0.8)
        assert wire_share(cell(None), row("x", [0.1])) is None

    def test_interfaces_are_held_to_the_sum_of_their_rates(self) -> None:
        two = cell(interfaces=("30mbit", "50mbit"), delay="25ms", loss=0.001, congestion="bbr")
        assert wire_share(two, row("x", [0.1])) == pytest.approx(1.0)
        assert two.network == "30mbit+50mbit, 50 ms, 0.001 lost, bbr, 2 hosts"

    def test_cpu_time_is_that_of_what_was_sent(self) -> None:
        assert cpu_per_gigabyte(row("x", [1.0, 1.0], sent=2e6)) == pytest.approx(0.5)
        assert cpu_per_gigabyte(row("x", [1.0], sent=0.0)) is None

    def test_bandwidths_are_those_of_nccl_tests(self) -> None:
        line = summarize(cell(), [row(YARDSTICK, [0.01, 0.02, 0.03], bus_factor=1.5)])[0]
        assert (line["ms"], line["min..max"]) == ("20.00", "10.00..30.00")
        assert (line["algbw, MB/s"], line["busbw, MB/s"]) == ("52.4", "78.6")

    def test_speed_is_compared_within_rounds(self) -> None:
        rows = [
            row(YARDSTICK, [1.0, 2.0, 4.0]),
            row("two_shot+int8", [0.5, 0.5, 1.0]),
            row("half", [1.0], bus_factor=0.5),
        ]
        yardstick, int8, half = summarize(cell(), rows)
        assert int8["times as fast"] == "4.00 [2.00..4.00]"
        assert int8["operation"] == "two_shot int8"
        assert yardstick["times as fast"] == half["times as fast"] == ""

    @needs("matplotlib")
    def test_the_picture_has_a_bar_for_each_way_of_a_call(self) -> None:
        rows = [
            row("gloo all_reduce", [0.2]),
            row("all_reduce over gloo+raw", [0.4]),
            row("all_reduce over 2+raw", [0.1]),
        ]
        (axes,) = draw_shares([(cell("100mbit"), rows), (cell(None), rows)]).axes
        assert [bar.get_width() for bar in axes.patches if bar.get_height() and bar.get_width()] == pytest.approx(
            [40, 20, 80]
        )
        assert [label.get_text() for label in axes.get_yticklabels()] == ["gloo all_reduce", "all_reduce raw"]

    def test_each_function_is_compared_with_its_own_kind_as_far_as_both_were_measured(self) -> None:
        gathers = [
            row("gloo all_gather", [1.0, 3.0], bus_factor=0.5),
            row("all_gather over gloo+raw", [0.5], bus_factor=0.5),
        ]
        gathers[1].against = "gloo all_gather"
        assert summarize(cell(), gathers)[1]["times as fast"] == "2.00 [2.00..2.00]"
        assert summarize(cell(), gathers[1:])[0]["times as fast"] == ""


@pytest.mark.short
class TestCommandLine:
    def read(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["collective", *arguments])
        return parse("")

    def test_understands_rates_and_sizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = self.read(monkeypatch, "--rates", "none,100mbit", "--sizes", "64KB,3MB", "--worlds", "2,6")
        assert options.rates == (None, "100mbit")
        assert options.sizes == (64 * KB, 3 * MB)
        assert options.worlds == (2, 6)
        assert "int" not in options.codecs and "int8" in options.codecs

    def test_understands_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = self.read(monkeypatch, "--links", "1gbit,100mbit/50ms/0.0005/bbr,30mbit+100mbit/1ms", "--worlds", "2")
        assert options.links == (
            Link("1gbit"),
            Link("100mbit", "25ms", 0.0005, "bbr"),
            Link(None, "0.5ms", interfaces=("30mbit", "100mbit")),
        )
        assert self.read(monkeypatch, "--rates", "none,1gbit").links == (Link(), Link("1gbit"))
        assert self.read(monkeypatch, "--collectives", "none").collectives == ()

    def test_smoke_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = self.read(monkeypatch, "--smoke")
        assert (options.rates, options.worlds, options.sizes) == ((None, "1gbit"), (2,), (64 * KB,))
        assert options.smoke and not self.read(monkeypatch).smoke
        assert (options.turn_seconds, self.read(monkeypatch).turn_seconds) == (0.0, 0.1), "one call is enough to see"

    @looped(
        "arguments, told",
        [
            ("--sizes 64", "such as 64KB"),
            ("--rates fast", "such as 100mbit"),
            ("--rates 10gbit", "choose up to 1gbit"),
            ("--worlds 1", "at least 2"),
            ("--worlds 3", "choose a multiple"),
            ("--links 100mbit/50", "such as 1ms; expected RATE/RTT/LOSS/CONGESTION"),
            ("--links 1gbit/1ms/2", "expected a chance from 0 to below 1"),
            ("--links 1gbit/1ms/0/reno/5", "more than four parts"),
            ("--links 1gbit --worlds 3", "choose a multiple"),
            ("--connections 2", "say which are tried over them"),
            ("--connections 2/ --functions all_reduce", "the name of a congestion control"),
            ("--connections 0 --functions all_reduce", "from 1 to 64"),
            ("--only (", "expected a regular expression"),
            ("--codecs int9", "choose from"),
        ],
    )
    def test_says_what_it_cannot_do(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, told: str
    ) -> None:
        with pytest.raises(SystemExit):
            self.read(monkeypatch, *arguments.split())
        assert told in capsys.readouterr().err


@pytest.mark.short
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

    def test_stays_on_loopback_where_there_are_no_namespaces(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.no_namespaces = "the program ip is missing"
        assert self.call(monkeypatch, "--rates", "none,1gbit", "--worlds", "2") == 0
        assert [c.rate for c in self.cells] == [None]
        assert "the program ip is missing" in capsys.readouterr().err
        assert self.call(monkeypatch, "--rates", "1gbit", "--worlds", "2") == 1

    def test_goes_on_after_a_failure_and_tells_it(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.failing = "1gbit"
        assert self.call(monkeypatch, "--rates", "1gbit,none", "--worlds", "2") == 1
        output = capsys.readouterr()
        assert "not everything was measured: 1gbit, 2 hosts, 2 workers" in output.err
        assert "loopback" in output.out

    def test_keeps_what_it_has_when_it_is_interrupted(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.interrupting = "1gbit"
        assert self.call(monkeypatch, "--rates", "none,1gbit", "--worlds", "2", "--out", str(tmp_path)) == 1
        assert "interrupted" in capsys.readouterr().err
        (path,) = tmp_path.glob("collective_*.json")
        assert [r["rate"] for r in json.loads(path.read_text())["rows"]] == [None]


@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
@pytest.mark.parametrize("rate", [None, pytest.param("1gbit", marks=long)])
@exhaustive(guarded_by="tests/benchmarks/test_collective.py::test_workers_that_fail_are_told_of")
def test_workers_count_the_bytes_of_each_operation(rate: str | None) -> None:
    """On a network of their own nothing else is counted, so what is sent is known to a few percent: headers."""
    mpi = rate is not None and command.why_no_mpi() is None
    where = cell(rate, codecs=("raw", "int8"), mpi=mpi, functions=("all_gather",), connections=("2",))
    rows = command.run(where, isolated=True, timeout=180)
    assert rows is not None
    sent = {row.name: min(row.sent) / (64 * KB) for row in rows}
    workers_per_device = where.workers
    expected = {
        "gloo all_reduce": 1.0,
        "gloo all_reduce again": 1.0,
        "gloo all_to_all": 0.5,
        "gloo all_gather": 0.5,
        **({"MPI Allreduce": 1.0, "MPI Alltoall": 0.5, "MPI Allgather": 0.5} if mpi else {}),
        "dense raw": 1.0,  # no "dense int8": that collective does not take it
        "one_shot raw": 1.0,
        "one_shot int8": 0.25,
        "two_shot raw": 1.0,
        "two_shot int8": 0.25,
        "all_gather over gloo raw": 0.5,
        "all_gather over 2 connections raw": 0.5,
        "all_gather over gloo int8": 0.125,
        "all_gather over 2 connections int8": 0.125,
    }
    assert list(sent) == list(expected)
    for name, share in expected.items():
        assert workers_per_device * share <= sent[name] <= workers_per_device * share * 1.15, (name, sent)
    assert all(len(row.seconds) == where.rounds and min(row.seconds) > 0 for row in rows)


@long(guarded_by="tests/benchmarks/test_collective.py::test_workers_count_the_bytes_of_each_operation")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_connections_are_counted_over_all_interfaces() -> None:
    """One that carries a third of the rate has a share of the bytes; an operation that takes long has fewer rounds."""
    where = cell(
        interfaces=("10mbit", "20mbit"),
        functions=("all_to_all",),
        connections=("2",),
        only="^all_to_all over 2",
        most_seconds=0,
    )
    (found,) = command.run(where, isolated=True, timeout=180) or ()
    assert found.name == "all_to_all over 2 connections raw" and found.against == "gloo all_to_all"
    assert len(found.seconds) == 1, "two rounds were asked for, and no seconds for them"
    assert 0.5 <= found.sent[0] / (64 * KB) <= 0.6


@pytest.mark.medium
def test_workers_that_fail_are_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.run(cell(codecs=("no such codec",)), isolated=False, timeout=180) is None
    assert "unknown codec 'no such codec'" in capfd.readouterr().err
