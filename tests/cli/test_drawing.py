import itertools
import sys
from pathlib import Path

import pytest

from fusionlayer.base.errors import ConfigError
from fusionlayer.cli import drawing
from tests.tiers import needs


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


def test_without_matplotlib_an_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        drawing.style()
