"""The ``int`` codec written down a second time, in numpy: an oracle for its bytes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fusionlayer.codecs.integer import Int

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
        broken = ~np.isfinite(v).all(axis=1)
        dead = broken | (amax < 2.0**-100)
        scales = np.where(broken, np.float32(np.nan), np.where(dead, np.float32(0), amax / units))
        inverse = np.where(dead, np.float32(0), span / amax)[:, None]
        scaled = np.where(dead[:, None], np.float32(0), v) * inverse
        if codec.rounding == "stochastic":
            scaled = scaled + uniform(seed, offset, v.size).reshape(v.shape)
    codes = np.clip(np.rint(scaled - below), -top - below - codec._full, top - below).astype(np.int8)
    codes[dead] = 0
    if codec.bits < 4:
        return scales.astype(np.float32), pack_runs(codes.view(np.uint8).reshape(-1, 32), codec.bits)
    if codec.bits == 4:
        low, high = np.split(codes.view(np.uint8) & 15, 2, axis=1)
        return scales.astype(np.float32), (low | high << 4).reshape(-1)
    return scales.astype(np.float32), codes.view(np.uint8).reshape(-1)


def decode(codec: Int, scales: F32, codes: NDArray[np.uint8], numel: int) -> F32:
    """Return the (numel,) values of the planes."""
    if codec.bits < 4:
        unsigned = unpack_runs(codes, codec.bits).reshape(len(scales), -1).astype(np.int8)
        signed = 2 * np.where(unsigned >> (codec.bits - 1), unsigned - (1 << codec.bits), unsigned) + 1
    else:
        signed = codes.view(np.int8).reshape(len(scales), -1)
    if codec.bits == 4:
        signed = np.concatenate([(signed << 4) >> 4, signed >> 4], axis=1)
    values = signed.astype(np.float32)
    with np.errstate(all="ignore"):
        if codec.hadamard:
            values = hadamard32(values.reshape(-1)).reshape(values.shape)
            scales = scales * np.float32(1 / 32)
        return (values * scales[:, None]).reshape(-1)[:numel]


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


def uniform(seed: int, offset: int, count: int) -> F32:
    """Return the noise in [-0.5, 0.5) of elements number ``offset`` to ``offset + count - 1``."""
    a, b, c = philox_key(seed)
    numbers = offset + np.arange(count, dtype=np.uint64)
    high, low = (numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32)
    h = low * np.uint32(0x9E3779B1) + (np.uint32(a) ^ (high * np.uint32(0x9E3779B9)))
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) + np.uint32(b) + high * np.uint32(c)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return (h >> np.uint32(9) | np.uint32(0x3F800000)).view(np.float32) - np.float32(1.5)


def philox_key(seed: int) -> tuple[int, int, int]:
    """Return the mixer's key: Philox4x32-10 of counter 0 under ``seed``; the third word is made odd."""
    c, k0, k1 = [0, 0, 0, 0], seed & MASK, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & MASK, p0 >> 32 ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c[0], c[1], c[2] | 1
