"""The core's arithmetic written down a second time, in numpy: random numbers, Hadamard transforms, packing of codes."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["hadamard", "halves", "pack_runs", "random_bits", "unpack_runs"]

F32 = NDArray[np.float32]
RUN, MASK = 32, 0xFFFFFFFF


def random_bits(seed: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the 32 bits of elements of these numbers in the sequence of ``seed`` (``wire_format.md``)."""
    a, b, c = _key(seed)
    high, low = (numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32)
    h = low * np.uint32(0x9E3779B1) + (np.uint32(a) ^ (high * np.uint32(0x9E3779B9)))
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) + np.uint32(b) + high * np.uint32(c)
    h *= np.uint32(0x846CA68B)
    return h ^ h >> np.uint32(16)


def _key(seed: int) -> tuple[int, int, int]:
    """Return the key of a seed: Philox4x32-10 (Salmon et al., SC 2011) of counter 0; the third word is made odd."""
    c, k0, k1 = [0, 0, 0, 0], seed & MASK, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & MASK, p0 >> 32 ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c[0], c[1], c[2] | 1


def halves(seed: int, offset: int, count: int) -> NDArray[np.int64]:
    """Return 16 random bits of each of ``count`` elements from ``offset`` on: i and i + 16 of 32 share a number's."""
    numbers = offset + np.arange(count, dtype=np.uint64)
    second = numbers & np.uint64(16)
    bits = random_bits(seed, numbers - second)
    return np.where(second > 0, bits >> np.uint32(16), bits & np.uint32(0xFFFF)).astype(np.int64)


def hadamard(v: F32) -> F32:
    """Return every row times the Hadamard matrix of its length, not normalised: strides 1, 2, 4, .., in this order."""
    rows, n = v.shape
    stride = 1
    while stride < n:
        a, b = np.moveaxis(v.reshape(rows, -1, 2, stride), 2, 0)
        v = np.stack([a + b, a - b], axis=2).reshape(rows, n)
        stride *= 2
    return v


def pack_runs(codes: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """Return the bytes of whole runs of 32 ``codes``, integers below 2**bits.

    Each code is cut, from its lowest bit, into parts of 8, then 4, then 2, then 1 bits. In each run one part follows
    the other. If a byte has room for the part of k codes, byte j holds that of codes j, j + 32 / k, j + 64 / k, .., the
    first in the lowest bits.
    """
    runs, packed, shift = codes.reshape(-1, RUN).astype(np.uint32), [], 0
    for width in _parts(bits):
        part = (runs >> shift & (1 << width) - 1).reshape(-1, 8 // width, 4 * width)
        packed.append(np.bitwise_or.reduce(part << np.arange(0, 8, width, dtype=np.uint32)[:, None], axis=1))
        shift += width
    return np.concatenate(packed, axis=1).astype(np.uint8).reshape(-1)


def unpack_runs(data: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Return the codes that ``pack_runs`` packed."""
    runs, start, shift = data.reshape(-1, 4 * bits).astype(np.uint32), 0, 0
    codes = np.zeros((len(runs), RUN), np.uint32)
    for width in _parts(bits):
        part = runs[:, None, start : start + 4 * width] >> np.arange(0, 8, width, dtype=np.uint32)[:, None]
        codes |= (part & (1 << width) - 1).reshape(-1, RUN) << shift
        start, shift = start + 4 * width, shift + width
    return codes.astype(np.int32).reshape(-1)


def _parts(bits: int) -> list[int]:
    """Return the widths of the parts of a code: as many of 8 bits as fit, then 4, 2 and 1."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]
