"""Measures the disturbance: the seconds that each bucket costs the thread that computes."""

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
"""Products of square matrices of ``_ROWS`` rows for each gradient; together they take a few milliseconds."""
_TAIL = 4 * _PRODUCTS
"""Products for the last gradient, while the last bucket travels."""


def measure_disturbance(transport: Transport, repeats: int) -> float:
    """Return the seconds that the computing thread loses for each further small bucket, at least 0.

    It loses time to the hand-over between threads, the interpreter's lock and the caches; on shared cores also to the
    exchange itself. One engine sends each gradient in a bucket of its own, another sends all in one bucket; the
    difference counts. The result is the median of ``repeats``, after two that do not count. All ranks call it together.
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
    """Return the seconds of a step's computing; the gradients become ready one after the other during it."""
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
