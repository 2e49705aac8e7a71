"""Measures codecs and copies by size, for a profile; medians count."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...codecs import Codec, TensorState, TwoLevelCodec
from ...process.clock import HOST, Clock
from .averages import Points

_EVICTED_BYTES, _DEVICE_EVICTED_BYTES = 32 << 20, 128 << 20
"""Bytes written before timed calls: they evict their data from the cache, as training does.

On a device that takes longer than to launch the calls, so their kernels are queued before the first of them begins.
"""
_FAN_IN = 2
_BITS_FROM = 1 << 20
_TENSOR = 1 << 16
"""Elements of each gradient in a bucket that is packed."""


def measure_codecs(
    codecs: Mapping[str, Codec],
    sizes: Sequence[int],
    repeats: int,
    clock: Clock = HOST,
    dtype: torch.dtype = torch.float32,
) -> dict[str, dict[str, Any]]:
    """Return the costs of codecs by name: CPU seconds, or seconds of the clock's device, by number of elements."""
    return {name: _measure_codec(codec.bare, sizes, repeats, clock, dtype) for name, codec in codecs.items()}


def _measure_codec(
    codec: Codec, sizes: Sequence[int], repeats: int, clock: Clock, dtype: torch.dtype
) -> dict[str, Any]:
    curves: dict[str, Points] = {"encode": [], "decode": [], "sum": [], "recode": []}
    for size in sizes:
        x = torch.randn(size, generator=torch.Generator().manual_seed(0), device="cpu").to(clock.device, dtype)
        part = size // _FAN_IN
        residual = torch.zeros_like(x, dtype=torch.float32) if codec.feedback_pays else None
        message = torch.zeros(codec.wire(size, dtype).capacity, dtype=torch.uint8, device=x.device)
        messages = torch.zeros(_FAN_IN, codec.wire(part, dtype).capacity, dtype=torch.uint8, device=x.device)
        again = torch.zeros_like(messages[0])
        codec.encode_chunks(x, messages, part)
        kept = None if residual is None else residual[:part]
        out = torch.empty_like(x)
        calls: dict[str, Callable[[], object]] = {
            "encode": partial(codec.encode_tensor, x, message, TensorState(residual)),
            "decode": partial(codec.decode, message, out),
            "sum": partial(codec.decode_sum, messages, out[:part]),
            "recode": partial(codec.recode, messages, again, part, dtype=dtype, residual=kept),
        }
        for verb, call in calls.items():
            curves[verb].append([size, busy_seconds(call, repeats, clock)])
    bits = 8 * (codec.used_bytes(message, size, dtype) / size if codec.zips else _bytes_per_element(codec, dtype))
    algorithm = {"algorithm": codec.collective} if codec.collective else {}
    within = {}
    if isinstance(codec, TwoLevelCodec):
        within["within_bits"] = 8 * _bytes_per_element(codec.within, dtype)
    return {"bits": bits, "lossless": codec.lossless, "ahead": codec.ahead, **within, **algorithm, **curves}


def _bytes_per_element(codec: Codec, dtype: torch.dtype) -> float:
    return codec.wire(_BITS_FROM, dtype).capacity / _BITS_FROM


def measure_copy(sizes: Sequence[int], repeats: int, clock: Clock = HOST) -> Points:
    """Return seconds of packing a bucket, and of unpacking it, by number of elements; as for ``measure_codecs``."""
    points = []
    for size in sizes:
        gradients, flat = torch.ones(size, device=clock.device), torch.empty(size, device=clock.device)
        copies = partial(_pack_and_unpack, list(gradients.split(_TENSOR)), flat, list(flat.split(_TENSOR)))
        points.append([size, busy_seconds(copies, repeats, clock) / 2])
    return points


def _pack_and_unpack(gradients: list[torch.Tensor], flat: torch.Tensor, slots: list[torch.Tensor]) -> None:
    torch._foreach_copy_(slots, gradients)
    flat.mul_(0.5)
    torch._foreach_copy_(gradients, slots)


def measure_staging(sizes: Sequence[int], repeats: int, clock: Clock) -> Points:
    """Return seconds of copying this many bytes between the clock's device and the host's memory, one way."""
    points = []
    for size in sizes:
        near = torch.ones(size, dtype=torch.uint8, device=clock.device)
        far = torch.empty(size, dtype=torch.uint8, pin_memory=near.is_cuda, device="cpu")
        copies = partial(_there_and_back, near, far)
        points.append([size, busy_seconds(copies, repeats, clock) / 2])
    return points


def _there_and_back(near: torch.Tensor, far: torch.Tensor) -> None:
    far.copy_(near, non_blocking=True)
    near.copy_(far, non_blocking=True)


def busy_seconds(call: Callable[[], object], repeats: int, clock: Clock = HOST) -> float:
    """Return the median seconds for which a call occupies cores or the clock's device; a first call does not count.

    On the CPU these are CPU seconds, of all threads together. On a device they are the time between two events around
    consecutive replays of the call, so that the host's launches are not counted.
    """
    nbytes = _DEVICE_EVICTED_BYTES if clock.lags else _EVICTED_BYTES
    evicted = torch.empty(nbytes, dtype=torch.uint8, device=clock.device)
    call()
    replay = clock.replayed(call)
    samples = []
    for _ in range(repeats):
        for _ in range(clock.replays):
            evicted.fill_(1)
        start = clock.worked()
        for _ in range(clock.replays):
            replay()
        samples.append(clock.waited(start, clock.worked()) / clock.replays)
    return statistics.median(samples)
