"""The methods that the scoreboard compares. A line in a table adds one."""

from __future__ import annotations

from benchmarks import peers
from benchmarks.training.methods import PEERS as THEIRS
from benchmarks.variants import LOCAL as LOCAL_WORD
from benchmarks.variants import OVERLAP, SEPARATOR, Variant

__all__ = ["LOCAL", "METHODS", "QUICK", "check", "family", "losses_of", "steps_of", "version", "why_not"]

LOCAL = (
    *("raw+local=averaging:every=4", "int4+local=averaging:every=4", "int4+local=averaging:every=8"),
    *("raw+local=diloco", "int4+local=diloco", "local=streaming", "local=sparseloco", "local=muloco", "local=desloc"),
)
"""Local steps, presets with their defaults. One that this version lacks is left out, with a line that says so."""

METHODS = {
    "AdamW": (
        *("ddp", "ddp-fp16", "ddp-powersgd", "accelerate-local", "torchft-diloco"),
        *("raw", "bf16", "int8", "int8+overlap", "int4", "int4+overlap", "int3", "int2"),
        *("mxfp4", "thc", "dynamiq", "onebit", "powersgd", "topk", "dgc+warmup_steps=60"),
        *LOCAL,
    ),
    "SGD": (
        *("ddp", "ddp-fp16", "ddp-powersgd", "accelerate-local", "torchft-diloco"),
        *("raw", "bf16", "int8", "int8+overlap", "int4", "int4+overlap", "int3", "int2"),
        *("mxfp4", "thc", "dynamiq", "onebit", "powersgd", "topk", "dgc+momentum=0.9+warmup_steps=60"),
        *LOCAL,
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


def why_not(name: str) -> str | None:
    """Return why a method cannot run here; None if it can."""
    if name in peers.PEERS:
        return peers.why_missing(name)
    try:
        Variant.parse(name)
    except ValueError as error:
        return str(error)
    return None


def family(name: str) -> str:
    """Return "DDP", "peer", "ours", or "local" for those of ours that do not exchange in each step."""
    if name == "ddp":
        return "DDP"
    if name in THEIRS:
        return "peer"
    return "local" if LOCAL_WORD in name else "ours"


def version(name: str) -> str:
    """Return whose method it is, with the version; ours has that of the commit, so it is left blank."""
    return peers.version_of(name) if name in peers.PEERS else ""


def losses_of(name: str) -> str:
    """Return the method whose losses these are, too: overlap computes the same values."""
    return name.removesuffix(OVERLAP)


def steps_of(name: str) -> str:
    """Return the method whose steps are timed: one whose density warms up is timed when it is warm."""
    return SEPARATOR.join(word for word in name.split(SEPARATOR) if not word.startswith("warmup_steps="))
