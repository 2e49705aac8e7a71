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
TITLE = "Convergence: GPT of width 384, 6 layers and context 128; 2 workers with batches of 2; 100 steps of AdamW"


def training_row(method: str, seconds: float, rate: str | None = "100mbit") -> dict[str, Any]:
    ratio = 4.0 / seconds
    speedup = {"median": ratio, "low": 0.9 * ratio, "high": 1.2 * ratio, "min": 0.8 * ratio, "max": 1.3 * ratio}
    return {
        **{"model": "gpt", "hosts": 2, "workers": 1, "rate": rate, "method": method, "step_seconds": seconds},
        **{"speedup": speedup, "bytes_per_step": 1e7 * seconds, "compute_seconds": 0.25},
        "codec_seconds": 0.05 if method.startswith("int") else None,
    }


def run(method: str, seed: int, losses: list[tuple[int, float]]) -> dict[str, Any]:
    return {"method": method, "seed": seed, "losses": [list(at) for at in losses], "final": losses[-1][1]}


ROWS = [
    training_row(method, 4.0 * 0.96**place, rate)
    for rate in ("1gbit", "100mbit")
    for place, method in enumerate(all_methods())
]
RUNS = [
    run("ddp", 0, [(0, 5.0), (50, 3.0), (100, 2.0)]),
    run("ddp", 1, [(0, 5.0), (50, 3.4), (100, 2.2)]),
    run("int8", 0, [(0, 5.0), (50, 2.4), (100, 2.3)]),
    run("int8", 1, [(0, 5.0), (50, 2.6), (100, 2.1)]),
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


def test_bytes_are_those_of_the_slowest_link() -> None:
    figure = plots.bytes_sent(
        SETTING, [training_row("alone", 0.1), training_row("ddp", 4.0), training_row("int8", 1.0)]
    )
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["10", "40"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["int8", "ddp"]


def test_time_to_loss() -> None:
    rows = [
        training_row("ddp", 6.0),
        training_row("int8", 3.0),
        training_row("int8+overlap", 1.5),
        training_row("fp16", 2),
    ]
    curves = {"ddp": RUNS[:2], "int8": RUNS[2:]}
    figure = plots.time_to_loss(SETTING, rows, curves)
    assert figure is not None
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_title().get_text() == "until loss 2.200"  # the mean end of int8; ddp ends lower
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["int8+overlap: 2.5 min", "int8: 5 min", "ddp: 10 min"], "the fastest first"
    assert axes.get_lines()[0].get_path().vertices[:, 1] == pytest.approx([3.2, 2.1])
    assert_apart(figure, [*legend.get_texts(), *axes.get_xticklabels()])
    assert plots.time_to_loss(SETTING, rows[3:], curves) is None


@pytest.mark.parametrize(
    ("setting", "title", "same"),
    [
        (SETTING, TITLE, True),
        (Setting("gpt", 1, 2), TITLE, True),
        (Setting("gpt", 2, 2), TITLE, False),
        (Setting("gpt-small", 2, 1), TITLE, False),
        (Setting("resnet", 2, 1), TITLE, False),
        (SETTING, TITLE.replace("batches of 2;", "batches of 20;"), False),
    ],
)
def test_loss_is_drawn_only_where_the_same_was_trained(
    setting: Setting, title: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{**row, "model": setting.model, "hosts": setting.hosts, "workers": setting.workers} for row in ROWS]
    saved: list[str] = []
    monkeypatch.setattr(plots, "save", lambda figure, stem: saved.append(stem.name))
    plots.draw([{"title": title, "rows": RUNS}, {"title": "Training", "rows": rows}], tmp_path)
    kinds = ["speedup", "breakdown", "bytes", *(["time-to-loss"] if same else [])]
    assert saved == [f"{kind}_{setting.stem}" for kind in kinds]


@exhaustive(guarded_by="tests/benchmarks/test_plots.py::test_speedup_has_every_method_with_its_interval")
def test_the_command_writes_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "training.json"
    result.write_text(json.dumps({"title": "Training", "rows": ROWS}))
    monkeypatch.setattr(sys, "argv", ["plots", str(result), "--out", str(tmp_path / "plots")])
    assert plots.main() == 0
    assert len(capsys.readouterr().out.split()) == 3
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
