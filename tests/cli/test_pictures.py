"""Pictures of the commands: how many lines they have, which, and in what units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fusionlayer.cli import drawing, pictures
from tests.tiers import needs

pytestmark = [pytest.mark.short, needs("matplotlib")]


@pytest.fixture(autouse=True)
def style() -> Iterator[None]:
    with drawing.style():
        yield


def lines(axes: Any) -> list[str]:
    return [line.get_label() for line in axes.get_lines() if not line.get_label().startswith("_")]


def test_speedups_are_those_of_the_five_fastest_methods_in_their_order() -> None:
    curves = {f"int{place}": [(2, 0.5 + place), (1024, 0.1 + place)] for place in range(9)}
    figure = pictures.draw_speedups("Projected: gpt", curves)
    (axes,) = figure.axes
    assert lines(axes) == ["int8", "int7", "int6", "int5", "int4"]
    names = {text.get_text(): text.get_color() for text in axes.texts}
    assert names == {line.get_label(): line.get_color() for line in axes.get_lines() if line.get_label() in names}
    assert len(names) == 5, "each line has its name beside it"
    title = "int8 makes up to 8.5 times the steps of ddp (the 5 fastest of 9 methods)\nProjected: gpt"
    assert axes.get_title(loc="left") == title
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("workers", "steps per second, ddp = 1")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "1024"]


def test_bandwidths_have_one_unit_and_one_colour_for_a_codec_in_all_panels() -> None:
    fast = {"raw": [(4096, 1e6), (1 << 24, 4e8)], "int8": [(4096, 2e6), (1 << 24, 8e8)]}
    figure = pictures.draw_bandwidths("2 ranks, f32", {"all_reduce": fast, "all_gather": {"raw": fast["raw"]}})
    one, other = figure.axes
    assert lines(one) == ["int8", "raw"] and lines(other) == ["raw"]
    assert one.get_lines()[1].get_color() == other.get_lines()[0].get_color()
    assert {axes.get_ylabel() for axes in figure.axes} == {"effbw, Mbit/s"}
    assert [float(y) for y in one.get_lines()[0].get_ydata()] == pytest.approx([16, 6400])
    assert [tick.get_text() for tick in one.get_xticklabels()] == ["4 KiB", "16 MiB"]
