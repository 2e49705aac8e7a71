"""The core's arithmetic written down a second time, in torch: random numbers, Hadamard transforms, packing of codes."""

from __future__ import annotations

import torch
from torch import Tensor

from fusionlayer.codecs.native import RUN

__all__ = ["hadamard", "pack_runs", "random_bits", "rounding_halves", "unpack_runs"]

_WORD = (1 << 32) - 1


def random_bits(seed: int, offset: int, count: int, device: torch.device) -> Tensor:
    """Return (count,) int32: the 32 bits of elements ``offset``, ``offset + 1``, ... in the sequence of ``seed``.

    The codec core draws the same bits (``wire_format.md``, random numbers).
    """
    a, b, c = _key(seed & (1 << 64) - 1)
    number = torch.arange(offset, offset + count, device=device)
    high, low = number >> 32, number & _WORD
    bits = (low * 0x9E3779B1 + (a ^ (high * 0x9E3779B9))) & _WORD
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _WORD
    bits = (((bits ^ (bits >> 15)) + b + high * c) * 0x846CA68B) & _WORD
    return (bits ^ (bits >> 16)).to(torch.int32)


def rounding_halves(seed: int, offset: int, count: int, device: torch.device) -> Tensor:
    """Return (count,) int32: the 16 bits of each element from number ``offset`` on, a multiple of 32.

    Elements i and i + 16 of 32 have the low and the high half of the first one's ``random_bits``.
    """
    bits = random_bits(seed, offset, -(-count // RUN) * RUN, device).view(-1, 2, RUN // 2)[:, 0]
    return torch.stack((bits & 0xFFFF, bits >> 16 & 0xFFFF), 1).view(-1)[:count]


def _key(seed: int) -> tuple[int, int, int]:
    """Return the key of a seed: Philox4x32-10 (Salmon et al., SC 2011) of counter 0."""
    counter, k0, k1 = [0, 0, 0, 0], seed & _WORD, seed >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ k0,
            second & _WORD,
            first >> 32 ^ counter[3] ^ k1,
            first & _WORD,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return counter[0], counter[1], counter[2] | 1


def hadamard(x: Tensor, block: int) -> Tensor:
    """Return ``x`` (k * block,) f32 with each block v replaced by H v; H is not normalised and in natural order.

    Butterflies have strides 1, 2, 4, .., as in the codec core.
    """
    rows = x.numel() // block
    v = x.view(rows, block).t().contiguous()  # blocks side by side: every stage is one operation on long vectors
    stride = 1
    while stride < block:
        pairs = v.view(-1, 2, stride * rows)
        v = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1)
        stride *= 2
    return v.view(block, rows).t().reshape(-1)


def pack_runs(codes: Tensor, bits: int) -> Tensor:
    """Return (n * bits / 8,) uint8 of ``codes`` (n,) integers below 2**bits; n is a multiple of 32.

    Each code is cut, from its lowest bit, into parts of 8, then 4, then 2, then 1 bits. In each run of 32 codes one
    part follows the other. If a byte has room for the part of k codes, byte j holds that of codes j, j + 32 / k,
    j + 64 / k, .., the first in the lowest bits.
    """
    runs, parts, shift = codes.view(-1, RUN).to(torch.int32), [], 0
    for width in _parts(bits):
        part = (runs >> shift & (1 << width) - 1).view(-1, 8 // width, RUN * width // 8)
        places = torch.arange(0, 8, width, dtype=torch.int32, device=codes.device)
        parts.append((part << places[:, None]).sum(1).to(torch.uint8))
        shift += width
    return torch.cat(parts, 1).view(-1)


def unpack_runs(data: Tensor, bits: int) -> Tensor:
    """Return (n,) int32: the codes that ``pack_runs`` packed into ``data`` (n * bits / 8,)."""
    runs = data.view(-1, RUN * bits // 8)
    codes = torch.zeros(runs.shape[0], RUN, dtype=torch.int32, device=data.device)
    start = shift = 0
    for width in _parts(bits):
        nbytes = RUN * width // 8
        part = runs[:, start : start + nbytes].to(torch.int32)
        places = torch.arange(0, 8, width, dtype=torch.int32, device=data.device)
        spread = part[:, None, :] >> places[:, None] & (1 << width) - 1
        codes |= spread.reshape(-1, RUN) << shift
        start, shift = start + nbytes, shift + width
    return codes.view(-1)


def _parts(bits: int) -> list[int]:
    """Return the widths of the parts of a code: as many of 8 bits as fit, then 4, 2 and 1."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]
