"""Draws the pictures of the documents: python docs/drawings/draw.py writes them anew, next to this file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from canvas import COLOURS, INK, PALE, SOFT, Canvas

__all__ = ["DRAWINGS"]

CHUNKS = ("#f2b04c", "#6fa8a3", "#9db8d9", "#c39bd3")


def step() -> Canvas:
    """Two steps side by side: f32 as it is, and int8."""
    canvas = Canvas(940, 470, "A training step: communication hidden behind backward, without and with a codec")
    left, scale = 150, 5.6
    forward, backward, update, buckets = 24.0, 48.0, 7.0, 4

    def panel(top: float, heading: str, encode: float, wire: float, decode: float) -> None:
        canvas.text(24, top, heading, 14, bold=True)
        rows = {"training thread": top + 14, "lane 1": top + 54, "lane 2": top + 94}
        for name, y in rows.items():
            canvas.text(24, y + 20, name, 12.5, colour=SOFT)
            canvas.line(left, y + 32, 920, y + 32)
        y = rows["training thread"]
        canvas.bar(left, y, forward * scale, 30, "compute", "forward")
        free, network, last = [0.0, 0.0], 0.0, 0.0
        for number in range(buckets):
            begin = forward + backward * number / buckets
            width = backward / buckets * scale
            canvas.bar(left + begin * scale, y, width, 30, "compute", f"backward {number + 1}", 10.5)
            ready = forward + backward * (number + 1) / buckets
            lane = number % 2
            row = rows[f"lane {lane + 1}"]
            start = max(ready, free[lane])
            canvas.line(left + ready * scale, y + 30, left + ready * scale, row + 4, dash=True)
            if encode:
                canvas.bar(left + start * scale, row, encode * scale, 30, "encode")
            sent = max(start + encode, network)  # the network carries one bucket at a time
            if sent > start + encode:
                canvas.bar(left + (start + encode) * scale, row, (sent - start - encode) * scale, 30, "wait")
            canvas.bar(left + sent * scale, row, wire * scale, 30, "wire", f"bucket {number + 1}" if wire > 9 else "")
            network = sent + wire
            if decode:
                canvas.bar(left + network * scale, row, decode * scale, 30, "decode")
            free[lane] = last = network + decode
        computed = forward + backward
        canvas.bar(left + computed * scale, y, (last - computed) * scale, 30, "wait", "waits" if encode == 0 else "")
        canvas.bar(left + last * scale, y, update * scale, 30, "update", "step")
        end = left + (last + update) * scale
        canvas.text(end + 6, y + 20, "next" if end < 880 else "", 12, colour=SOFT)

    panel(38, "f32 as it is: the network is busy long after backward has ended", 0, 16, 0)
    panel(208, "int8: a quarter of the bytes, so backward hides nearly all of it", 1.6, 4.2, 1.6)
    canvas.arrow(left, 366, 920, 366)
    canvas.text(920, 384, "time", 12, "end", SOFT)
    canvas.text(24, 410, "A bucket that is full (dashed) goes to a free lane, which encodes, sends and decodes it.", 13)
    canvas.text(24, 428, "What is left after backward is exposed: the training thread waits for it.", 13)
    kinds = {"compute": "forward, backward", "encode": "encode", "wire": "wire", "decode": "decode"}
    canvas.legend(24, 454, {**kinds, "wait": "waiting", "update": "optimizer step"})
    return canvas


def two_shot() -> Canvas:
    """A sum over four ranks."""
    canvas = Canvas(940, 400, "two_shot: a sum over four ranks by an all-to-all and an all-gather of codes")
    names = ("1  encode", "2  all-to-all", "3  recode", "4  all-gather", "5  decode")
    places = (96, 282, 470, 620, 790)
    for x, name in zip(places, names, strict=True):
        canvas.text(x, 38, name, 14, bold=True)
    side, gap = 28, 4
    for rank in range(4):
        y = 62 + rank * 62
        canvas.text(24, y + 20, f"rank {rank}", 13, colour=SOFT)
        for chunk in range(4):
            x = places[0] + chunk * (side + gap)
            canvas.box(x, y, side, side, CHUNKS[chunk])
            canvas.label(x, y, side, side, f"{rank}")
            x = places[1] + chunk * (side + gap)
            canvas.box(x, y, side, side, CHUNKS[rank])
            canvas.label(x, y, side, side, f"{chunk}")
            x = places[3] + chunk * (side + gap)
            canvas.box(x, y, side, side, CHUNKS[chunk], edge=INK)
            canvas.label(x, y, side, side, "Σ")
            x = places[4] + chunk * (side + gap)
            canvas.box(x, y, side, side, PALE, edge=CHUNKS[chunk])
            canvas.label(x, y, side, side, "Σ")
        canvas.box(places[2], y, side, side, CHUNKS[rank], edge=INK)
        canvas.label(places[2], y, side, side, "Σ")
        for a, b in ((228, 276), (414, 464), (504, 614), (752, 784)):
            canvas.arrow(a, y + side / 2, b, y + side / 2)
    canvas.line(24, 308, 916, 308)
    canvas.text(
        24,
        334,
        "A colour is a chunk of the tensor; a number is the rank whose values it holds; Σ is the sum over all ranks.",
    )
    canvas.text(
        24,
        354,
        "Rank j owns chunk j. It alone recodes it: decodes four messages, sums them in rank order, encodes the sum.",
    )
    canvas.text(24, 374, "All ranks, the owner too, decode the same bytes of Σ, so all of them end with the same bits.")
    return canvas


def ahead() -> Canvas:
    """When a gradient is encoded: behind fusion, and ahead of it."""
    canvas = Canvas(
        940, 440, "Behind and ahead: a bucket encoded as a whole, and each gradient by itself before fusion"
    )
    sizes = ((130, "a"), (60, "b"), (90, "c"))

    def gradients(y: float) -> None:
        canvas.text(24, y + 18, "backward", 12.5, colour=SOFT)
        x = 120.0
        for width, name in sizes:
            canvas.box(x, y, width, 28, COLOURS["compute"])
            canvas.label(x, y, width, 28, f"gradient {name}" if width > 80 else name)
            x += width + 24

    canvas.text(24, 34, "behind: fuse first, then encode", 15, bold=True)
    gradients(50)
    for x, there in ((185, 185), (304, 280), (403, 355)):
        canvas.arrow(x, 80, there, 104)
    canvas.text(24, 126, "bucket", 12.5, colour=SOFT)
    x = 120.0
    for width, name in sizes:
        canvas.box(x, 108, width, 28, COLOURS["compute"], radius=0, edge="#ffffff")
        canvas.label(x, 108, width, 28, name)
        x += width
    canvas.arrow(404, 122, 470, 122)
    canvas.text(437, 114, "encode", 11.5, "middle", SOFT)
    canvas.box(476, 108, 84, 28, COLOURS["encode"])
    canvas.label(476, 108, 84, 28, "message")
    canvas.arrow(564, 122, 606, 122)
    canvas.bar(610, 108, 70, 28, "wire", "sum")
    for y, words in enumerate(("A communication thread encodes.", "The bucket has one threshold.")):
        canvas.text(696, 112 + 18 * y, words, 12)
    canvas.text(
        120, 164, "One threshold for a, b and c: a sparsifier may send nothing of b, if a has the largest values.", 12.5
    )

    canvas.line(24, 190, 916, 190)
    canvas.text(24, 222, "ahead: encode each gradient, then fuse the messages", 15, bold=True)
    gradients(238)
    x = 120.0
    for width, name in sizes:
        middle = x + width / 2
        canvas.arrow(middle, 268, middle, 292)
        canvas.box(middle - 26, 296, 52, 26, COLOURS["encode"])
        canvas.label(middle - 26, 296, 52, 26, name)
        x += width + 24
    canvas.text(24, 314, "messages", 12.5, colour=SOFT)
    canvas.text(24, 364, "payload", 12.5, colour=SOFT)
    for number, middle in enumerate((185, 304, 403)):
        canvas.arrow(middle, 324, 258 + 52 * number, 344)
        canvas.box(232 + 52 * number, 347, 52, 26, COLOURS["encode"], radius=0, edge="#ffffff")
        canvas.label(232 + 52 * number, 347, 52, 26, sizes[number][1])
    canvas.arrow(394, 360, 470, 360)
    canvas.bar(476, 346, 84, 28, "wire", "gather")
    for y, words in enumerate(
        ("The training thread encodes, hidden by backward.", "Each tensor has its own threshold and residual.")
    ):
        canvas.text(580, 356 + 18 * y, words, 12)
    canvas.text(
        120, 404, "Something of every tensor is sent, and the bits do not depend on what is fused with what.", 12.5
    )
    canvas.text(120, 424, "Sparse codecs go ahead by default; any codec may: ahead=True.", 12.5)
    return canvas


def two_level() -> Canvas:
    """A sum over two nodes of two ranks."""
    canvas = Canvas(940, 424, "two_level: sums inside nodes first, then between them")
    stages = (
        (24, "1  inside nodes: reduce-scatter", "8 bits a value, fast links"),
        (332, "2  between nodes: all-reduce", "4 bits a value, the slow link"),
        (640, "3  inside nodes: all-gather", "what came is passed on, not coded again"),
    )
    for number, (left, name, words) in enumerate(stages):
        canvas.text(left, 36, name, 14, bold=True)
        canvas.text(left, 55, words, 12, colour=SOFT)
        for node in range(2):
            y = 76 + node * 152
            canvas.box(left, y, 276, 92, PALE, radius=8)
            canvas.text(left + 10, y + 18, f"node {'AB'[node]}", 12, colour=SOFT)
            for rank in range(2):
                x = left + 42 + rank * 138
                canvas.text(x + 30, y + 38, f"rank {2 * node + rank}", 11.5, "middle", SOFT)
                for half in range(2):
                    held = number == 0 or number == 2 or half == rank
                    full = number == 2
                    canvas.box(
                        x + half * 31, y + 46, 28, 28, CHUNKS[half] if held else "#ffffff", edge=INK if full else "none"
                    )
                    mark = "ΣΣ" if full else ("Σ" if number == 1 else str(2 * node + rank))
                    canvas.label(x + half * 31, y + 46, 28, 28, mark if held else "")
            if number != 1:
                canvas.arrow(left + 112, y + 54, left + 174, y + 54, 3)
                canvas.arrow(left + 174, y + 66, left + 112, y + 66, 3)
        if number == 1:
            for rank in range(2):
                x = left + 56 + rank * 169
                canvas.arrow(x - 5, 171, x - 5, 225)
                canvas.arrow(x + 5, 225, x + 5, 171)
            canvas.text(left + 138, 202, "each value crosses once", 12, "middle")
    canvas.line(24, 336, 916, 336)
    canvas.text(
        24,
        362,
        "A number: values of that rank. Σ: the node's sum. ΣΣ: the sum over all ranks. A colour: half of the tensor.",
    )
    canvas.text(
        24, 382, "Ranks with the same place in their nodes (0 and 2, 1 and 3) exchange one half each: cross ranks."
    )
    canvas.text(
        24, 402, "Without levels every rank would send over the slow link, and values would cross it more than once."
    )
    return canvas


def choosing() -> Canvas:
    """From a network to a codec."""
    canvas = Canvas(940, 362, "Which codec: by sending time / computing time, then by optimizer")

    def question(x: float, y: float, width: float, words: str) -> None:
        canvas.box(x, y, width, 54, "#e8eef7", radius=27, edge=COLOURS["update"])
        canvas.label(x, y, width, 54, words, 13)

    def answer(x: float, y: float, width: float, codec: str, words: str) -> None:
        canvas.box(x, y, width, 62, "#fdf3e0", radius=8, edge=COLOURS["encode"])
        canvas.text(x + width / 2, y + 26, codec, 14, "middle", bold=True)
        canvas.text(x + width / 2, y + 46, words, 12, "middle", SOFT)

    question(330, 24, 280, "sending f32 gradients takes,\ncompared with computing a step ...")
    canvas.arrow(610, 50, 726, 50)
    canvas.text(668, 42, "not known", 12.5, "middle", SOFT)
    answer(728, 20, 188, "auto", "measures, then chooses")
    answer(24, 142, 200, "raw, or DDP", "the network is no bottleneck")
    answer(244, 142, 180, "int8", "a fourth of the bytes")
    answer(444, 142, 180, "int4", "an eighth of the bytes")
    question(644, 146, 276, "optimizer, and what counts")
    for start, end, words in (
        (330, 124, "below 0.5"),
        (400, 334, "0.5 to 1"),
        (500, 534, "1 to 10"),
        (590, 782, "above 10"),
    ):
        canvas.arrow(start, 78, end, 138)
        side = "end" if end < start else "start"
        canvas.text((start + end) / 2 + (-10 if end < start else 10), 100, words, 12.5, side, SOFT)
    for start, end, words, x in (
        (690, 368, "AdamW", 358),
        (765, 614, "SGD", 604),
        (830, 800, "a good loss soon", 790),
    ):
        canvas.arrow(start, 200, end, 272)
        canvas.text(x, 264, words, 12.5, "end", SOFT)
    answer(262, 276, 212, "OneBitAdam, onebit", "a bit of each value")
    answer(500, 276, 190, "dgc", "1 % of the elements, warm-up")
    answer(716, 276, 204, "Local.overlapped(4)", "sends every few steps")
    return canvas


def status() -> Canvas:
    """A terminal of 80 columns: what `fusionlayer status` has shown of a job in which rank 2 was late."""
    lines = Path(__file__).with_name("status.txt").read_text().splitlines()
    canvas = Canvas(700, 40 + 18 * len(lines), "fusionlayer status: four ranks, of which rank 2 waits for data")
    canvas.box(10, 10, 680, 20 + 18 * len(lines), "#111827", radius=8)
    for number, line in enumerate(lines):
        odd = line.startswith("!") or " late " in line[:16]
        canvas.text(22, 34 + 18 * number, line, 13.4, colour="#fbbf24" if odd else "#e5e7eb", fixed=True)
    return canvas


CONTENT = {
    "cli": "commands, fusionrun",
    "torch": "Horovod's API",
    "frameworks": "DeepSpeed, Megatron",
    "parallel": "tensor, expert, pipeline",
    "sharded": "ZeRO, FSDP2, HSDP",
    "training": "optimizer, hooks, DDP, local steps",
    "backend": "process group",
    "functional": "calls on tensors",
    "context": "rank, size",
    "planning": "profiles, predictions",
    "scheduler": "buckets, lanes, error feedback",
    "coordination": "operations by name",
    "collectives": "two_shot, ring",
    "elastic": "members",
    "publishing": "versions of weights",
    "codecs": "int8, topk, zip",
    "transport": "gloo, NCCL, sockets, MPI",
    "launch": "launchers, meeting",
    "health": "stragglers, failures",
    "native": "calls of csrc",
    "observe": "timeline, metrics",
    "process": "forks, clocks",
    "base": "settings, plans, errors",
}
"""What is in a package, in few words."""

PATH = {"training": "1 hook", "scheduler": "2-4 bucket", "collectives": "5-8 sum", "codecs": "5, 7 encode"} | {
    "transport": "6, 8 send"
}
"""The steps of docs/architecture.md that a gradient takes in a package."""


def architecture() -> Canvas:
    """The packages by layers, as pyproject.toml has them, and the path of a gradient through them."""
    contracts = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (text,) = re.findall(
        r'containers = \["fusionlayer"\]\nexhaustive = true\nlayers = \[\n(.*?)^\]', contracts, re.M | re.S
    )
    layers = [names.split(" | ") for names in re.findall(r'"([^"]+)"', text) if names != "__main__"]
    canvas = Canvas(940, 96 + 37 * (len(layers) + 1), "The packages of fusionlayer, and the path of a gradient")
    canvas.text(
        24, 36, "Imports run downward only. Orange: what a gradient passes, with the steps below.", 14, bold=True
    )
    for number, names in enumerate([*layers, ["csrc"]]):
        y, width = 54 + 37 * number, (892 + 12) / len(names) - 12
        for place, name in enumerate(names):
            x = 24 + place * (width + 12)
            passed = name in PATH or name == "csrc"
            fill, edge = ("#fdf3e0", COLOURS["encode"]) if passed else (PALE, "none")
            canvas.box(x, y, width, 30, fill, radius=6, edge=edge)
            canvas.text(x + 10, y + 20, name, 13, bold=True, fixed=True)
            words = CONTENT.get(name, "arithmetic in C++ and CUDA, sockets")
            canvas.text(x + 20 + 8.2 * len(name), y + 20, words, 12.5, colour=SOFT)
            if name in PATH:
                canvas.text(x + width - 10, y + 20, PATH[name], 12.5, "end", bold=True)
    canvas.text(
        24,
        80 + 37 * (len(layers) + 1),
        "Not shown: 9 unpack, 10 end of backward and 11 step, again in scheduler and training.",
        12.5,
    )
    return canvas


DRAWINGS: dict[str, Callable[[], Canvas]] = {
    function.__name__: function for function in (step, two_shot, ahead, two_level, choosing, status, architecture)
}

if __name__ == "__main__":
    for name, drawing in DRAWINGS.items():
        Path(__file__).with_name(f"{name}.svg").write_text(drawing().svg())
