"""The methods that are compared: their names, what each is, and which of them this installation has."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import peers
from benchmarks.variants import OVERLAP, SEPARATOR, Variant, codec_presets
from fusionlayer.base.registry import nearest

__all__ = ["ALWAYS", "BASELINE", "COMPUTE", "NULL", "PEERS", "about", "all_methods", "missing", "select"]

COMPUTE = "alone"
BASELINE = "ddp"
NULL = "ddp-again"

ALWAYS = (COMPUTE, BASELINE, NULL)
"""Without them nothing else can be read: the limit, what is compared with, and how much equal things differ."""

PEERS = {
    "alone": "no communication: the time that computing takes",
    "ddp": peers.PEERS["ddp"].about,
    "ddp-again": "the same once more: its ratio is 1 but for noise",
    "ddp-tuned": "DDP with the bucket size, of a few, that was fastest in a trial before",
    **{name: peer.about for name, peer in peers.PEERS.items() if name != "ddp"},
    "horovod": "horovod.torch.DistributedOptimizer",
    "horovod-fp16": "the same with Compression.fp16",
}


def about(method: str) -> str:
    """Return what a method is, in words; ``ValueError`` if there is none of that name."""
    if _is_sharded(method):
        from .sharded_replica import Sharding

        return Sharding.parse(method).about
    return PEERS.get(method) or Variant.parse(method).about


def _is_sharded(method: str) -> bool:
    return method.startswith(("fsdp", "hsdp", "zero:"))


def all_methods() -> dict[str, str]:
    """Return the names of methods and what each is; of fusionlayer, one for each codec and one more with overlap.

    More can be named: ``Variant`` has the words.
    """
    codecs = codec_presets()
    return {name: about(name) for name in [*PEERS, *codecs, *(name + OVERLAP for name in codecs)]}


def missing() -> dict[str, str]:
    """Return the methods that cannot run here, and why."""
    absent = {name: reason for name in peers.PEERS if (reason := peers.why_missing(name))}
    return {**absent, **_missing_horovod()}


def _missing_horovod() -> dict[str, str]:
    if importlib.util.find_spec("horovod") is None:
        reason = "Horovod is not installed"
    else:
        probe = [sys.executable, "-c", "import horovod.torch, horovod.runner.http.http_server"]
        done = subprocess.run(probe, capture_output=True, text=True)
        if done.returncode == 0:
            return {}
        reason = f"import horovod.torch fails: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    return {name: reason for name in PEERS if name.startswith("horovod")}


def select(words: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """Return the methods to run, and those asked for that cannot run, with reasons.

    They are in the order of ``all_methods``, and behind them in that of ``words``.

    Args:
        words: names; "all", "peers", "codecs" and "overlap" stand for all of a kind. None is "all".

    Raises:
        ValueError: a name that nothing has.
    """
    known = all_methods()
    kinds = {
        "all": list(known),
        "peers": list(PEERS),
        "codecs": codec_presets(),
        "overlap": [name for name in known if name.endswith(OVERLAP)],
    }
    wanted = dict.fromkeys(ALWAYS)
    for word in words if words is not None else ["all"]:
        if word not in known and word not in kinds:
            _check(word, [*kinds, *known])
        wanted |= dict.fromkeys(kinds.get(word, [word]))
    absent = {name: reason for name, reason in missing().items() if name in wanted}
    order = [name for name in known if name in wanted] + [name for name in wanted if name not in known]
    return [name for name in order if name not in absent], absent


def _check(word: str, known: list[str]) -> None:
    try:
        about(word)
    except ValueError as error:
        if SEPARATOR in word or _is_sharded(word):
            raise
        raise ValueError(f"unknown method {word!r}; {nearest(word, known)}") from error
