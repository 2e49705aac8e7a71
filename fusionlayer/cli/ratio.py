"""``fusionlayer explain`` without a plan: sending time over computing time, and the line of code that it suggests."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from .. import codecs
from ..collectives import choice
from ..planning.cost_model import parse_rate
from ..planning.profile import Profile
from .tables import print_text
from .units import BYTES, SECONDS, in_words

_MEASURED = 1e9  # bits per second of the fastest link with results
_LINE = 'optimizer = fl.DistributedOptimizer(optimizer, model, codec="{}")'


@dataclass(frozen=True)
class Recommendation:
    """A row of the table in docs/choosing.md.

    Attributes:
        below: sending time / computing time that the row ends at.
        name: the range in words.
        codec: name of the codec.
        advice: sentences on when to use it.
        before: lines of code before the one that names the codec.
    """

    below: float
    name: str
    codec: str
    advice: str
    before: tuple[str, ...] = ()


ROWS = (
    Recommendation(0.5, "below 0.5", "raw", "The network is no bottleneck. Keep DDP, or send gradients unchanged."),
    Recommendation(1, "0.5 to 1", "int8", "A fourth of the bytes is sent while backward computes."),
    Recommendation(10, "1 to 10", "int4", "An eighth of the bytes. The row above 10 sends fewer."),
    Recommendation(
        math.inf,
        "above 10",
        "onebit",
        "For AdamW. Set freeze_step to a little more than the learning rate's warm-up has steps. "
        "SGD takes dgc, other optimizers int4. Local steps send less often.",
        ('optimizer = fl.OneBitAdam(model.parameters(), lr=3e-4, freeze_step=75, warmup_codec="int4")',),
    ),
)


def run(options: argparse.Namespace) -> None:
    """Print the ratio of a model on a cluster, the bytes that a node sends, and the row of ``ROWS``."""
    profile = None if options.profile is None else Profile.from_yaml(options.profile)
    numel, nbytes, step = options.parameters, 4 * (options.parameters or 0), options.step
    if profile is not None:
        model = profile.model
        numel = numel or sum(tensor.numel for tensor in model.tensors)
        nbytes = nbytes or sum(tensor.numel * tensor.itemsize for tensor in model.tensors)
        step = step or model.forward + model.backward + model.optimizer
    rate = options.rate or (profile.fastest_rate if profile else "")
    per_host = options.per_host or (profile.machine.per_host if profile else 1)
    hosts = (per_host,) * options.nodes
    nodes = hosts if options.nodes > 1 else (1,) * per_host  # in a single node each rank has its own link
    sent = (choice.sent_by_node("dense", nodes) or 0.0) * nbytes
    ratio = _seconds(sent, rate) / step
    row = next(row for row in ROWS if ratio < row.below)
    codec = codecs.get(row.codec)
    packed = (choice.sent_by_node(choice.choose(codec, nodes), nodes) or 0.0) * _share(codec) * numel
    sender = "node" if options.nodes > 1 else "rank"
    print_text(
        f"{choice.in_words(hosts)} at {rate}: uncompressed, a {sender} sends {in_words(sent, BYTES)} a step in "
        f"{in_words(_seconds(sent, rate), SECONDS)}. Computing takes {in_words(step, SECONDS)}."
    )
    print_text(f"Sending / computing: {ratio:.3g}")
    print_text(f"Row '{row.name}' of docs/choosing.md: {row.codec}. {row.advice}")
    if row.codec != "raw":
        took = in_words(_seconds(packed, rate), SECONDS)
        print_text(f"With {row.codec} a {sender} sends {in_words(packed, BYTES)} a step in {took}.")
    if row.codec != "raw" and parse_rate(rate) > _MEASURED:
        print_text(
            f"Links above 1gbit were not measured: compare 20 steps with {row.codec} with 20 of raw before you use it."
        )
    print("\n".join(("", "import fusionlayer as fl", "", "fl.init()", *row.before, _LINE.format(row.codec))))


def _seconds(nbytes: float, rate: str) -> float:
    return 8 * nbytes / parse_rate(rate)


def _share(codec: codecs.Codec) -> float:
    """Return the bytes of an element of f32, as a message has them."""
    return codec.bare.wire(1 << 20).capacity / (1 << 20)
