"""The methods that the scoreboard compares. A line in a table adds one."""

from __future__ import annotations

from benchmarks import peers
from benchmarks.variants import OVERLAP, SEPARATOR, Variant

__all__ = ["METHODS", "QUICK", "about", "check", "family", "losses_of", "steps_of", "version"]

METHODS = {
    "AdamW": (
        *("ddp", "ddp-fp16", "ddp-powersgd", "accelerate-local", "torchft-diloco"),
        *("raw", "bf16", "int8", "int8+overlap", "int4", "int4+overlap"),
        *("mxfp4", "thc", "dynamiq", "onebit", "powersgd", "topk", "dgc+warmup_steps=60"),
    ),
    "SGD": (
        *("ddp", "ddp-fp16", "ddp-powersgd", "accelerate-local", "torchft-diloco"),
        *("raw", "bf16", "int8", "int8+overlap", "int4", "int4+overlap"),
        *("mxfp4", "thc", "dynamiq", "onebit", "powersgd", "topk", "dgc+momentum=0.9+warmup_steps=60"),
    ),
}
"""By the optimizer that they are meant for. ``auto`` is not among them: its losses depend on the network."""

QUICK = ("ddp", "ddp-powersgd", "int4")
"""What ``--quick`` tries."""


def check(name: str) -> str:
    """Return a method's name; ``ValueError`` if there is none of that name."""
    if name in peers.LEFT_OUT:
        raise ValueError(f"{name!r}: {peers.LEFT_OUT[name]}")
    if name not in peers.PEERS:
        Variant.parse(name)
    return name


def about(name: str) -> str:
    """Return what a method is, in words."""
    return peers.PEERS[name].about if name in peers.PEERS else Variant.parse(name).about


def family(name: str) -> str:
    """Return "DDP", "peer", "ours", or "local" for those of ours that do not exchange in each step."""
    if name == "ddp":
        return "DDP"
    if name in peers.PEERS:
        return "peer"
    return "local" if Variant.parse(name).period > 1 else "ours"


def version(name: str) -> str:
    """Return whose method it is, with the version; ours has that of the commit, so it is left blank."""
    return peers.version_of(name) if name in peers.PEERS else ""


def losses_of(name: str) -> str:
    """Return the method whose losses these are, too: overlap computes the same values."""
    return name.removesuffix(OVERLAP)


def steps_of(name: str) -> str:
    """Return the method whose steps are timed: one whose density warms up is timed when it is warm."""
    return SEPARATOR.join(word for word in name.split(SEPARATOR) if not word.startswith("warmup_steps="))
