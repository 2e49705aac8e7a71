"""The methods that the scoreboard compares. A line in a table adds one."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks import peers
from benchmarks.training.methods import PEERS as THEIRS
from benchmarks.variants import LOCAL as LOCAL_WORD
from benchmarks.variants import OVERLAP, SEPARATOR, Variant

__all__ = [
    "LOCAL",
    "METHODS",
    "NODES",
    "QUICK",
    "check",
    "family",
    "losses_of",
    "over_connections",
    "phases",
    "steps_of",
    "version",
    "why_not",
]

LOCAL = (
    *("int4+local=averaging:every=4", "int4+local=overlapped:every=2", "int4+local=overlapped:every=4"),
    *("int4+local=overlapped:every=8", "raw+local=diloco", "int4+local=diloco", "int4+local=streaming"),
    *("local=sparseloco", "local=muloco", "local=desloc"),
)
"""Local steps: presets, most with their defaults. One that this version lacks is left out, with a line that says so."""

ONEBIT = "onebit+freeze_step=75+warmup_codec=int4"
"""1-bit Adam: the momentum in one bit, after the warm-up of Adam's variance."""

MUON = "int4+muon=int2"
"""Muon for hidden matrices, with the learning rate of AdamW: gradients in 4 bits, updates in 2."""

FROZEN = "int8+freeze_step=100+warmup_codec=int4+local=overlapped:every=4"
"""Local steps after the same warm-up: 0/1 Adam."""

NODES = ("int4+local=averaging:every=4+nodes", "int4+local=overlapped:every=4+nodes")
"""Local steps between hosts of several workers, which average gradients by DDP in each step."""

METHODS = {
    "AdamW": (
        *("ddp", "ddp-fp16", "ddp-powersgd", "accelerate-local", "torchft-diloco"),
        *("raw", "bf16", "int8", "int8+overlap", "int4", "int4+overlap", "int3", "int2"),
        *("mxfp4", "thc", "dynamiq", ONEBIT, MUON, "powersgd", "topk", "dgc+warmup_steps=60"),
        *LOCAL,
        FROZEN,
    ),
    "SGD": (
        *("ddp", "ddp-fp16", "ddp-powersgd", "accelerate-local", "torchft-diloco"),
        *("raw", "bf16", "int8", "int8+overlap", "int4", "int4+overlap", "int3", "int2"),
        *("mxfp4", "thc", "dynamiq", "onebit", "powersgd", "topk", "dgc+momentum=0.9+warmup_steps=60"),
        *LOCAL,
    ),
}
"""By the optimizer that they are meant for. ``auto`` is not among them: its losses depend on the network."""

_CONNECTIONS = "connections="

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
    """Return the method whose losses these are, too: overlap and connections of our own compute the same values."""
    words = name.removesuffix(OVERLAP).split(SEPARATOR)
    return SEPARATOR.join(word for word in words if not word.startswith(_CONNECTIONS))


def over_connections(name: str, timed: Iterable[str]) -> list[str]:
    """Return the method over each number of connections of our own that steps were ``timed`` over, if it is ours."""
    words = {word for method in timed for word in method.split(SEPARATOR) if word.startswith(_CONNECTIONS)}
    return [] if name in THEIRS else [f"{name}{SEPARATOR}{word}" for word in sorted(words)]


def phases(name: str) -> tuple[tuple[int, str], ...]:
    """Return (first step, method whose steps are timed) for each part of a training that has steps of its own.

    torch's PowerSGD begins with steps of DDP. A method that freezes Adam's variance begins with those of its warm-up's
    codec. One whose density warms up counts as if it were warm.
    """
    if name == "ddp-powersgd":
        return (0, "ddp"), (peers.POWERSGD_START, name)
    words = [word for word in name.split(SEPARATOR) if not word.startswith("warmup_steps=")]
    variant = None if name in peers.PEERS else Variant.parse(name)
    if variant is None or (variant.freeze_step or 1) == 1:
        return ((0, SEPARATOR.join(words)),)
    frozen = [word for word in words if not word.startswith(("freeze_step=", "warmup_codec="))]
    warm = (variant.warmup_codec or "raw") + (OVERLAP if variant.overlap else "")
    warm += "".join(SEPARATOR + word for word in words if word.startswith(_CONNECTIONS))
    return (0, warm), (variant.freeze_step or 0, SEPARATOR.join([*frozen, "freeze_step=1"]))


def steps_of(name: str) -> str:
    """Return the method that is timed in place of this one's last part, and most often is this one."""
    return phases(name)[-1][1]
