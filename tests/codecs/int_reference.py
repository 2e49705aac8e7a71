"""The ``int`` codec written down a second time, in numpy: an oracle for its bytes."""

import math

import numpy as np
from numpy.typing import NDArray

from fusionlayer.codecs.quantized.integer import Int

from .arithmetic import hadamard, halves, pack_runs, unpack_runs

F32 = NDArray[np.float32]


def encode(codec: Int, x: F32, seed: int = 0, offset: int = 0) -> tuple[F32, NDArray[np.uint8]]:
    """Return the planes (scales, codes) of ``x`` (n,)."""
    groups = -(-len(x) // codec.group_size)
    units, span, top = map(np.float32, sizes(codec))
    below = np.float32(0.5 if codec.bits < 4 else 0)
    v = np.zeros(groups * codec.group_size, np.float32)
    v[: len(x)] = x
    with np.errstate(all="ignore"):
        if codec.hadamard:
            v = hadamard32(v)
        v = v.reshape(groups, codec.group_size)
        amax = np.abs(v).max(axis=1, initial=0)
        scales = short_scales(amax, units, clear_bits(codec.bits))
        broken = ~np.isfinite(v).all(axis=1) | ~np.isfinite(scales * outermost(codec.bits))
        dead = broken | (amax < 2.0**-100)
        inverse = np.where(dead, np.float32(0), span / units / scales)[:, None]
        scales = np.where(broken, np.float32(np.nan), np.where(dead, np.float32(0), scales))
        v = np.where(dead[:, None], np.float32(0), v)
        if codec.rounding == "stochastic":
            parts = np.rint(v * (inverse * np.float32(65536))).astype(np.int64)
            random = halves(seed, offset, v.size).reshape(v.shape)
            codes = parts + random - int(below * 65536) >> 16
            assert (np.abs(codes + below)[~dead] <= top).all()
        else:
            codes = np.clip(np.rint(v * inverse - below), -top - below - codec._full, top - below)
    codes = codes.astype(np.int8)
    codes[dead] = 0
    if codec.bits < 4:
        return scales.astype(np.float32), pack_runs(codes.view(np.uint8), codec.bits)
    if codec.bits == 4:
        low, high = np.split(codes.view(np.uint8) & 15, 2, axis=1)
        return scales.astype(np.float32), (low | high << 4).reshape(-1)
    return scales.astype(np.float32), codes.view(np.uint8).reshape(-1)


def decode(codec: Int, scales: F32, codes: NDArray[np.uint8], numel: int) -> F32:
    """Return the (numel,) values of the planes."""
    values, scales = levels(codec, scales, codes)
    if codec.hadamard:
        values = hadamard32(values.reshape(-1)).reshape(values.shape)
    with np.errstate(all="ignore"):
        return (values * scales).reshape(-1)[:numel]


def summands(codec: Int, scales: F32, codes: NDArray[np.uint8]) -> F32:
    """Return what a sum adds of the planes; it is rotated back as a whole."""
    values, scales = levels(codec, scales, codes)
    with np.errstate(all="ignore"):
        return (values * scales).reshape(-1)


def levels(codec: Int, scales: F32, codes: NDArray[np.uint8]) -> tuple[F32, F32]:
    """Return the levels of each group, and what they are multiplied by."""
    if codec.bits < 4:
        unsigned = unpack_runs(codes, codec.bits).reshape(len(scales), -1).astype(np.int8)
        signed = 2 * np.where(unsigned >> (codec.bits - 1), unsigned - (1 << codec.bits), unsigned) + 1
    else:
        signed = codes.view(np.int8).reshape(len(scales), -1)
    if codec.bits == 4:
        signed = np.concatenate([(signed << 4) >> 4, signed >> 4], axis=1)
    values = signed.astype(np.float32)
    with np.errstate(all="ignore"):
        scales = cut(scales, clear_bits(codec.bits))
        scales = np.where(np.isfinite(scales * outermost(codec.bits)), scales, np.float32(np.nan))
    return values, (scales * np.float32(1 / 32 if codec.hadamard else 1))[:, None]


def sizes(codec: Int) -> tuple[float, float, float]:
    """Return the largest magnitude in scales and in steps, and the outermost level in steps."""
    if codec.bits >= 4:
        most = 127 if codec.bits == 8 else 7
        return most + codec._full, most + codec._full, most
    top = 3.5 if codec.bits == 3 else 1.5
    span = top if codec.unbiased else (2.375 + 0.21875 * math.log2(codec.group_size / 32)) * (1.75 if top > 2 else 1)
    return 2 * span, span, top


def hadamard32(v: F32) -> F32:
    """Return every 32 values times the Hadamard matrix."""
    return hadamard(v.reshape(-1, 32)).reshape(-1)


def clear_bits(bits: int) -> int:
    """Return how many low bits of a scale are clear."""
    return 12 if bits == 8 else 8


def outermost(bits: int) -> np.float32:
    """Return the largest magnitude of a level that any bytes have, in scales."""
    return np.float32({2: 3, 3: 7, 4: 8, 8: 128}[bits])


def cut(scales: F32, clear: int) -> F32:
    """Return ``scales`` without their low bits."""
    return (scales.view(np.uint32) >> clear << clear).view(np.float32)


def short_scales(amax: F32, units: np.float32, clear: int) -> F32:
    """Return the least scales with clear low bits of which ``units`` are not below ``amax``: found from below."""
    scales = cut((amax / units).astype(np.float32), clear)
    for _ in range(2):
        above = (scales.view(np.uint32) + (1 << clear)).view(np.float32)
        scales = np.where((amax / units > scales) | (scales * units < amax), above, scales)
    return scales
