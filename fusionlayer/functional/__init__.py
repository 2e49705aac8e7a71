"""Compressed collectives on single tensors, and broadcasts, which a program calls directly."""

from .arguments import AUTO, Average, Group, ReduceOp, Sum, check_op, make_codec, refuse_unknown
from .broadcasts import (
    broadcast_bytes,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    pickled,
)
from .calls import all_gather, all_reduce, all_to_all, reduce_scatter, switcher

__all__ = [
    "AUTO",
    "Average",
    "Group",
    "ReduceOp",
    "Sum",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast_bytes",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_op",
    "make_codec",
    "pickled",
    "reduce_scatter",
    "refuse_unknown",
    "switcher",
]
