"""The number of bits that each super-group of a sum gets (DynamiQ, sections 3.2 and A)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

# A super-group gets 8 bits if its energy is at least 512 / 17 times that of one that just gets 4: each bit then gains
# as much in both (section 3.2).
_RATIO = (512, 17)


def allocate(energies: Tensor, chunks: Sequence[int], rooms: Sequence[int]) -> Tensor:
    """Return (m,) uint8: the bits of each super-group, 2, 4 or 8, as many as there is room for.

    As the scalar u of section A rises, one super-group after the other gets 4 bits, or 8: 4 bits in the order of F_j, 8
    bits in the order of F_j * 17 / 512. This function sorts these steps and takes them while they fit, which finds the
    largest u to one super-group. So nothing is kept from step to step. Only comparisons of exact products decide, so
    ranks with the same energies get the same bits.

    Args:
        energies: (m,) F_j, the sum of all squares. Energies that are not finite count as larger than all others; 0
            stays at 2 bits.
        chunks: super-groups of each message, m in all; ``deal`` shares them out.
        rooms: room of each message, in units of 64 bytes (a super-group with 2 bits takes one).
    """
    m, device = energies.numel(), energies.device
    energy = energies.double().nan_to_num(nan=torch.inf, posinf=torch.inf)
    keys = torch.cat([energy * _RATIO[0], energy * _RATIO[1]])
    steps = torch.argsort(keys, descending=True, stable=True)
    eights = (steps >= m).cumsum(0)
    fours = torch.arange(1, 2 * m + 1, device=device) - eights
    fits = keys[steps] > 0
    for length, room in sorted(set(zip(chunks, rooms, strict=True))):
        places = _places(tuple(chunks), tuple(rooms), length, room).to(device)
        taken = length + torch.searchsorted(places, fours) + 2 * torch.searchsorted(places, eights)
        fits &= taken <= room
    taken_steps = fits.cumprod(0).bool()
    gained = torch.zeros(2 * m, dtype=torch.uint8, device=device)
    gained[steps] = taken_steps.to(torch.uint8)
    return 2 + 2 * gained[:m] + 4 * gained[m:]


def deal(bits: Tensor, chunks: Sequence[int]) -> Tensor:
    """Return (m,) int64: the super-group for each place, so that messages take about equally many bytes.

    Super-groups are dealt to the messages in turn, those with the most bits first, otherwise in their order. A message
    keeps the order in which it got them: 8 bits, then 4, then 2 (section 3.2).

    Args:
        bits: (m,), the bits of each super-group.
        chunks: super-groups of each message, m in all.
    """
    order = torch.empty(bits.numel(), dtype=torch.int64, device=bits.device)
    order[_slots(tuple(chunks)).to(bits.device)] = torch.argsort(bits, descending=True, stable=True)
    return order


@lru_cache(maxsize=64)
def _slots(chunks: tuple[int, ...]) -> Tensor:
    """Return (m,) int64: places in the order of dealing. Each message gets its share of every prefix of that order."""
    parts = [(torch.arange(n, dtype=torch.float64, device="cpu") + 0.5) / n for n in chunks if n]
    return torch.argsort(torch.cat(parts), stable=True) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


@lru_cache(maxsize=256)
def _places(chunks: tuple[int, ...], rooms: tuple[int, ...], length: int, room: int) -> Tensor:
    """Return (length,) int64, ascending: the turns in which the first message of this length and capacity gets
    super-groups."""
    first = list(zip(chunks, rooms, strict=True)).index((length, room))
    start = sum(chunks[:first])
    dealt = torch.empty(sum(chunks), dtype=torch.int64, device="cpu")
    dealt[_slots(chunks)] = torch.arange(sum(chunks), device="cpu")
    return dealt[start : start + length].contiguous()


def pack_widths(bits: Tensor) -> Tensor:
    """Return the plane of widths (24 * ceil(m / 64),) uint8 for ``bits`` (m,), on any device."""
    m = bits.numel()
    runs = -(-m // 64)
    padded = torch.nn.functional.pad(bits, (0, runs * 64 - m)).view(runs, 64)
    weights = torch.ones(64, dtype=torch.int64, device=bits.device) << torch.arange(64, device=bits.device)
    plane = torch.empty(runs, 3, dtype=torch.int64, device=bits.device)
    eights, fours = padded == 8, padded == 4
    plane[:, 0] = eights.sum(1).cumsum(0) | fours.sum(1).cumsum(0) << 32
    plane[:, 1] = (eights * weights).sum(1)
    plane[:, 2] = (fours * weights).sum(1)
    return plane.view(-1).view(torch.uint8)
