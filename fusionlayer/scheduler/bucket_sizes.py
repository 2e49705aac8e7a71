"""How many bytes of gradients a bucket has, by number of ranks, codec, device and rate of the network; and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base.plan import TensorInfo
from ..codecs import Codec
from ..native.wire import DTYPE_CODES
from .planners import StepCosts

_PEER_BYTES = 16 << 10
"""Least bytes of a message to one rank. Below that, headers, padding and the call may cost more than the bytes."""
_MOST = 64 << 20
_ON_CPU, _ON_DEVICE = (1 << 20, 8 << 20), (4 << 20, 32 << 20)
"""Bytes of a bucket at both ends of backward, and in between. On a device each bucket costs the host many launches."""
_STARTUPS = 4
"""A transfer should take at least this many times as long as one of next to nothing."""
_WHOLE = ("dense", "one_shot", "gather", "gather_v")
"""Collectives whose messages are not cut into a piece for each rank, or cut by the transport's own library."""
_MANY = 1 << 20


@dataclass(frozen=True)
class BucketSizes:
    """Bytes of gradients in a bucket.

    Attributes:
        edge: largest number of bytes in the first and in the last bucket.
        threshold: largest number in any bucket.
        reason: why, in words.
    """

    edge: int
    threshold: int
    reason: str


def bucket_sizes(
    codec: Codec, collective: str, ranks: int, tensors: Sequence[TensorInfo], on_device: bool, costs: StepCosts | None
) -> BucketSizes:
    """Return the sizes of buckets of ``tensors``, which are of one job's step."""
    (edge, threshold), where = (_ON_DEVICE, "a GPU") if on_device else (_ON_CPU, "the CPU")
    reasons = [f"up to {threshold >> 20} MiB on {where}"]
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    enough = _MOST
    if costs is not None:
        enough = edge
        while enough < _MOST and costs.communicate(enough / largest.itemsize) < _STARTUPS * costs.startup:
            enough *= 2
        if enough > threshold:
            threshold = min(enough, _MOST)
            reasons.append(f"{threshold >> 20} MiB, or startups take a quarter of the transfers")
    if ranks > 2 and collective not in _WHOLE:
        dtype = getattr(torch, largest.dtype, None)
        known = dtype if isinstance(dtype, torch.dtype) and dtype in DTYPE_CODES else torch.float32
        sent = codec.bare.wire(_MANY, known).capacity / _MANY  # bytes of an element
        least = int(ranks * _PEER_BYTES / sent * largest.itemsize)
        least = min(enough, least + min(least, largest.nbytes))  # a bucket ends before a tensor that is too large
        if least > edge:
            edge = min(least, _MOST)
            reasons.append(f"from {edge >> 20} MiB on, or a message to each of {ranks} ranks has few bytes")
    return BucketSizes(edge, max(edge, threshold), "; ".join(reasons))
