"""Pictures show what the result files say, without labels over each other."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import plots
from benchmarks.plots import Setting
from benchmarks.training.methods import all_methods
from fusionlayer.cli import drawing
from tests.tiers import exhaustive, needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

pytestmark = [pytest.mark.short, needs("matplotlib")]

SETTING = Setting("gpt", 2, 1)


def training_row(method: str, seconds: float, rate: str | None = "100mbit") -> dict[str, Any]:
    ratio = 4.0 / seconds
    speedup = {"median": ratio, "low": 0.9 * ratio, "high": 1.2 * ratio, "min": 0.8 * ratio, "max": 1.3 * ratio}
    return {
        **{"model": "gpt", "hosts": 2, "workers": 1, "rate": rate, "method": method, "step_seconds": seconds},
        **{"speedup": speedup, "bytes_per_step": 1e7 * seconds, "compute_seconds": 0.25},
        "codec_seconds": 0.05 if method.startswith("int") else None,
    }


ROWS = [
    training_row(method, 4.0 * 0.96**place, rate)
    for rate in ("1gbit", "100mbit")
    for place, method in enumerate(all_methods())
]


def boxes(figure: Figure, texts: list[Text]) -> list[Bbox]:
    figure.draw_without_rendering()
    return [text.get_window_extent() for text in texts if text.get_text()]


def assert_apart(figure: Figure, texts: list[Text]) -> None:
    found = boxes(figure, texts)
    assert len(found) > 1
    for one, other in itertools.combinations(found, 2):
        assert not one.overlaps(other)


def test_rows_are_grouped_by_setting_and_the_slowest_link_comes_first() -> None:
    other = {**training_row("ddp", 1.0), "model": "resnet", "hosts": 4}
    free = training_row("ddp", 0.3, None)
    found = plots.settings_of([free, *ROWS, other])
    assert list(found) == [SETTING, Setting("resnet", 4, 1)]
    assert list(dict.fromkeys(row["rate"] for row in found[SETTING])) == ["100mbit", "1gbit", None]


@pytest.fixture(autouse=True)
def style() -> Iterator[None]:
    with drawing.style():
        yield


def test_speedup_has_every_method_with_its_interval() -> None:
    figure = plots.speedup(SETTING, plots.settings_of(ROWS)[SETTING])
    slow, fast = figure.axes
    names = [label.get_text() for label in slow.get_yticklabels()]
    assert len(names) == len(all_methods()) - 2, "all but DDP and its repetition"
    assert "alone (limit)" in names and "ddp" not in names
    assert [axes.get_title(loc="left") for axes in (slow, fast)] == ["100 Mbit/s", "1 Gbit/s"]
    assert_apart(figure, [*slow.get_yticklabels(), *slow.texts])
    from matplotlib.container import BarContainer

    bars, *_ = (container for container in slow.containers if isinstance(container, BarContainer))
    medians = {row["method"]: row["speedup"]["median"] for row in ROWS}
    widths = [bar.get_width() for bar in bars]
    assert widths == sorted(widths) == [medians[name.removesuffix(" (limit)")] for name in names]
    ends = bars.errorbar[2][0].get_segments()[names.index("int8")][:, 0]
    assert sorted(ends) == pytest.approx([0.9 * medians["int8"], 1.2 * medians["int8"]])
    colours = {name: bar.get_facecolor() for name, bar in zip(names, bars, strict=True)}
    assert colours["int8"] == colours["int4"] != colours["ddp-bf16"] == colours["horovod"] != colours["alone (limit)"]
    assert len({*colours.values()}) == 3


def test_breakdown_adds_up_to_the_step() -> None:
    rows = [training_row("alone", 0.25), training_row("ddp", 4.0), training_row("int8", 0.28)]
    figure = plots.breakdown(SETTING, rows)
    (axes,) = figure.axes
    compute, codec, wait = ([bar.get_width() for bar in container] for container in axes.containers)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ddp", "int8", "alone"]
    assert compute == pytest.approx([250, 250, 250])
    assert codec == pytest.approx([0, 30, 0])
    assert wait == pytest.approx([3750, 0, 0])
    figure = plots.breakdown(SETTING, plots.settings_of(ROWS)[SETTING])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["100 Mbit/s", "1 Gbit/s"]
    for axes in figure.axes:
        assert_apart(figure, [*axes.texts, *axes.get_yticklabels()])


@exhaustive(guarded_by="tests/benchmarks/test_plots.py::test_speedup_has_every_method_with_its_interval")
def test_the_command_writes_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "training.json"
    result.write_text(json.dumps({"title": "Training", "rows": ROWS}))
    monkeypatch.setattr(sys, "argv", ["plots", str(result), "--out", str(tmp_path / "plots")])
    assert plots.main() == 0
    assert len(capsys.readouterr().out.split()) == 2
    assert "</svg>" in (tmp_path / "plots/speedup_gpt-2x1.svg").read_text()


def test_files_that_are_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "codec.json"
    other.write_text(json.dumps({"title": "Codec", "rows": [{"codec": "int8"}]}))
    monkeypatch.setattr(sys, "argv", ["plots", str(other), "--out", str(tmp_path / "plots")])
    assert plots.main() == 1
    assert "none of the files is a result of benchmarks.training" in capsys.readouterr().err
    other.write_text("[]")
    with pytest.raises(SystemExit):
        plots.main()
    assert "is no result file" in capsys.readouterr().err
