"""Measures codecs and copies by size, for a profile; medians count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...codecs import Codec, TensorState, TwoLevelCodec
from .averages import Points

__all__ = ["cpu_seconds", "measure_codecs", "measure_copy"]

_EVICTED_BYTES = 32 << 20
"""Bytes written before each timed call: they evict the call's data from the cache, as training does."""
_FAN_IN = 2
_TENSOR = 1 << 16
"""Elements of each gradient in a bucket that is packed."""


def measure_codecs(codecs: Mapping[str, Codec], sizes: Sequence[int], repeats: int) -> dict[str, dict[str, Any]]:
    """Return the costs of codecs by name: CPU seconds by number of elements."""
    return {name: _measure_codec(codec.bare, sizes, repeats) for name, codec in codecs.items()}


def _measure_codec(codec: Codec, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    curves: dict[str, Points] = {"encode": [], "decode": [], "sum": [], "recode": []}
    for size in sizes:
        x = torch.randn(size, generator=torch.Generator().manual_seed(0))
        part = size // _FAN_IN
        residual = torch.zeros(size) if codec.feedback_pays else None
        message = torch.zeros(codec.wire(size).capacity, dtype=torch.uint8)
        messages = torch.zeros(_FAN_IN, codec.wire(part).capacity, dtype=torch.uint8)
        again = torch.zeros_like(messages[0])
        codec.encode_chunks(x, messages, part)
        kept = None if residual is None else residual[:part]
        out = torch.empty_like(x)
        calls: dict[str, Callable[[], object]] = {
            "encode": partial(codec.encode_tensor, x, message, TensorState(residual)),
            "decode": partial(codec.decode, message, out),
            "sum": partial(codec.decode_sum, messages, out[:part]),
            "recode": partial(codec.recode, messages, again, part, residual=kept),
        }
        for verb, call in calls.items():
            curves[verb].append([size, cpu_seconds(call, repeats)])
    bits = 8 * (codec.used_bytes(message, size) / size if codec.zips else codec.wire(1 << 20).capacity / (1 << 20))
    algorithm = {"algorithm": codec.collective} if codec.collective else {}
    within = {}
    if isinstance(codec, TwoLevelCodec):
        within["within_bits"] = 8 * codec.within.wire(1 << 20).capacity / (1 << 20)
    return {"bits": bits, "lossless": codec.lossless, "ahead": codec.ahead, **within, **algorithm, **curves}


def measure_copy(sizes: Sequence[int], repeats: int) -> Points:
    """Return CPU seconds of packing a bucket, and of unpacking it, by number of elements."""
    points = []
    for size in sizes:
        gradients, flat = torch.ones(size), torch.empty(size)
        copies = partial(_pack_and_unpack, list(gradients.split(_TENSOR)), flat, list(flat.split(_TENSOR)))
        points.append([size, cpu_seconds(copies, repeats) / 2])
    return points


def _pack_and_unpack(gradients: list[torch.Tensor], flat: torch.Tensor, slots: list[torch.Tensor]) -> None:
    torch._foreach_copy_(slots, gradients)
    flat.mul_(0.5)
    torch._foreach_copy_(gradients, slots)


def cpu_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median CPU seconds of a call, of all threads together; a first call does not count."""
    evicted = torch.empty(_EVICTED_BYTES, dtype=torch.uint8)
    call()
    samples = []
    for _ in range(repeats):
        evicted.fill_(1)
        start = time.process_time()
        call()
        samples.append(time.process_time() - start)
    return statistics.median(samples)
