"""Measures the disturbance: the seconds that each bucket costs the thread that computes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import codecs
from ...base.plan import TensorInfo
from ...process.clock import HOST, Clock
from ...scheduler import planners
from ...scheduler.engine import Engine
from ...scheduler.lanes import LANES
from ...transport import Transport

_TENSORS = 24
_NUMEL = 1 << 10
_ROWS, _DEVICE_ROWS = 192, 1024
_PRODUCTS = 16
"""Products of square matrices of this many rows for each gradient; together they take about a millisecond or more."""
_TAIL = 4 * _PRODUCTS
"""Products for the last gradient, while the last bucket is sent."""


def measure_disturbance(transport: Transport, repeats: int, clock: Clock = HOST) -> float:
    """Return the seconds that computing loses for each further small bucket, at least 0.

    It loses time to the hand-over between threads, the interpreter's lock and the caches; on shared cores and on a
    device also to the exchange itself. One engine sends each gradient in a bucket of its own, another sends all in one
    bucket; the difference counts. The result is the median of ``repeats``, after two that do not count. All ranks call
    it together.
    """
    device = clock.device
    tensors = [TensorInfo(f"t{i}", _NUMEL, "float32", 4) for i in range(_TENSORS)]
    gradients = torch.ones(_TENSORS, _NUMEL, device=device).unbind()
    raw = codecs.get("raw").bare
    engines = [
        Engine(tensors, transport.duplicate(), codec=raw, planner=planners.get(name), device=device, lanes=LANES)
        for name in ("wfbp", "single")
    ]
    samples = []
    try:
        for _ in range(2 + repeats):
            apart, fused = (_computing(engine, gradients, transport, clock) for engine in engines)
            samples.append((apart - fused) / (_TENSORS - 1))
    finally:
        for engine in engines:
            engine.close()
    return max(0.0, statistics.median(samples[2:]))


def _computing(engine: Engine, gradients: Sequence[Tensor], transport: Transport, clock: Clock) -> float:
    """Return the seconds of a step's computing; the gradients become ready one after the other during it."""
    rows = _DEVICE_ROWS if clock.lags else _ROWS
    left, right = torch.ones(2, rows, rows, device=clock.device)
    product = torch.empty_like(left)
    transport.barrier()
    start = clock.stamp()
    for i, gradient in enumerate(gradients):
        engine.submit(f"t{i}", gradient)
        for _ in range(_PRODUCTS if i < _TENSORS - 1 else _TAIL):
            torch.mm(left, right, out=product)
    end = clock.stamp()
    engine.synchronize()
    return clock.waited(start, end)
