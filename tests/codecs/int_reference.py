"""The ``int`` codec written down a second time, in numpy: an oracle for its bytes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fusionlayer.codecs.quantized.integer import Int

F32 = NDArray[np.float32]
MASK = 0xFFFFFFFF


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
        return scales.astype(np.float32), pack_runs(codes.view(np.uint8).reshape(-1, 32), codec.bits)
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


def pack_runs(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return runs of 32 codes (n, 32) as bytes: two bits of each, eight codes apart; then one bit, four apart."""
    parts = [(codes & 3).reshape(-1, 4, 8) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]]
    if bits == 3:
        parts.append((codes >> 2 & 1).reshape(-1, 8, 4) << np.arange(8, dtype=np.uint8)[:, None])
    return np.concatenate([np.bitwise_or.reduce(part, axis=1) for part in parts], axis=1).reshape(-1)


def unpack_runs(runs: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return (n, 32) codes of what ``pack_runs`` made."""
    low, top = np.split(runs.reshape(-1, 4 * bits), [8], axis=1)
    codes = (low[:, None] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 32)
    if bits == 3:
        codes = codes | (top[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 32) << 2
    return codes.astype(np.uint8)


def hadamard32(v: F32) -> F32:
    """Return every 32 values times the Hadamard matrix: strides 1, 2, 4, 8, 16, in this order."""
    for stride in (1, 2, 4, 8, 16):
        a, b = np.moveaxis(v.reshape(-1, 2, stride), 1, 0)
        v = np.stack([a + b, a - b], axis=1).reshape(-1)
    return v


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


def halves(seed: int, offset: int, count: int) -> NDArray[np.int64]:
    """Return 16 random bits of each of ``count`` elements from ``offset`` on: i and i + 16 of 32 share a number's."""
    numbers = offset + np.arange(count, dtype=np.uint64)
    second = numbers & np.uint64(16)
    bits = random_bits(seed, numbers - second)
    return np.where(second > 0, bits >> np.uint32(16), bits & np.uint32(0xFFFF)).astype(np.int64)


def random_bits(seed: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the 32 random bits of these elements."""
    a, b, c = philox_key(seed)
    high, low = (numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32)
    h = low * np.uint32(0x9E3779B1) + (np.uint32(a) ^ (high * np.uint32(0x9E3779B9)))
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) + np.uint32(b) + high * np.uint32(c)
    h *= np.uint32(0x846CA68B)
    return h ^ h >> np.uint32(16)


def philox_key(seed: int) -> tuple[int, int, int]:
    """Return the mixer's key: Philox4x32-10 of counter 0 under ``seed``; the third word is made odd."""
    c, k0, k1 = [0, 0, 0, 0], seed & MASK, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & MASK, p0 >> 32 ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c[0], c[1], c[2] | 1
