"""Tables fit the terminal, and their numbers compare."""

import io
import itertools
import sys
from pathlib import Path

import pytest

from benchmarks import drawing
from fusionlayer.base.errors import ConfigError
from fusionlayer.cli import tables
from fusionlayer.cli.progress import ProgressLine
from fusionlayer.cli.tables import Column, Table, layout, print_table
from fusionlayer.cli.units import MEMORY, RATES, SECONDS, in_one_unit
from tests.loops import looped
from tests.tiers import needs

NUMBERS = ("1234567.25", "2.00")
TABLE = Table(
    "A title that is longer than the narrowest of the terminals here",
    [
        Column("bucket", ["0", "1"]),
        *(Column(f"number{place}", NUMBERS, "ms", gives_way=place) for place in range(5)),
        Column("why", ["because it takes less time than all others do", ""], text=True, wraps=True),
    ],
)


def test_a_table_fits_every_terminal_and_no_number_is_cut() -> None:
    shown = []
    for width in (None, *range(200, 20, -1)):
        table, _, note = TABLE.format(width).partition("\n(no room for ")
        dropped = [name for name in " ".join(note.split()).partition(";")[0].split(", ") if name]
        kept = [f"number{place}" for place in range(5) if f"number{place}" in table]
        if width is not None and width >= 44:
            assert max(map(len, [*table.splitlines(), *note.splitlines()[1:]])) <= width, table
        assert sorted(kept + dropped) == [f"number{place}" for place in range(5)]
        assert len(kept) == table.count(NUMBERS[0]) == table.count(" ms"), table
        assert table.count("because") == table.count("others") == 1
        shown.append(kept)
    assert all({*less} <= {*more} for more, less in itertools.pairwise(shown))
    assert len(shown[0]) == len(shown[1]) == 5 and shown[-1] == ["number0"], "what gives way goes in its order"


def test_columns_may_be_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    other = Table("Other", [Column("else", ["1"])])
    chosen = layout([TABLE, other], ["bucket", "number4"], 20)
    assert chosen.splitlines()[-6:-2] == [
        "bucket     number4",
        "                ms",
        "------  ----------",
        "     0  1234567.25",
    ]
    assert "Other" not in chosen
    assert layout([TABLE], ["all"], 20) == layout([TABLE], None, None)
    for columns, width in (("", None), ("x", None), ("0", None), ("80", 80)):
        monkeypatch.setenv("COLUMNS", columns)
        assert tables.screen_width() == width, "a pipe has room for everything, unless COLUMNS says otherwise"
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert tables.screen_width() is not None
    print_table("title", ("name", "ms"), [("a", "10"), ("long", "9")], right=(1,))
    assert capsys.readouterr().out == "title\n\nname  ms\n----  --\na     10\nlong   9\n\n"


@looped(
    "ladder, numbers, unit, texts",
    [
        (SECONDS, [0.0001, 0.0004, 0.02], "us", ["100", "400", "20000"]),
        (SECONDS, [0.0, 0.072, 0.12688], "ms", ["0.0", "72.0", "126.9"]),
        (SECONDS, [1.5, None], "s", ["1.50", ""]),
        (RATES, [5e7, 1e8, 2e9], "Mbit/s", ["400", "800", "16000"]),
        (RATES, [5e7, 1.5e9, 2e9], "GB/s", ["0.05", "1.50", "2.00"]),
        (MEMORY, [4096, 65536, 1 << 24], "KiB", ["4", "64", "16384"]),
        (SECONDS, [], "us", []),
        (SECONDS, [0.0], "us", ["0"]),
    ],
)
def test_numbers_of_a_column_have_one_unit_and_equally_many_decimals(
    ladder: dict[str, float], numbers: list[float | None], unit: str, texts: list[str]
) -> None:
    assert in_one_unit(ladder, numbers) == (unit, [texts])


@needs("matplotlib")
def test_lines_are_named_at_their_ends_and_names_stay_apart(tmp_path: Path) -> None:
    with drawing.style():
        figure = drawing.figure(5, 2)
        axes = figure.subplots()
        for place, end in enumerate((5.0, 5.01, 4.99, 0.0, 0.01)):
            axes.plot([0, 1], [0, end], label=f"line {place}", color=drawing.PALETTE[place])
        axes.plot([0, 1], [1, 1])  # without a name
        drawing.name_lines(axes)
        path = tmp_path / "lines.svg"
        drawing.save(figure, path)
        boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert [*boxes] == [f"line {place}" for place in range(5)]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes.values(), 2))
    assert boxes["line 1"].y0 > boxes["line 0"].y0 > boxes["line 2"].y0 > boxes["line 3"].y0
    room = axes.get_window_extent()
    assert all(room.y0 < (box.y0 + box.y1) / 2 + 1 and (box.y0 + box.y1) / 2 < room.y1 + 1 for box in boxes.values())
    assert all(name in path.read_text() for name in boxes), "text stays text"


def test_each_colour_can_be_read_as_text_on_white() -> None:
    for colour in (*drawing.PALETTE, drawing.GREY):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        assert 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) >= 4.5, colour


def test_without_matplotlib_an_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        drawing.style()


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
