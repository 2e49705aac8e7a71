"""Pictures over several result files: gain by ratio, by number of workers, bytes by method, and costs of many ranks."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from benchmarks import drawing
from benchmarks.pages.found import SCOREBOARD, Record, rows, scored, the

__all__ = ["bytes_by_method", "gain", "ranks", "workers"]

_GAINS = {"int4": "int4", "int8": "int8", "ddp-bf16": "DDP, bf16 hook", "ddp-powersgd": "DDP, PowerSGD hook"}
_SETTINGS = ("gpt-2x1", "gpt-2x2", "resnet-4x1")
_ONEBIT, _LOCAL = "onebit+freeze_step=75+warmup_codec=int4", "int4+local=overlapped:every=4"
_BYTES = {
    **{"ddp": "DDP, f32", "ddp-fp16": "DDP, fp16 hook", "int4": "int4", "onebit+freeze_step=1": "OneBitAdam, onebit"},
    **{_LOCAL: "int4, Local.overlapped(4)", "ddp-powersgd": "DDP, PowerSGD hook"},
}


def gain() -> Figure:
    """Return steps compared with DDP against sending time / computing time, from all settings of training."""
    found = {setting: {method: _gains(setting, method) for method in _GAINS} for setting in _SETTINGS}
    ratios = [ratio for gains in found.values() for ratio, _ in gains["int4"]]
    figure = drawing.figure(7.0, 3.4)
    axes = figure.subplots()
    span = [0.8 * min(ratios), 1.25 * max(ratios)]
    axes.plot(span, [1.0, 1.0], ":", color="black", linewidth=1.0, label="DDP")
    axes.plot(span, [1 + ratio for ratio in span], "--", color="black", linewidth=1.0, label="sending takes no time")
    for method, colour in zip(_GAINS, (*drawing.PALETTE[:2], drawing.GREY, drawing.PALETTE[3]), strict=True):
        first, *others = (found[setting][method] for setting in _SETTINGS)
        axes.plot(*zip(*first, strict=True), "o-", color=colour, label=_GAINS[method])
        for points in filter(None, others):
            axes.plot(*zip(*points, strict=True), "o", color=colour, fillstyle="none")
    axes.set(xscale="log", yscale="log", xlim=span, ylim=(0.9, 1.1 * (1 + span[1])))
    axes.set(xlabel="sending time of f32 gradients / computing time", ylabel="times as many steps as DDP")
    for axis, ticks in ((axes.xaxis, (1, 2, 5, 10, 20)), (axes.yaxis, (1, 2, 5, 10, 20))):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())
    axes.grid()
    drawing.name_lines(axes)
    figure.suptitle(
        "The gain grows with sending / computing (circles: four workers, GPT or ResNet)",
        x=0.01,
        ha="left",
    )
    return figure


def _gains(setting: str, method: str) -> list[tuple[float, float]]:
    """Return ratios, ascending, and the steps of a method over those of DDP."""
    ratios = {row.rate: row.wire_seconds / row.compute_seconds for row in rows(f"training-{setting}", method="ddp")}
    return sorted((ratios[row.rate], row.speedup.median) for row in rows(f"training-{setting}", method=method))


def workers() -> Figure:
    """Return minutes until the loss that f32 has after half of its steps, with two and four workers."""
    methods = {"ddp": ("DDP, f32", drawing.GREY), _ONEBIT: ("OneBitAdam", drawing.PALETTE[1])}
    methods |= {_LOCAL: ("int4, Local.overlapped(4)", drawing.PALETTE[0])}
    boards = {2: SCOREBOARD, 4: "scoreboard-gpt-4x1-adamw"}
    figure = drawing.figure(7.0, 2.6)
    axes = figure.subplots()
    names, minutes, colours = [], [], []
    for count, board in reversed(boards.items()):
        for method, (name, colour) in reversed(methods.items()):
            names.append(f"{name}, {count} workers")
            minutes.append(scored(method, "100mbit/1ms", board).minutes[1])
            colours.append(colour)
    axes.barh(range(len(names)), minutes, color=colours)
    axes.set_yticks(range(len(names)), names)
    drawing.name_bars(axes, [f"{each:.3g}" for each in minutes], minutes)
    axes.set(xlabel="minutes until f32's loss after half of its steps, at 100 Mbit/s")
    figure.suptitle("Methods that send less reach a loss sooner with two workers and with four", x=0.01, ha="left")
    return figure


def bytes_by_method() -> Figure:
    """Return the bytes that a node sends in a step, by method."""
    sent = {method: _steps(method).bytes_per_step / 1e6 for method in _BYTES}
    order = sorted(_BYTES, key=sent.__getitem__)
    figure = drawing.figure(7.0, 2.5)
    axes = figure.subplots()
    colours = [drawing.GREY if method.startswith("ddp") else drawing.PALETTE[0] for method in order]
    axes.barh(range(len(order)), [sent[method] for method in order], color=colours)
    axes.set_yticks(range(len(order)), [_BYTES[method] for method in order])
    drawing.name_bars(axes, [f"{sent[method]:.3g} MB" for method in order], [sent[method] for method in order])
    axes.set(xlabel="MB that a node sends in a step: 2 nodes of one worker, 10.9 M parameters")
    times = sent["ddp"] / sent["int4"]
    figure.suptitle(f"int4 sends {times:.2g} times fewer bytes than DDP in f32", x=0.01, ha="left")
    return figure


def _steps(method: str) -> Record:
    """Return the row of a method's steps at 100 Mbit/s without a long round trip."""
    return the(SCOREBOARD, kind="steps", rate="100mbit", rtt="1ms", method=method)


def ranks() -> Figure:
    """Return seconds to start, and processor time of a step, against the number of ranks."""
    found = rows("scale")
    panels = {"start": "seconds to start", "step": "CPU ms of a rank's step"}
    figure = drawing.figure(7.5, 2.9)
    counts = [row.ranks for row in found]
    for axes, (key, what) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name, colour in (("ddp", drawing.GREY), ("fusionlayer", drawing.PALETTE[0])):
            values = [row[name][key] for row in found]
            axes.plot(counts, values, "o-", color=colour, label={"ddp": "DDP"}.get(name, name))
        axes.set(xscale="log", xlabel="ranks on two cores", ylabel=what, ylim=(0, None))
        axes.xaxis.set_major_locator(FixedLocator(counts))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y")
        drawing.name_lines(axes)
    last = found[-1]
    times = last.fusionlayer.start / last.ddp.start
    figure.suptitle(f"{last.ranks} ranks take {times:.2g} times as long as DDP to start", x=0.01, ha="left")
    return figure
