"""Tables fit the terminal, and their numbers compare."""

import itertools

import pytest

from fusionlayer.cli import tables
from fusionlayer.cli.tables import Column, Table, layout, print_table
from fusionlayer.cli.units import MEMORY, RATES, SECONDS, in_one_unit
from tests.loops import looped

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
