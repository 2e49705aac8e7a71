"""The C ABI of the codec libraries as tests see it: cases, guarded buffers, and a byte comparison of two libraries."""

import ctypes
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from fusionlayer import native
from fusionlayer.base import libraries
from fusionlayer.base.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

F32, BF16, F16 = 0, 1, 2
DTYPES = {"f32": F32, "bf16": BF16, "f16": F16}
HADAMARD, STOCHASTIC, FULL = native.INT_HADAMARD, native.INT_STOCHASTIC, native.INT_FULL
OK, BAD_ARGUMENT, UNSUPPORTED = 0, 1, 2
GUARD, GUARD_BYTES = 0xA5, 256
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025)


def itemsize(dtype: int) -> int:
    return 4 if dtype == F32 else 2


def _usable() -> Iterator[str]:
    for name in libraries.build_info("").isas:
        try:
            libraries.select_isa(name)
        except ConfigError:
            continue
        yield name
    libraries.select_isa("auto")


ISAS = tuple(_usable())
"""The instruction sets that were built and that this CPU has, the best one first."""


def each_isa() -> Iterator[str]:
    """Select one instruction set after the other, and at the end the best one again."""
    assert "baseline" in ISAS
    try:
        for name in ISAS:
            libraries.select_isa(name)
            assert libraries.isa() == name
            yield name
    finally:
        libraries.select_isa("auto")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let the core use so many threads."""
    libraries.set_threads(count)
    try:
        yield
    finally:
        libraries.set_threads(max(1, min(torch.get_num_threads(), 8)))


def in_child(body: Callable[[], None]) -> int:
    """Return the exit status of a forked process that runs ``body``, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def fenced(pages: int = 8) -> Iterator[int]:
    """Yield the address where memory ends: what is read or written there or behind ends the process."""
    page = 4096
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    for verb in (libc.mprotect, libc.munmap):
        verb.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)[: 3 if verb is libc.mprotect else 2]
    base = libc.mmap(None, (pages + 1) * page, 3, 0x22, -1, 0)
    assert libc.mprotect(base + pages * page, page, 0) == 0
    yield base + pages * page
    libc.munmap(base, (pages + 1) * page)


