"""One style for all pictures of benchmarks.

    with drawing.style():
        figure = drawing.figure(7, 3)
        axes = figure.subplots()
        axes.plot([1, 2, 4], [10, 19, 35], label="int4")
        axes.set(title="int4 scales to four workers", xlabel="workers", ylabel="steps per second")
        drawing.name_lines(axes)
        drawing.save(figure, path)

matplotlib is imported when something is drawn. A title states the message of the picture, as a sentence. Every axis
names its unit. A picture has at most six colours; baselines are ``GREY``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionlayer.base.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#C4500A", "#007A57", "#9C4A7C", "#8A6100", "#5C5CB8")
"""Like Okabe and Ito's colours for any kind of colour vision, but dark enough to be read as text on white."""

GREY = "#6B6B6B"
"""For baselines of a picture."""

SIZE = 9.0
"""Size of all text, in points."""

_STYLE: Any = {  # matplotlib's type lists every setting
    "axes.axisbelow": True,
    "axes.grid": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": SIZE,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.titlesize": SIZE,
    "figure.titleweight": "bold",
    "font.size": SIZE,
    "axes.labelsize": SIZE,
    "xtick.labelsize": SIZE,
    "ytick.labelsize": SIZE,
    "legend.fontsize": SIZE,
    "legend.title_fontsize": SIZE,
    "grid.alpha": 0.6,
    "grid.linewidth": 0.4,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.0,
    "savefig.dpi": 110,
    "svg.fonttype": "none",  # text stays text: a tenth of the bytes
    "svg.hashsalt": "fusionlayer",  # the same picture has the same bytes
}


def style() -> AbstractContextManager[None]:
    """Return a context in which figures are made, filled and saved.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError:
        raise ConfigError("pictures need matplotlib, which is not installed: pip install matplotlib") from None
    return rc_context(_STYLE)


def figure(width: float, height: float) -> Figure:
    """Return an empty figure of this many inches, which no window shows. Call it within ``style()``."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def name_lines(axes: Axes, gap: float = 1.25) -> None:
    """Write the label of every line after its last point, in its colour; move names that would overlap apart.

    Call it last: it needs the limits of the axes. A name that does not fit makes the figure's margin wider.

    Args:
        axes: the axes whose lines have labels.
        gap: least distance of two names, in heights of a letter.
    """
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    ends: Any = [line.get_xydata()[-1] for line in lines]  # type: ignore[index]
    axes.get_ylim()  # settles the limits
    own = axes.transAxes.inverted().transform(axes.transData.transform(ends))[:, 1]
    height = axes.get_position().height * axes.get_figure(root=True).get_figheight() * 72  # type: ignore[union-attr]
    step, top = gap * SIZE / height, 1.0
    places: dict[int, float] = {}
    for index in sorted(range(len(lines)), key=lambda index: -own[index]):
        places[index] = top = min(float(own[index]), top)
        top -= step
    floor = 0.0
    for index in sorted(places, key=places.__getitem__):
        places[index] = floor = max(places[index], floor)
        floor += step
    for index, line in enumerate(lines):
        axes.annotate(
            str(line.get_label()),
            (1.02, places[index]),
            xycoords="axes fraction",
            color=line.get_color(),
            va="center",
            annotation_clip=False,
        )


def name_bars(axes: Axes, texts: list[str], values: list[float]) -> None:
    """Write a text after each horizontal bar; ``values`` are the bars' ends, in the order of their places 0, 1, ..."""
    room = max(values)
    for place, (text, value) in enumerate(zip(texts, values, strict=True)):
        axes.text(value + 0.015 * room, place, text, va="center")
    axes.set_ylim(-0.6, len(texts) - 0.4)
    axes.set_xlim(0, room * (1.06 + 0.018 * max(map(len, texts))))


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format that the path's ending names, such as .svg or .png. Call it within ``style()``.

    Raises:
        ConfigError: the format is unknown, or the file cannot be written.
    """
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        figure.savefig(path, metadata=metadata)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"picture {path} cannot be written: {why}") from error
