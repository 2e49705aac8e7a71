"""The verbs of sparse codecs written down a second time, in torch and numpy: slow, plain, an oracle for the core."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fusionlayer import native
from fusionlayer.base.errors import WireError

from . import int_reference, threshold_oracle

SUPERBLOCK, BLOCK, INFINITE = 1 << 16, 256, 0x7F800000
BITMAP, BYTE, SHORT = range(3)
_DTYPES = {code: dtype for dtype, code in native.DTYPES.items()}


def magnitudes(x: Tensor) -> Tensor:
    """Return the bits of |x| as int64."""
    return (x.float().view(torch.int32) & 0x7FFFFFFF).long()


def accumulate(x: Tensor, scale: float, acc: Tensor) -> None:
    acc += x.float() * torch.tensor(scale, dtype=torch.float32)


def accumulate_momentum(
    x: Tensor, scale: float, momentum: float, nesterov: bool, velocity: Tensor, acc: Tensor
) -> None:
    s, m = (torch.tensor(value, dtype=torch.float32) for value in (scale, momentum))
    given = x.float() * s
    if nesterov:
        velocity.copy_((velocity + given) * m)
        acc.copy_(acc + (velocity + given))
    else:
        velocity.copy_(velocity * m + given)
        acc.add_(velocity)


def count_above(acc: Tensor, thresholds: Sequence[int]) -> list[int]:
    assert len(thresholds) <= 16
    bits = magnitudes(acc)
    return [int((bits >= threshold).sum()) for threshold in thresholds]


def kth_magnitude(acc: Tensor, k: int) -> tuple[int, int]:
    bits = magnitudes(acc)
    kth = int(bits.sort(descending=True).values[k - 1])
    return kth, int((bits > kth).sum())


def choose_largest(acc: Tensor, k: int) -> Tensor:
    magnitude, above = kth_magnitude(acc, k)
    if count_above(acc, [INFINITE])[0]:
        return torch.tensor([INFINITE, -1])
    return torch.tensor([magnitude, k - above if magnitude else int(not above)])


def choose_threshold(how: native.Chooser, acc: Tensor, memory: Tensor, sample: Tensor | None = None) -> Tensor:
    return threshold_oracle.choose(how, acc, memory, sample, (magnitude_stats, count_above, kth_magnitude))


def choose_drawn(spec: native.Spec, acc: Tensor, k: int) -> Tensor:
    halves = (random_numbers(spec, len(acc)) >> 1).sort().values
    return torch.tensor([2 * (int(halves[k - 1]) + 1) if acc.isfinite().all() else 0, -1])


def random_numbers(spec: native.Spec, n: int) -> Tensor:
    a, b, c = int_reference.philox_key(spec.seed)
    return torch.from_numpy(_random(a, b, c, spec.offset, n).astype(np.int64))


def magnitude_stats(acc: Tensor, above: int = 0) -> native.MagnitudeStats:
    bits = magnitudes(acc)
    chosen = bits >= above
    finite = acc[chosen & (bits < INFINITE)].abs().double()
    largest = int(bits[chosen].max()) if chosen.any() else 0
    return native.MagnitudeStats(int(chosen.sum()), float(finite.sum()), float(finite.square().sum()), largest)


def sparse_encode(
    spec: native.Spec,
    offsets: Sequence[int],
    acc: Tensor,
    threshold: int,
    ties: int,
    body: Tensor,
    *,
    x: Tensor | None = None,
    scale: float = 1.0,
    clear: Tensor | None = None,
    choice: Tensor | None = None,
) -> None:
    if choice is not None:
        threshold, ties = choice.tolist()
    form, value, capacity, flags = spec.param
    if x is not None:
        accumulate(x, scale, acc)
    bits = magnitudes(acc)
    if flags & native.SPARSE_RANDOM:
        numbers = random_numbers(spec, len(acc))
        equal, chosen = numbers == threshold, (numbers < threshold) | (bits >= INFINITE)
        equal[:] = False
    else:
        equal, chosen = bits == threshold, bits > threshold
    if ties >= 0:
        equal &= equal.cumsum(0) <= ties
    chosen |= equal
    if form == BYTE:  # a block's 256th pair cannot be counted
        for start in range(0, len(acc), BLOCK):
            block = chosen[start : start + BLOCK]
            block &= block.cumsum(0) < BLOCK
    positions = chosen.nonzero().view(-1)[:capacity]
    values = acc[positions].to(_DTYPES[value])
    acc[positions] -= values.float()
    if clear is not None:
        clear[positions] = 0
        clear[~acc.isfinite()] = 0
    acc[~acc.isfinite()] = 0
    _write(form, offsets, body, len(acc), capacity, positions, values)


def sparse_decode_sum(spec: native.Spec, offsets: Sequence[int], bodies: Tensor, out: Tensor, *, add: bool) -> None:
    total = out.float() if add else torch.zeros(len(out))
    pairs = [read(spec, offsets, body, len(out)) for body in bodies]
    for positions, values in pairs:
        total[positions] += values
    out.copy_(total)


def read(spec: native.Spec, offsets: Sequence[int], body: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the positions (int64) and values (f32) of a message, after checking it."""
    form, value, capacity, _ = spec.param
    supers, blocks = -(-n // SUPERBLOCK), -(-n // BLOCK)
    ends = _plane(body, offsets[0], supers, torch.int32).long()
    counts = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
    if supers and (counts.min() < 0 or ends[-1] > capacity):
        raise WireError("ends")
    m = int(ends[-1]) if supers else 0
    if form == BITMAP:
        packed = _plane(body, offsets[2], -(-n // 8), torch.uint8).numpy()
        positions = torch.from_numpy(np.unpackbits(packed, bitorder="little")).nonzero().view(-1)
        found = torch.bincount(positions // SUPERBLOCK, minlength=supers)
        if len(positions) and positions[-1] >= n or not torch.equal(found, counts):
            raise WireError("bitmap")
    elif form == BYTE:
        sizes = _plane(body, offsets[1], blocks, torch.uint8).long()
        sums = torch.stack([part.sum() for part in sizes.split(SUPERBLOCK // BLOCK)])
        if not torch.equal(sums, counts):
            raise WireError("counts")
        positions = _plane(body, offsets[2], m, torch.uint8).long() + _starts(sizes) * BLOCK
    else:
        positions = _plane(body, offsets[2], m, torch.int16).long() & 0xFFFF
        positions = positions + _starts(counts) * SUPERBLOCK
    if m and (positions[-1] >= n or (positions.diff() <= 0).any()):
        raise WireError("positions")
    return positions, _plane(body, offsets[3], m, _DTYPES[value]).float()


def _starts(sizes: Tensor) -> Tensor:
    return torch.arange(len(sizes)).repeat_interleave(sizes)


def _write(
    form: int, offsets: Sequence[int], body: Tensor, n: int, capacity: int, positions: Tensor, values: Tensor
) -> None:
    m = len(positions)
    every = torch.bincount(positions // SUPERBLOCK, minlength=-(-n // SUPERBLOCK))
    _plane(body, offsets[0], len(every), torch.int32).copy_(every.cumsum(0))
    if form == BITMAP:
        sent = np.zeros(n, np.uint8)
        sent[positions.numpy()] = 1
        packed = torch.from_numpy(np.packbits(sent, bitorder="little"))
        _plane(body, offsets[2], len(packed), torch.uint8).copy_(packed)
    elif form == BYTE:
        sizes = torch.bincount(positions // BLOCK, minlength=-(-n // BLOCK))
        _plane(body, offsets[1], len(sizes), torch.uint8).copy_(sizes)
        _fill(_plane(body, offsets[2], capacity, torch.uint8), positions % BLOCK)
    else:
        _fill(_plane(body, offsets[2], capacity, torch.int16), positions % SUPERBLOCK)
    plane = _plane(body, offsets[3], capacity, values.dtype)
    plane.zero_()
    plane[:m] = values


def _fill(plane: Tensor, numbers: Tensor) -> None:
    plane.zero_()
    plane[: len(numbers)] = numbers.to(plane.dtype)


def _plane(body: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    return body[offset : offset + count * dtype.itemsize].view(dtype)


def _random(a: int, b: int, c: int, offset: int, count: int) -> np.ndarray:
    """Return the 32 random bits of each of ``count`` elements."""
    numbers = np.uint64(offset) + np.arange(count, dtype=np.uint64)
    high, low = (numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32)
    h = low * np.uint32(0x9E3779B1) + (np.uint32(a) ^ (high * np.uint32(0x9E3779B9)))
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) + np.uint32(b) + high * np.uint32(c)
    h *= np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))
