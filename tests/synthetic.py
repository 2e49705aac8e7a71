"""Tensors made by integer arithmetic alone: the same bits with every torch, on every machine and in every thread."""

from typing import cast

import numpy as np
import torch
from torch import Tensor

RUN = 32  # elements of about the same size


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Return 64 bits for each of ``numbers`` (uint64) that look random, by the SplitMix64 finaliser."""
    with np.errstate(over="ignore"):
        state = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return cast(np.ndarray, state ^ (state >> np.uint64(31)))


def gradient(
    numel: int, stream: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Return (numel,) bell-shaped values around 0, below 1; their size changes from one run of 32 to the next."""
    start = np.uint64(stream << 40)
    bits = mixed(start + np.arange(numel, dtype=np.uint64))
    quarters = [(bits >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4)]
    bell = sum(quarter.astype(np.int64) for quarter in quarters) - 2 * 0xFFFF
    runs = mixed(start + np.uint64(1 << 39) + np.arange(-(-numel // RUN), dtype=np.uint64)) & np.uint64(3)
    scale = np.repeat(np.exp2(-17.0 - runs.astype(np.float64)), RUN)[:numel]
    values = torch.empty(numel)
    values.numpy()[:] = bell * scale
    return values.to(device=device, dtype=dtype)


def noise(nbytes: int, stream: int = 0) -> Tensor:
    """Return (nbytes,) uint8 that look random; ``nbytes`` is a multiple of 8."""
    numbers = np.uint64(stream << 40) + np.arange(nbytes // 8, dtype=np.uint64)
    return torch.from_numpy(mixed(numbers).view(np.uint8))


def bit_patterns(dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return every value of a 16-bit type, or 65536 bit patterns of f32 with all its special values: NaNs too."""
    if dtype is not torch.float32:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).to(device).view(dtype)
    patterns = noise(4 << 16).view(torch.int32)
    special = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    signed = torch.tensor([*special, *(bits - (1 << 31) for bits in special)], dtype=torch.int32)
    patterns[: len(signed)] = signed
    return patterns.to(device).view(dtype)


def awkward(numel: int, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (numel,) values with outliers and, as far as numel goes, groups of zeros, tiny, huge and broken ones."""
    x = gradient(numel, 1 << 20)
    x[group // 3 :: 5 * group] = 300.0
    for index, factor in ((1, 0.0), (2, 2.0**-110), (3, 1e38), (5, float("nan"))):
        x[index * group : (index + 1) * group] *= factor
    x[6 * group : 7 * group] = float("inf")
    return x.to(dtype)
