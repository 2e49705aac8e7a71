"""Means over ranks: all ranks must plan by the same costs, whatever each has measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...transport import Transport

Points = list[list[float]]
"""A measured curve: [[size, seconds], ...]."""


def average(found: Any, transport: Transport, measured_by: int | None = None) -> Any:
    """Return ``found`` with each float replaced by its mean over ranks.

    Other values, such as integer sizes, stay unchanged on this rank. All ranks call it together.
    """
    numbers = torch.tensor(list(_floats(found)), dtype=torch.float64, device="cpu")
    if transport.size > 1:
        transport.all_reduce(numbers)
    return _filled(found, iter((numbers / (measured_by or transport.size)).tolist()))


def _floats(found: Any) -> Iterator[float]:
    if isinstance(found, dict):
        for value in found.values():
            yield from _floats(value)
    elif isinstance(found, list):
        for value in found:
            yield from _floats(value)
    elif isinstance(found, float):
        yield found


def _filled(found: Any, means: Iterator[float]) -> Any:
    if isinstance(found, dict):
        return {key: _filled(value, means) for key, value in found.items()}
    if isinstance(found, list):
        return [_filled(value, means) for value in found]
    return next(means) if isinstance(found, float) else found
