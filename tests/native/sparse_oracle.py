"""Sparse messages as docs/wire_format.md says, element by element in numpy: what the libraries are compared with."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusionlayer.native import selection
from tests.native.abi import BF16, F16, F32, Bytes

Floats = npt.NDArray[np.float32]

BITMAP, BYTE, SHORT = selection.SPARSE_BITMAP, selection.SPARSE_BYTE, selection.SPARSE_SHORT
SUPERBLOCK, BLOCK = 65536, 256
INF, NAN, MAGNITUDE = 0x7F800000, 0x7FC00000, 0x7FFFFFFF


def bits_of(v: Floats) -> npt.NDArray[np.uint32]:
    return v.view(np.uint32)


def magnitudes(v: Floats) -> npt.NDArray[np.int64]:
    return (bits_of(v) & MAGNITUDE).astype(np.int64)


def canonical(v: Floats) -> Floats:
    return np.where(magnitudes(v) > INF, np.uint32(NAN), bits_of(v)).astype(np.uint32).view(np.float32)


def to_bf16(v: Floats) -> npt.NDArray[np.uint16]:
    u = bits_of(v).astype(np.uint64)
    rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16
    return np.where(magnitudes(v) > INF, 0x7FC0, rounded & 0xFFFF).astype(np.uint16)


def widen(raw: Bytes, dtype: int) -> Floats:
    """Return the elements that ``raw`` holds as f32."""
    if dtype == F32:
        return raw.view(np.float32)
    if dtype == F16:
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrow(v: Floats, dtype: int) -> Bytes:
    """Return the bytes of ``v`` rounded to ``dtype``."""
    if dtype == F32:
        return canonical(v).view(np.uint8)
    if dtype == BF16:
        return to_bf16(v).view(np.uint8)
    with np.errstate(over="ignore"):
        halves = np.where(np.isnan(v), np.uint16(0x7E00), v.astype(np.float16).view(np.uint16))
    return halves.astype(np.uint16).view(np.uint8)


def accumulated(acc: Floats, x: Floats, scale: float) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        return canonical(acc + np.float32(scale) * x)


@dataclass(frozen=True)
class Shape:
    """A sparse message of ``numel`` elements."""

    numel: int
    form: int
    values: int
    capacity: int

    @property
    def superblocks(self) -> int:
        return -(-self.numel // SUPERBLOCK)

    @property
    def plane_bytes(self) -> tuple[int, int, int, int]:
        counts = -(-self.numel // BLOCK) if self.form == BYTE else 0
        positions = {BITMAP: -(-self.numel // 8), BYTE: self.capacity, SHORT: 2 * self.capacity}[self.form]
        return 4 * self.superblocks, counts, positions, self.capacity * (4 if self.values == F32 else 2)


def select(shape: Shape, wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the elements that a message takes of those that are wanted."""
    if shape.form == BYTE:
        padded = np.zeros(-(-shape.numel // BLOCK) * BLOCK, bool)
        padded[: shape.numel] = wanted
        rows = padded.reshape(-1, BLOCK)
        wanted = (rows & (rows.cumsum(1) <= 255)).reshape(-1)[: shape.numel]
    return np.flatnonzero(wanted)[: shape.capacity]


def by_magnitude(acc: Floats, threshold: int, ties: int) -> npt.NDArray[np.bool_]:
    bits = magnitudes(acc)
    equal = bits == threshold
    if ties >= 0:
        equal &= equal.cumsum() <= ties
    return (bits > threshold) | equal


def planes_of(shape: Shape, sent: npt.NDArray[np.int64], values: Floats) -> list[Bytes]:
    """Return the planes of the message that has these elements."""
    ends = np.searchsorted(sent, np.arange(1, shape.superblocks + 1) * SUPERBLOCK).astype(np.uint32)
    counts = np.bincount(sent // BLOCK, minlength=-(-shape.numel // BLOCK)).astype(np.uint8)
    if shape.form == BITMAP:
        mask = np.zeros(shape.numel, bool)
        mask[sent] = True
        positions = np.packbits(mask, bitorder="little")
    else:
        kind, block = (np.uint8, BLOCK) if shape.form == BYTE else (np.uint16, SUPERBLOCK)
        typed = np.zeros(shape.capacity, kind)
        typed[: sent.size] = sent % block
        positions = typed.view(np.uint8)
    padded = np.zeros(shape.capacity, np.float32)
    padded[: sent.size] = values
    return [ends.view(np.uint8), counts if shape.form == BYTE else counts[:0], positions, narrow(padded, shape.values)]


@dataclass
class Encoded:
    planes: list[Bytes]
    acc: Floats
    clear: Floats
    sent: npt.NDArray[np.int64]


def encode(shape: Shape, acc: Floats, clear: Floats, wanted: npt.NDArray[np.bool_]) -> Encoded:
    """Return the message, and what becomes of ``acc`` and ``clear``."""
    sent = select(shape, wanted)
    planes = planes_of(shape, sent, acc[sent])
    kept = acc.copy()
    with np.errstate(invalid="ignore"):
        kept[sent] = acc[sent] - widen(planes[3], shape.values)[: sent.size]
    kept[~np.isfinite(kept)] = 0.0
    cleared = clear.copy()
    cleared[sent] = 0.0
    cleared[~np.isfinite(acc)] = 0.0
    return Encoded(planes, kept, cleared, sent)


def decode_sum(shape: Shape, messages: list[Encoded], start: Floats, dtype: int) -> Bytes:
    total = start.copy()
    for message in messages:
        with np.errstate(over="ignore", invalid="ignore"):
            total[message.sent] += widen(message.planes[3], shape.values)[: message.sent.size]
    return narrow(total, dtype)


def run_sums(terms: npt.NDArray[np.float64]) -> float:
    """Return the sum of ``terms`` in the order that csrc/codecs/sparse/sparse.h fixes."""

    def fold(partial: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        while partial.shape[-1] > 1:
            partial = partial[..., 0::2] + partial[..., 1::2]
        return partial[..., 0]

    def columns(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        total = np.zeros(rows.shape[:-2] + rows.shape[-1:])
        for i in range(rows.shape[-2]):
            total = total + rows[..., i, :]
        return total

    runs = np.zeros(max(1, -(-terms.size // 4096)) * 4096)
    runs[: terms.size] = terms
    each = fold(columns(runs.reshape(-1, 256, 16)))
    all_runs = np.zeros(-(-each.size // 32) * 32)
    all_runs[: each.size] = each
    return float(fold(columns(all_runs.reshape(-1, 32))))
