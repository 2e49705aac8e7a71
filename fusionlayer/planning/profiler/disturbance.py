"""What buckets cost the thread that computes, beside the time that they take themselves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import codecs
from ...plan import TensorInfo
from ...scheduler import planners
from ...scheduler.engine import Engine
from ...scheduler.lane import CPU_LANES
from ...transport import Transport

__all__ = ["measure_disturbance"]

_TENSORS = 24
_NUMEL = 1 << 10
_ROWS = 192
_PRODUCTS = 16
"""Of square matrices of so many rows, which together take a few milliseconds: what is computed for each gradient."""
_TAIL = 4 * _PRODUCTS
"""While the last bucket travels."""


def measure_disturbance(transport: Transport, repeats: int) -> float:
    """Return the seconds that a thread which computes loses for each small bucket more.

    On shared cores it loses what an exchange takes of them, and anywhere what the hand-over to the other thread, the
    interpreter's lock and the caches cost. So one engine sends some gradients in a bucket each, another all at once.
    At least 0; median of ``repeats``, after two that do not count. All ranks call it together.
    """
    device = torch.device("cpu")
    tensors = [TensorInfo(f"t{i}", _NUMEL, "float32", 4) for i in range(_TENSORS)]
    gradients = torch.ones(_TENSORS, _NUMEL).unbind()
    raw = codecs.get("raw").bare
    engines = [
        Engine(tensors, transport.duplicate(), codec=raw, planner=planners.get(name), device=device, lanes=CPU_LANES)
        for name in ("wfbp", "single")
    ]
    samples = []
    try:
        for _ in range(2 + repeats):
            apart, fused = (_computing(engine, gradients, transport) for engine in engines)
            samples.append((apart - fused) / (_TENSORS - 1))
    finally:
        for engine in engines:
            engine.close()
    return max(0.0, statistics.median(samples[2:]))


def _computing(engine: Engine, gradients: Sequence[Tensor], transport: Transport) -> float:
    """Return the seconds of a step's computing, in which the gradients become ready one after the other."""
    left, right = torch.ones(2, _ROWS, _ROWS)
    product = torch.empty_like(left)
    transport.barrier()
    start = time.perf_counter()
    for i, gradient in enumerate(gradients):
        engine.submit(f"t{i}", gradient)
        for _ in range(_PRODUCTS if i < _TENSORS - 1 else _TAIL):
            torch.mm(left, right, out=product)
    seconds = time.perf_counter() - start
    engine.synchronize()
    return seconds