@dataclass(frozen=True)
class Case:
    """One spec, and how many messages there are."""

    codec: int
    param: tuple[int, ...]
    dtype: int
    numel: int
    count: int = 1
    seed: int = 0x1234_5678_9ABC_DEF0
    offset: int = 0
    misaligned: bool = False
    """x, residual and out are aligned to their own type only."""

    @property
    def spec(self) -> native.Spec:
        param = (ctypes.c_uint32 * 4)(*self.param)
        return native.Spec(self.codec, self.dtype, param, self.seed, self.offset, self.numel)

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        if self.codec == native.CAST:
            return (self.numel * itemsize(self.param[0]),)
        if self.codec == native.BLOCK:
            number, block, scale, _ = self.param
            scale &= 0xFFFF
            blocks, bits = -(-self.numel // block), list(native.FORMAT_BITS.values())[number]
            scales = min(self.numel, 1) * 4 if scale == native.SCALE_MESSAGE else blocks * (4, 8, 1, 2)[scale]
            return scales, blocks * block * bits // 8
        if self.codec == native.ZIP:
            return 16 * min(self.numel, 1), self._zip_bytes
        if self.codec == native.THC:
            block = self.thc_block
            count, ranks = -(-self.numel // block) * block, self.param[0] >> native.THC_RANKS_SHIFT
            top = 15 if self.param[0] & native.THC_UNIFORM else 30
            bits = next(bits for bits in (8, 12, 16) if ranks * top < 1 << bits) if ranks else 4
            return 4 * -(-self.numel // 1024), count * bits // 8
        if self.codec == native.TAHQUANT:
            bits, channels, tile, share = self.param
            tokens = -(-self.numel // channels)
            tiles, coarse = tokens * channels // tile, tokens * share >> 32
            marked = 4 * -(-tokens // 32) * min(coarse, 1)
            return marked, tiles, 2 * tiles, 2 * tiles, (tokens * bits - coarse) * channels // 8
        if self.codec == native.DYNAMIQ:
            flags, lines, *_ = self.param
            groups = -(-self.numel // 256)
            scales = (0 if flags & native.DYNAMIQ_FLAT else 2 * groups), 16 * groups
            return -(-groups // 64) * 24, *scales, 64 * lines
        if self.codec == native.CHUNKED:
            return self._chunked_bytes
        if self.codec == native.ONEBIT:
            return 4 * -(-self.numel // self.param[1]), -(-self.numel // 8)
        bits, group, _ = self.param
        groups = -(-self.numel // group)
        if self.codec == native.QSDP:
            return groups * 4, groups * 4, groups * group * bits // 8
        return groups * 4, groups * group * bits // 8

    @property
    def thc_block(self) -> int:
        return min(self.param[1], max(32, 1 << max(self.numel - 1, 0).bit_length()))

    @property
    def _chunked_bytes(self) -> tuple[int, int, int]:
        bits, chunk, kept, _ = self.param
        positions = codes = 0
        for start in range(0, self.numel, chunk):
            size = min(chunk, self.numel - start)
            k = max(1, kept * size // chunk)
            low = min(range(12, -1, -1), key=lambda low: k * low + (size - 1 >> low))
            positions += -(-(k + (size - 1 >> low)) // 8) + -(-k * low // 8)
            codes += -(-k * bits // 8)
        return 4 * -(-self.numel // chunk), positions, codes

    @property
    def _zip_bytes(self) -> int:
        static = -(-(16 * -(-self.numel // 65536) + 2 * -(-self.numel // 1024)) // 64) * 64
        static += -(-self.numel // 64) * {F32: 216, BF16: 88, F16: 112}[self.param[0]]
        return max(static, self.numel * itemsize(self.param[0]))


def int_case(bits: int, group: int, flags: int, dtype: int = F32, numel: int = 0, **rest: int) -> Case:
    return Case(native.INT, (bits, group, flags), dtype, numel, **rest)


def block_case(
    number: str, block: int, scale: int, flags: int = 0, dtype: int = F32, numel: int = 0, **rest: int
) -> Case:
    return Case(native.BLOCK, (native.FORMATS[number], block, scale, flags), dtype, numel, **rest)


def block_cases() -> Iterator[Case]:
    """Yield every combination of format, block, scale and rotation that the core has."""
    scales = range(native.SCALE_MESSAGE + 1)
    for number, block, scale in itertools.product(native.FORMATS, (32, 64, 128, 256, 512), scales):
        if number != "int8" or scale not in (native.SCALE_E8M0, native.SCALE_BF16):
            yield block_case(number, block, scale)
        if native.FORMAT_BITS[number] == 8 and scale <= native.SCALE_DUAL:
            yield block_case(number, block, scale, native.BLOCK_HADAMARD)
        if scale == native.SCALE_DUAL and block in (64, 512):  # tau 20, epsilon 2^-10
            yield block_case(number, block, scale | 0x41A0 << 16, native.BLOCK_UNLIMITED | 0x3A80 << 16)
        if number != "int8" and scale == native.SCALE_BF16:
            yield block_case(number, block, scale, native.BLOCK_GIVEN)


def cast_case(wire: int, dtype: int = F32, numel: int = 0, **rest: int) -> Case:
    return Case(native.CAST, (wire,), dtype, numel, **rest)


def thc_case(
    flags: int = 0, block: int = 1024, ranks: int = 0, dtype: int = F32, numel: int = 0, signs: int = 77, **rest: int
) -> Case:
    """Return a case with the steps that the default ``clip`` has for blocks of 1024."""
    steps = int(np.float32((15 if flags & native.THC_UNIFORM else 30) / (2.1538746940614564 * 32)).view(np.uint32))
    param = (flags | ranks << native.THC_RANKS_SHIFT, block, steps, signs)
    return Case(native.THC, param, dtype, numel, **rest)


def tah_case(
    bits: int, channels: int, tile: int, share: int = 0, dtype: int = F32, numel: int = 0, **rest: int
) -> Case:
    return Case(native.TAHQUANT, (bits, channels, tile, share), dtype, numel, **rest)


def chunked_case(
    bits: int = 2, chunk: int = 4096, kept: int = 64, factor: float = 0.0, dtype: int = F32, numel: int = 0, **rest: int
) -> Case:
    param = (bits, chunk, kept, int(np.float32(factor).view(np.uint32)))
    return Case(native.CHUNKED, param, dtype, numel, **rest)


def onebit_case(group: int = 1024, dtype: int = F32, numel: int = 0, **rest: int) -> Case:
    return Case(native.ONEBIT, (0, group), dtype, numel, **rest)


def qsdp_case(bits: int = 8, group: int = 1024, flags: int = 0, dtype: int = F32, numel: int = 0, **rest: int) -> Case:
    return Case(native.QSDP, (bits, group, flags), dtype, numel, **rest)


def zip_case(wire: int, choice: int = 0, fixed: int = 0, numel: int = 0, **rest: int) -> Case:
    return Case(native.ZIP, (wire, choice, fixed), rest.pop("dtype", wire), numel, **rest)


def dynamiq_case(
    flags: int = 0,
    place: tuple[int, int] = (0, 1),
    epsilons: tuple[int, int] = (2700, 610),
    numel: int = 0,
    **rest: int,
) -> Case:
    """A case whose super-groups have the bits of ``widths``, and some room more than their codes take."""
    lines = int(widths(numel).sum(dtype=np.int64)) // 2 + 3 * min(numel, 1)
    param = (flags, lines, place[0] | place[1] << 16, epsilons[0] | epsilons[1] << 16)
    return Case(native.DYNAMIQ, param, rest.pop("dtype", F32), numel, **rest)


def widths(numel: int) -> Bytes:
    """Return the bits of each super-group of ``numel`` elements: 2, 4 or 8, in no order."""
    return np.random.default_rng(numel).choice(np.array([2, 4, 8], np.uint8), -(-numel // 256))


# bf16: 1, 0, 3.4e-5, NaN, 768, one below 2^-100, infinity, -1
GIVEN_SCALES = np.array([0x3F80, 0, 0x380F, 0x7FC0, 0x4440, 0x0C80, 0x7F80, 0xBF80], np.uint16)


GIVEN_RMS = np.array([0.9, 3e-5, np.nan, 1e30, 2.0**-101, np.inf, -1.0], np.float32)


class Area:
    """``content`` at a multiple of 64, or ``shift`` bytes past one, with guard bytes on both sides."""

    def __init__(self, content: Bytes, shift: int = 0) -> None:
        self._all = np.full(content.size + 2 * GUARD_BYTES + 64 + shift, GUARD, np.uint8)
        self._begin = GUARD_BYTES + -(self._all.ctypes.data + GUARD_BYTES) % 64 + shift
        self._end = self._begin + content.size
        self.data = self._all[self._begin : self._end]
        self.data[:] = content

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    def guards_hold(self) -> bool:
        return bool((self._all[: self._begin] == GUARD).all() and (self._all[self._end :] == GUARD).all())


class Planes:
    """``count`` messages of a case: all planes of one with gaps between them, then those of the next."""

    def __init__(self, case: Case, count: int) -> None:
        offsets = [0, *itertools.accumulate(-(-nbytes // 16) * 16 + 16 for nbytes in case.plane_bytes)]
        self.area = Area(np.full(offsets[-1] * count, GUARD, np.uint8))
        if case.codec == native.BLOCK and case.param[3] & native.BLOCK_GIVEN:
            scales = np.resize(GIVEN_SCALES, case.plane_bytes[0] // 2)
            for start in range(0, offsets[-1] * count, offsets[-1]):
                self.area.data[start : start + case.plane_bytes[0]] = scales.view(np.uint8)
        if case.codec == native.THC and case.numel:
            for m in range(count):
                given = np.resize(np.roll(GIVEN_RMS, -m), case.plane_bytes[0] // 4).view(np.uint8)
                self.area.data[m * offsets[-1] :][: case.plane_bytes[0]] = given
        self._case, self._starts = case, range(0, offsets[-1] * count, offsets[-1])
        self.place_widths()
        pointers = (ctypes.c_void_p * native.MAX_PLANES)(*(self.area.address + offset for offset in offsets[:-1]))
        self.messages = native.Messages(pointers, offsets[-1], count)

    def place_exponents(self, exponent: int) -> None:
        """Give all f32 scales, which are plane 0, this exponent."""
        for start in self._starts:
            words = self.area.data[start : start + self._case.plane_bytes[0]].view(np.uint32)
            words[:] = (words & 0x807FFFFF) | exponent << 23

    def place_widths(self) -> None:
        """Write the planes that an encoder finds in place, and no decoder takes any bytes for."""
        if self._case.codec == native.DYNAMIQ:
            bits = widths(self._case.numel)
            for start in self._starts:
                native.cpu().fl_dynamiq_widths(bits.ctypes.data, bits.size, self.area.address + start)


@lru_cache(maxsize=1024)
def values(seed: int, dtype: int, numel: int) -> Bytes:
    """Return ``numel`` elements of all magnitudes; every 32 or more are of one kind, finite and ordinary most often.

    They are made once, since numpy makes others where the thread flushes subnormals.
    """
    rng = np.random.default_rng([seed, dtype, numel])
    runs = numel // 32 + 1
    kinds, scales = (np.repeat(v, 32)[:numel] for v in (rng.integers(0, 24, runs), rng.integers(-40, 41, runs)))
    with np.errstate(over="ignore", invalid="ignore"):
        ordinary = rng.standard_normal(numel).astype(np.float32)
        v = np.where(rng.random(numel) < 0.9, ordinary, np.ldexp(ordinary, scales)).astype(np.float32)
        for kind, factor in enumerate((0.0, -0.0, 1e-42, 2.0**-101, 2.0**-100, 1e38, 3e40)):
            v = np.where(kinds == kind, v.astype(np.float64) * factor, v).astype(np.float32)
    v[kinds == 7] = np.float32(0.1)
    bits = v.view(np.uint32)
    bits[kinds == 8] = rng.integers(0, 2**32, numel, np.uint32)[kinds == 8]
    odd = (kinds == 9) & (rng.random(numel) < 0.05)
    bits[odd] = rng.choice(np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001], np.uint32), odd.sum())
    if dtype == F32:
        return v.view(np.uint8)
    if dtype == BF16:
        return (bits >> 16).astype(np.uint16).view(np.uint8)
    with np.errstate(over="ignore"):
        halves = v.astype(np.float16)
    raw = rng.integers(0, 2**16, numel, np.uint16)
    return np.where(kinds == 8, raw, halves.view(np.uint16)).view(np.uint8)


@dataclass(frozen=True)
class Run:
    """The verbs of one library on buffers that a case determines, so that two libraries get equal ones."""

    library: ctypes.CDLL
    case: Case
    encoder: ctypes.CDLL
    """Makes the messages that are decoded."""
    garbage: bool = False
    """Decode random bytes instead."""
    exponent: int | None = None
    """With garbage: that of all f32 scales, whose other bits are random."""

    def encode(self, *, residual: bool) -> list[Bytes]:
        x, out, kept = self._values(1), self._planes(), self._residual(residual, self.case.count)
        return self._call("fl_encode", [x, kept, out])

    def decode(self) -> list[Bytes]:
        out = self._area(np.full(self._nbytes(self.case.count), 0x77, np.uint8))
        return self._call("fl_decode", [self._encoded(), out])

    def decode_sum(self, *, add: bool) -> list[Bytes]:
        return self._call("fl_decode_sum", [self._encoded(), self._values(2, 1)], int(add))

    def recode(self, *, x: bool, residual: bool) -> list[Bytes]:
        added = self._values(3, 1) if x else None
        return self._call("fl_recode", [self._encoded(), added, self._residual(residual, 1), self._planes(1)])

    def _nbytes(self, count: int) -> int:
        return self.case.numel * count * itemsize(self.case.dtype)

    def _area(self, content: Bytes, dtype: int | None = None) -> Area:
        shift = itemsize(self.case.dtype if dtype is None else dtype)
        return Area(content, shift if self.case.misaligned else 0)

    def _values(self, seed: int, count: int | None = None) -> Area:
        count = self.case.count if count is None else count
        return self._area(values(seed, self.case.dtype, self.case.numel * count))

    def _residual(self, wanted: bool, count: int) -> Area | None:
        return self._area(values(9, F32, self.case.numel * count), F32) if wanted else None

    def _planes(self, count: int | None = None) -> Planes:
        return Planes(self.case, self.case.count if count is None else count)

    def _encoded(self) -> Planes:
        planes = self._planes()
        if self.garbage or (self.case.codec == native.THC and self.case.param[0] >> native.THC_RANKS_SHIFT):
            planes.area.data[:] = np.random.default_rng(5).integers(0, 256, planes.area.data.size, np.uint8)
            planes.place_widths()
            if self.exponent is not None:
                planes.place_exponents(self.exponent)
        else:
            source = replace(self.case, dtype=self.case.param[0]) if self.case.codec == native.ZIP else self.case
            x = replace(self, case=source)._values(4)
            spec, out = ctypes.byref(source.spec), ctypes.byref(planes.messages)
            assert self.encoder.fl_encode(spec, x.address, None, out, None) == OK
        return planes

    def _call(self, verb: str, buffers: list[Area | Planes | None], *options: int) -> list[Bytes]:
        spec = self.case.spec
        arguments = [
            ctypes.byref(b.messages) if isinstance(b, Planes) else None if b is None else b.address for b in buffers
        ]
        status = getattr(self.library, verb)(ctypes.byref(spec), *arguments, *options, None)
        assert status == OK, f"{verb} of {self.case} gave status {status}"
        areas = [b.area if isinstance(b, Planes) else b for b in buffers if b is not None]
        assert all(area.guards_hold() for area in areas), f"{verb} of {self.case} wrote outside its buffers"
        return [area.data for area in areas]


VERBS: tuple[tuple[str, dict[str, bool]], ...] = (
    ("encode", {"residual": False}),
    ("encode", {"residual": True}),
    ("decode", {}),
    ("decode_sum", {"add": False}),
    ("decode_sum", {"add": True}),
    ("recode", {"x": True, "residual": True}),
    ("recode", {"x": False, "residual": False}),
)


def verbs_of(case: Case) -> tuple[tuple[str, dict[str, bool]], ...]:
    """Return those of ``VERBS`` that the case's codec has."""
    if case.codec == native.THC:
        ranks = case.param[0] >> native.THC_RANKS_SHIFT
        lacking = {"recode", "encode"} if ranks else {"recode"}
        return tuple((verb, options) for verb, options in VERBS if verb not in lacking)
    if case.codec == native.TAHQUANT and case.plane_bytes[0]:
        return tuple((verb, options) for verb, options in VERBS if verb != "recode")
    if case.codec != native.ZIP:
        return VERBS
    lacking = {"recode", *(["encode"] if case.dtype != case.param[0] else [])}
    return tuple((verb, options) for verb, options in VERBS if verb not in lacking and not options.get("residual"))


def results(
    library: ctypes.CDLL, case: Case, encoder: ctypes.CDLL, garbage: bool = False, exponent: int | None = None
) -> Iterator[list[Bytes]]:
    """Yield the bytes of all buffers of each verb that the case's codec has."""
    for verb, options in verbs_of(case):
        yield getattr(Run(library, case, encoder, garbage, exponent), verb)(**options)


EXPONENTS = (127, 0, 1, 8, 9, 10, 11, 12, 100, 244, 248, 252, 253, 254)
"""Of scales that hostile messages have: usual, subnormal, about where the smallest and the largest are refused."""


def hostile_cases() -> Iterator[tuple[Case, int]]:
    """Yield messages of arbitrary bytes with scales of one exponent, so that every sum of them rounds."""
    for exponent in EXPONENTS:
        for i, (bits, flags) in enumerate(itertools.product((2, 3, 4, 8), (0, HADAMARD))):
            yield int_case(bits, (128, 32, 64)[i % 3], flags, i % 3, 600, count=5), exponent
        for i, (number, flags) in enumerate(itertools.product(native.FORMATS, (0, native.BLOCK_HADAMARD))):
            for scale in (native.SCALE_F32, native.SCALE_DUAL, native.SCALE_MESSAGE):
                if flags == 0 or (native.FORMAT_BITS[number] == 8 and scale <= native.SCALE_DUAL):
                    yield block_case(number, (32, 256)[i % 2], scale, flags, i % 3, 600, count=5), exponent


def assert_same(got: Iterable[list[Bytes]], want: Iterable[list[Bytes]], case: Case) -> None:
    """Assert that two ``results`` of ``case`` are equal byte for byte."""
    for (verb, options), one, other in zip(verbs_of(case), got, want, strict=True):
        for g, w in zip(one, other, strict=True):
            if not np.array_equal(g, w):
                different = np.flatnonzero(g != w)
                raise AssertionError(f"{verb}{options} of {case}: {different.size} bytes, first at {different[0]}")
