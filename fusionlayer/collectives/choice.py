"""Chooses the collective for a codec and the nodes of a job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..base.errors import require
from ..codecs import Codec
from ..native.wire import DTYPE_CODES
from ..transport import Transport
from ._base import check_pair, get, get_gather, instead_of, is_gather

_logger = logging.getLogger("fusionlayer")
_logged: set[str] = set()

MOST_PEERS = 32
"""Nodes of one rank that exchange messages each with each; more form a grid."""


class EncodingTraits(Protocol):
    """The facts that ``choose`` needs of a codec; the measured costs of a codec have them too."""

    @property
    def lossless(self) -> bool:
        """Whether messages keep every bit."""

    @property
    def ahead(self) -> bool:
        """Whether tensors are best encoded one by one, ahead of fusion."""

    @property
    def collective(self) -> str | None:
        """The collective that was made for the codec, if there is one."""


def choose(
    codec: EncodingTraits, nodes: Sequence[int], algorithm: str | None = None, *, ahead: bool | None = False
) -> str:
    """Return the name of the collective for tensors that ``codec`` encodes.

    Args:
        codec: the codec of the tensors.
        nodes: number of ranks of each node, ``Transport.node_sizes``.
        algorithm: the caller's choice; None takes the collective that the codec was made for if it suits this many
            ranks, else the usual one.
        ahead: True for a collective of messages that were encoded ahead of fusion, False for one of flat tensors. None
            takes the kind of ``algorithm``, or without an ``algorithm`` the codec's preferred kind.

    Raises:
        ConfigError: there is no such collective, it is not of the kind that ``ahead`` asks for, or it cannot use the
            codec. Costs of a codec, instead of the codec, are used directly.
    """
    require(algorithm, (str, type(None)), "algorithm", "the name of a collective, or None")
    if ahead is None:
        ahead = codec.ahead and not codec.collective if algorithm is None else is_gather(algorithm)
    if ahead:
        name = algorithm or "gather"
        get_gather(name)
        return name
    size = sum(nodes)
    name = algorithm or instead_of(codec.collective, size) or usual(codec, nodes)
    get(name)
    if isinstance(codec, Codec):
        check_pair(name, codec, size)
    return name


def usual(codec: EncodingTraits, nodes: Sequence[int]) -> str:
    """Return the name of the collective for flat tensors if the codec has no collective of its own.

    Nodes of several ranks take ``two_level``, whose nodes send each value to other nodes once. Many nodes of one rank
    use ``grid``, in which a rank sends messages to few others. A codec that selects elements would select others in
    each partial sum, so it stays with ``two_shot``.
    """
    if codec.lossless:
        return "dense"
    if sum(nodes) <= 2:
        return "one_shot"
    if len(nodes) == 1 or codec.ahead:
        return "two_shot"
    if len(nodes) < sum(nodes):
        return "two_level"
    return "grid" if len(nodes) > MOST_PEERS else "two_shot"


def sent_by_node(algorithm: str, nodes: Sequence[int]) -> float | None:
    """Return how many messages of the whole tensor a node sends to other nodes in one sum; None: not known.

    It is the number of the node that sends most.
    """
    size, count = sum(nodes), len(nodes)
    if algorithm in ("dense", "ring"):  # ranks are placed node by node, so one rank of a node sends to the next node
        return 2 * (size - 1) / size if count > 1 else 0.0
    formulas: dict[str, Callable[[int], float]] = {
        "one_shot": lambda ranks: ranks * (size - ranks),
        "gather": lambda ranks: ranks * (size - ranks),
        "two_shot": lambda ranks: 2 * ranks * (size - ranks) / size,
        "grid": lambda ranks: 2 * ranks * (size - ranks) / size,
        # A node sends its sum of each chunk to the owner's node, and the sum of each chunk of its own to all others.
        "two_level": lambda ranks: (size - ranks + ranks * (count - 1)) / size,
    }
    formula = formulas.get(algorithm)
    return None if formula is None else max(map(formula, nodes))


def in_words(nodes: Sequence[int]) -> str:
    """Return the nodes in words: "8 nodes of 8 ranks", "nodes of 8, 7 and 8 ranks"."""
    if len(set(nodes)) > 1:
        return f"nodes of {', '.join(map(str, nodes[:-1]))} and {nodes[-1]} ranks"
    return f"{len(nodes)} node{'s' * (len(nodes) > 1)} of {nodes[0]} rank{'s' * (nodes[0] > 1)}"


def describe(codec: Codec, algorithm: str, numel: int, dtype: torch.dtype, nodes: Sequence[int], half: bool) -> str:
    """Return how ``numel`` elements are sent, and the bytes that a node sends to others; ``half``: of half a sum."""
    times = sent_by_node(algorithm, nodes)
    words = f"{codec}, by {algorithm} over {in_words(nodes)}"
    if times is None:
        return words
    nbytes = codec.wire(numel, dtype).capacity if dtype in DTYPE_CODES else numel * dtype.itemsize
    return f"{words}; for {numel} elements a node sends {times / (1 + half) * nbytes / 1e6:.4g} MB to other nodes"


def log_once(what: str, codec: Codec, algorithm: str, x: Tensor, transport: Transport, *, half: bool = False) -> None:
    """Log on rank 0 how ``x`` is sent, at the first such call of the process."""
    if transport.rank or transport.size == 1 or not _logger.isEnabledFor(logging.INFO):
        return
    nodes = transport.node_sizes
    key = f"{what} {codec} {algorithm} {nodes}"
    if key not in _logged:
        _logged.add(key)
        _logger.info("%s: %s", what, describe(codec, algorithm, x.numel(), x.dtype, nodes, half))
