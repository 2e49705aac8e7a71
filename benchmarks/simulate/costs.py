"""What codecs, copies and transfers cost, by size: medians, as a profile has them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusionlayer as fl
from benchmarks.presets import codec_presets
from fusionlayer.codecs import Codec
from fusionlayer.transport import Transport

__all__ = ["measure_call", "measure_codecs", "measure_copy", "measure_link"]

Points = list[list[float]]

EVICTED_BYTES = 32 << 20
"""Written before each call that is timed: in training, too, what a codec works on has been out of the cache."""

SPARSE = "topk"
DENSITY = 0.01
FAN_IN = 2
CALLS = 20
"""Exchanges of one byte for each repeat that is asked for."""
TENSOR = 1 << 16
"""Elements of each gradient in a bucket that is packed."""


def measure_codecs(sizes: Sequence[int], repeats: int) -> dict[str, dict[str, Any]]:
    """Return the costs of every codec, CPU seconds by number of elements.

    Where no codec is registered as ``topk``, torch's operations stand in for it: 1 % of the elements as f32 and index,
    with error feedback.
    """
    found = {name: _codec(fl.codecs.get(name).bare, sizes, repeats) for name in codec_presets()}
    if SPARSE not in found:
        found[SPARSE] = _sparse(sizes, repeats)
    return found


def _codec(codec: Codec, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    curves: dict[str, Points] = {"encode": [], "decode": [], "sum": [], "recode": []}
    for size in sizes:
        x = torch.randn(size, generator=torch.Generator().manual_seed(0))
        part = size // FAN_IN
        residual = torch.zeros(size) if codec.feedback_pays else None
        message = torch.zeros(codec.wire(size).capacity, dtype=torch.uint8)
        messages = torch.zeros(FAN_IN, codec.wire(part).capacity, dtype=torch.uint8)
        again = torch.zeros_like(messages[0])
        codec.encode_chunks(x, messages, part)
        kept = None if residual is None else residual[:part]
        out = torch.empty_like(x)
        calls: dict[str, Callable[[], object]] = {
            "encode": partial(codec.encode, x, message, residual=residual),
            "decode": partial(codec.decode, message, out),
            "sum": partial(codec.decode_sum, messages, out[:part]),
            "recode": partial(codec.recode, messages, again, part, residual=kept),
        }
        for verb, call in calls.items():
            curves[verb].append([size, _cpu_seconds(call, repeats)])
    bits = 8 * codec.wire(1 << 20).capacity / (1 << 20)
    return {"bits": bits, "lossless": codec.lossless, **curves}


def _sparse(sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    curves: dict[str, Points] = {"encode": [], "decode": [], "sum": [], "recode": []}
    for size in sizes:
        x = torch.randn(size, generator=torch.Generator().manual_seed(0))
        residual, out = torch.zeros(size), torch.zeros(size)
        count = max(1, int(DENSITY * size))
        values, chosen = _largest(x, residual, count)
        encode = _cpu_seconds(partial(_largest, x, residual, count), repeats)
        decode = _cpu_seconds(partial(_scatter, values, chosen, out), repeats)
        found = {"encode": encode, "decode": decode, "sum": decode, "recode": encode + decode}
        for verb, seconds in found.items():
            curves[verb].append([size, seconds])
    return {"bits": DENSITY * 64, "lossless": False, "algorithm": "one_shot", **curves}


def _largest(x: Tensor, residual: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return values and places of the largest elements of ``x + residual``; the residual keeps the others."""
    residual += x
    chosen = residual.abs().topk(count, sorted=False).indices
    values = residual[chosen]
    residual[chosen] = 0
    return values, chosen


def _scatter(values: Tensor, chosen: Tensor, out: Tensor) -> None:
    out.zero_()
    out.index_add_(0, chosen, values)


def measure_copy(sizes: Sequence[int], repeats: int) -> Points:
    """Return CPU seconds of packing a bucket, and of unpacking it, by number of elements."""
    points = []
    for size in sizes:
        gradients, flat = torch.randn(size), torch.empty(size)
        copies = partial(_pack_and_unpack, list(gradients.split(TENSOR)), flat, list(flat.split(TENSOR)))
        points.append([size, _cpu_seconds(copies, repeats) / 2])
    return points


def _pack_and_unpack(gradients: list[Tensor], flat: Tensor, slots: list[Tensor]) -> None:
    torch._foreach_copy_(slots, gradients)
    flat.mul_(0.5)
    torch._foreach_copy_(gradients, slots)


def _cpu_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median of all threads' CPU seconds, after a call that does not count."""
    evicted = torch.empty(EVICTED_BYTES, dtype=torch.uint8)
    call()
    samples = []
    for _ in range(repeats):
        evicted.fill_(1)
        start = time.process_time()
        call()
        samples.append(time.process_time() - start)
    return statistics.median(samples)


def measure_call(transport: Transport, repeats: int) -> dict[str, float]:
    """Return seconds, and CPU seconds of the process, of an exchange of one byte. All ranks call it together.

    Of many calls the tenth that takes least: scheduling only adds to so short a call, and would be taken for a cost of
    the network.
    """
    samples = _samples(transport, _gather(transport, 1), CALLS * repeats)
    latency, cpu = (statistics.quantiles(column, n=10)[0] for column in zip(*samples, strict=True))
    return {"latency": latency, "cpu": cpu}


def measure_link(transport: Transport, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return the costs of the link between two ranks, by bytes that each of them sends. Both call it together.

    CPU seconds are those of the process and, of what the kernel did for the network meanwhile, an equal part.
    """
    call = measure_call(transport, repeats)
    curves: dict[str, Points] = {"exchange": [], "all_reduce": []}
    per_byte = 0.0
    for size in sizes:
        before = _softirq_seconds()
        seconds, cpu = _transfer(transport, _gather(transport, size), repeats)
        cpu += (_softirq_seconds() - before) / transport.size / repeats
        per_byte = max(0.0, cpu - call["cpu"]) / size  # the largest size has the last word
        curves["exchange"].append([size, seconds])
        seconds, _ = _transfer(transport, _reduce(transport, size), repeats)
        curves["all_reduce"].append([size, seconds])
    return {"latency": call["latency"], "cpu_per_byte": per_byte, **curves}


def _gather(transport: Transport, nbytes: int) -> Callable[[], object]:
    mine = torch.ones(nbytes, dtype=torch.uint8)
    every = torch.empty(transport.size, nbytes, dtype=torch.uint8)
    return partial(transport.all_gather, mine, every)


def _reduce(transport: Transport, nbytes: int) -> Callable[[], object]:
    return partial(transport.all_reduce, torch.zeros(nbytes // 4))


def _transfer(transport: Transport, call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return medians of a call's seconds and of the process's CPU seconds meanwhile."""
    seconds, cpu = (statistics.median(column) for column in zip(*_samples(transport, call, repeats), strict=True))
    return seconds, cpu


def _samples(transport: Transport, call: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Return seconds and the process's CPU seconds of each call, after one that does not count."""
    call()
    samples = []
    for _ in range(repeats):
        transport.barrier()
        busy, start = time.process_time(), time.perf_counter()
        call()
        samples.append((time.perf_counter() - start, time.process_time() - busy))
    return samples


def _softirq_seconds() -> float:
    """Return the machine's seconds in soft interrupts, 0 where they are not told: what runs the network's queues."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[7]) / 100  # USER_HZ
