from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import errors, papers
from fusionlayer import codecs

pytestmark = pytest.mark.short


def test_the_command_writes_a_table_for_each_topic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--numel",
        "8192",
        "--topics",
        "rounding,sdp4bit,counts,taco,qsdp,switcher,plans",
        "--out",
        str(tmp_path),
        "--hardware",
        "test",
    ]
    assert papers.main(options) == 0
    printed = capsys.readouterr().out
    assert all(
        papers.TOPICS[topic][0] in printed for topic in ("rounding", "counts", "taco", "qsdp", "switcher", "plans")
    )
    rows = {path.name.split("_")[0]: json.loads(path.read_text())["rows"] for path in tmp_path.glob("*.json")}
    assert {name: len(found) for name, found in rows.items()} == {
        **{"papers-rounding": 1, "papers-sdp4bit": 5, "papers-counts": 9},
        **{"papers-taco": 8, "papers-plans": 2, "papers-qsdp": 6, "papers-switcher": 4},
    }
    lost = {row["what"]: row["vNMSE"] for row in rows["papers-sdp4bit"]}
    assert lost["qwd"] < lost["qw"] / 1000 and lost["tlq_hs"] < lost["tlq"] < lost["ulq"]
    for row in rows["papers-plans"]:
        assert row["safusion"] <= row["safusion_inter"]


def test_the_steps_of_taco_in_plain_words_lose_what_the_codec_loses() -> None:
    x = errors.gaussian(1 << 16)
    plain = papers.plain_taco(x, rotated=True, tau=448.0, scaled=True)
    lost = float((plain - x).square().sum() / x.square().sum())
    assert lost == pytest.approx(errors.error(codecs.get("taco", scales="dual"), x), rel=0.01)
    saturated = papers.plain_taco(x, rotated=True, tau=448.0)
    assert float((saturated - x).square().sum() / x.square().sum()) > 50 * lost
