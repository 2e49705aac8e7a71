"""``fusionlayer bench collectives``."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from fusionlayer import codecs, collectives
from fusionlayer.cli import main
from fusionlayer.transport import local

QUICK = ["--calls", "2", "--warmup", "1"]


def measure(ranks: int, *arguments: str) -> list[int]:
    """Run the command on so many ranks that are threads; return their exit statuses."""
    return local.run(lambda rank: main(["bench", "collectives", *QUICK, *arguments]), ranks)


def test_rows_say_what_was_sent_and_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(2, "--min", "4K", "--max", "64K", "--factor", "16", "--codecs", "raw,int8", "--format", "json") == [
        0,
        0,
    ]
    told = json.loads(capsys.readouterr().out)
    assert {"hardware", "torch", "fusionlayer", "command"} <= set(told["environment"])
    rows: list[dict[str, Any]] = told["rows"]
    kinds = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    assert [(r["collective"], r["codec"], r["size"]) for r in rows] == [
        (kind, codec, size) for kind in kinds for codec in ("raw", "int8") for size in (4096, 65536)
    ]
    for row in rows:
        uncompressed = row["size"] * (1.0 if row["collective"] == "all_reduce" else 0.5)
        assert row["min_s"] <= row["time_s"] <= row["max_s"]
        for name, nbytes in (("algbw", row["size"]), ("busbw", row["sent_bytes"]), ("effbw", uncompressed)):
            assert row[f"{name}_gb_s"] == pytest.approx(nbytes / row["time_s"] / 1e9), name
        assert row["ratio"] == pytest.approx(uncompressed / row["sent_bytes"])
        if row["size"] == 65536:
            assert row["ratio"] == pytest.approx(1.0 if row["codec"] == "raw" else 3.87, rel=0.01), row


def test_algorithms_formats_and_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.csv"
    arguments = ["--collectives", "all_reduce,reduce_scatter", "--codecs", "all", "--algorithms", "all"]
    assert measure(3, *arguments, "--min", "3000", "--max", "3000", "--format", "csv", "--out", str(out)) == [0] * 3
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert "no all_reduce of topk by ring: " in printed.err
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    sums = {row["codec"] for row in rows if row["collective"] == "all_reduce"}
    assert sums >= {"raw", "int4", "thc", "topk", "dynamiq", "zip"} and sums <= {*codecs.names()}
    assert {row["algorithm"] for row in rows if row["collective"] == "all_reduce"} == {*collectives.names()}
    assert {row["algorithm"] for row in rows if row["collective"] == "reduce_scatter"} == {"default", "ring"}
    assert {(row["ranks"], row["size"]) for row in rows} == {("3", "3000")}
    assert measure(2, "--collectives", "all_gather", "--codecs", "bf16", "--dtype", "bf16", "--max", "4K") == [0, 0]
    title, _, head, units, _, row, _ = capsys.readouterr().out.splitlines()
    assert title == "2 ranks, bf16"
    assert " ".join(head.split()) == "collective codec algorithm size time min max algbw busbw effbw ratio"
    size, *times, algbw, busbw, effbw, ratio = units.split()
    assert (size, ratio) == ("KiB", "x") and len({*times}) == 1 and len({algbw, busbw, effbw}) == 1
    assert row.split()[:4] == ["all_gather", "bf16", "default", "4"]


@pytest.mark.medium
def test_ranks_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = ["--num-proc=2", "--codecs", "int4", "--max", "4K", "--format", "json", "--out", str(out)]
    assert main(["bench", "collectives", *QUICK, *arguments]) == 0
    assert {row["ranks"] for row in json.loads(out.read_text())["rows"]} == {2}
