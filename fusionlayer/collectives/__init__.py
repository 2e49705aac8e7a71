"""Collectives: how messages are sent. ``names`` lists them and ``get`` returns one; all fronts call ``reduce_flat``."""

from ._base import (
    AllReduce,
    Gather,
    MessageSpan,
    check_pair,
    collective,
    gather_collective,
    gathers,
    get,
    get_gather,
    is_gather,
    registry,
)
from ._unequal import TAKES_SHARES, by_shares
from .choice import choose, usual
from .reduction import UNSCALED, Scaling, reduce_flat, reduce_scatter_flat, scale_

__all__ = [
    "TAKES_SHARES",
    "UNSCALED",
    "AllReduce",
    "Gather",
    "MessageSpan",
    "Scaling",
    "by_shares",
    "check_pair",
    "choose",
    "collective",
    "gather_collective",
    "gather_names",
    "get",
    "get_gather",
    "is_gather",
    "knows",
    "names",
    "reduce_flat",
    "reduce_scatter_flat",
    "scale_",
    "usual",
]

knows = registry.knows
names = registry.names
gather_names = gathers.names
