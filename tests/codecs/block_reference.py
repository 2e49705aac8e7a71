"""The codecs of small numbers in blocks written down a second time, in numpy, from tables of all values of a format."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fusionlayer.codecs import Codec
from fusionlayer.codecs.quantized.fp8 import FP8, FP8Block
from fusionlayer.codecs.quantized.mx import MXFP4, MXFP6, MXFP8
from fusionlayer.codecs.research.taco import Taco

from .arithmetic import hadamard, pack_runs, unpack_runs
from .int_reference import cut, short_scales

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

EXPONENT_AND_MANTISSA = {"e4m3": (4, 3), "e5m2": (5, 2), "e2m3": (2, 3), "e3m2": (3, 2), "e2m1": (2, 1)}
TINY = np.float32(2.0**-100)


@dataclass(frozen=True)
class Layout:
    """What the options of a codec come to."""

    format: str
    block: int
    scale: str
    rotated: bool = False
    tau: np.float32 = np.float32(448)
    epsilon: np.float32 = np.float32(1e-6)
    limits: tuple[float, float] = (1e-3, 1e3)


def layout(codec: Codec) -> Layout:
    if isinstance(codec, Taco):
        tau, epsilon = as_sent(codec.tau, 448), as_sent(codec.epsilon, 1e-6)
        limits = (1e-3, 1e3) if codec.limited else (0.0, np.inf)
        return Layout(codec.format, codec.block_size, codec.scales, codec.hadamard, tau, epsilon, limits)
    if isinstance(codec, FP8Block):
        return Layout(codec.format, codec.block_size, "folded")
    if isinstance(codec, FP8):
        return Layout(codec.format, 32, "message")
    assert isinstance(codec, MXFP8 | MXFP6 | MXFP4)
    return Layout("e2m1" if isinstance(codec, MXFP4) else codec.format, 32, codec.scale)


def as_sent(value: float, default: float) -> np.float32:
    """Return ``value`` rounded to bf16, ties up; the default is exact."""
    bits = np.float32(value).view(np.uint32)
    return np.float32(value) if value == default else np.uint32((int(bits) + 0x8000) & 0xFFFF0000).view(np.float32)


@lru_cache
def magnitudes(name: str) -> F32:
    """Return the value of every magnitude code of a float format, by its definition; NaN and Inf where it has them."""
    exponent_bits, mantissa_bits = EXPONENT_AND_MANTISSA[name]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            values.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    if name == "e4m3":
        values[-1] = np.nan
    if name == "e5m2":
        values[-4:] = [np.inf, np.nan, np.nan, np.nan]
    return np.array(values, np.float32)


def bits_of(name: str) -> int:
    return 8 if name == "int8" else 1 + sum(EXPONENT_AND_MANTISSA[name])


def largest(name: str) -> np.float32:
    return np.float32(127) if name == "int8" else np.float32(np.max(finite(name)))


def bound(name: str) -> np.float32:
    """Return the largest finite magnitude of any code; -128 is in no message that was encoded."""
    return np.float32(128) if name == "int8" else largest(name)


def finite(name: str) -> F32:
    table = magnitudes(name)
    return table[np.isfinite(table)]


def nearest_codes(name: str, v: F32) -> Bytes:
    """Return the code of the nearest value, the even one of two: found among all of them."""
    if name == "int8":
        return np.rint(v).astype(np.int8).view(np.uint8)
    table = finite(name).astype(np.float64)
    a = np.minimum(np.abs(v.astype(np.float64)), table[-1])
    low = np.clip(np.searchsorted(table, a, side="right") - 1, 0, len(table) - 2)
    below, above = a - table[low], table[low + 1] - a
    code = low + ((above < below) | ((above == below) & (low % 2 == 1)))
    return (code + (np.signbit(v).astype(np.int64) << (bits_of(name) - 1))).astype(np.uint8)


def values_of(name: str, codes: Bytes) -> F32:
    if name == "int8":
        return codes.view(np.int8).astype(np.float32)
    sign = codes >> (bits_of(name) - 1) & 1
    value = magnitudes(name)[codes & (2 ** (bits_of(name) - 1) - 1)]
    return np.where(sign == 1, -value, value).astype(np.float32)


def sum_of_pairs(v: F32) -> F32:
    """Return the sum of every row: of neighbours, then of neighbouring sums, and so on."""
    while v.shape[1] > 1:
        v = v[:, 0::2] + v[:, 1::2]
    return v[:, 0]


def encode(codec: Codec, x: F32) -> tuple[Bytes, Bytes]:
    """Return the bytes of the planes (scales, codes) of ``x`` (n,)."""
    form = layout(codec)
    blocks = -(-len(x) // form.block)
    v = np.zeros(blocks * form.block, np.float32)
    v[: len(x)] = x
    v = v.reshape(blocks, form.block)
    with np.errstate(all="ignore"):
        if form.rotated:
            v = hadamard(v)
        groups = v.reshape(1, -1) if form.scale == "message" else v
        amax = np.abs(groups).max(axis=1, initial=0)
        broken = ~np.isfinite(groups).all(axis=1)
        scales, inverse, broken = make_scales(form, groups, amax, broken)
        if form.scale == "dual":
            groups = groups * (scales[:, 1] * root(form))[:, None]
        dead = broken | (amax < TINY)
        codes = nearest_codes(form.format, np.where(dead[:, None], np.float32(0), groups) * inverse[:, None])
    codes[dead] = 0
    return scales.reshape(-1).view(np.uint8), pack_runs(codes, bits_of(form.format))


def make_scales(
    form: Layout, v: F32, amax: F32, broken: NDArray[np.bool_]
) -> tuple[NDArray[np.generic], F32, NDArray[np.bool_]]:
    """Return the scales as they travel, what values are multiplied by, and which blocks are not finite."""
    tiny, top, nan = amax < TINY, largest(form.format), np.uint32(0x7FC00000).view(np.float32)
    if form.scale in ("folded", "message", "bf16"):
        scale = short_scales(amax, top, 16 if form.scale == "bf16" else 8)
        broken = broken | ~np.isfinite(scale * bound(form.format))
        inverse = np.float32(1) / scale
        wire = np.where(broken, nan, np.where(tiny, np.float32(0), scale)).astype(np.float32)
        if form.scale == "message":
            wire = np.where(broken, nan, amax).astype(np.float32)
        return (wire.view(np.uint32) >> 16).astype(np.uint16) if form.scale == "bf16" else wire, inverse, broken
    if form.scale == "e8m0":
        power = np.frexp(amax)[1] - 1 - (np.frexp(top)[1] - 1)
        code = np.where(broken, 255, np.where(tiny, 0, power + 127)).astype(np.uint8)
        return code, np.ldexp(np.float32(1), -power).astype(np.float32), broken
    size = np.float32(form.block)
    mean, unrotated = np.float32(1) / size, (np.float32(1) / size if form.rotated else np.float32(1))
    energy = sum_of_pairs(v * v) * mean * unrotated
    alpha = np.clip(form.tau / np.sqrt(energy + form.epsilon), *np.float32(form.limits))
    most = amax * (alpha * root(form))
    broken = broken | ~(alpha > 0) | ~np.isfinite(most)
    alpha = np.where(broken, nan, alpha).astype(np.float32)
    short = short_scales(most.astype(np.float32), top, 8)
    s = np.where(broken, nan, np.where(tiny, np.float32(0), short))
    return np.stack([s, alpha], axis=1).astype(np.float32), np.float32(1) / short, broken


def root(form: Layout) -> np.float32:
    return np.float32(form.block**-0.5) if form.rotated else np.float32(1)


def decode(codec: Codec, scales: Bytes, codes: Bytes, numel: int) -> F32:
    """Return the (numel,) values of the planes' bytes."""
    v = summands(codec, scales, codes)
    with np.errstate(all="ignore"):
        return (hadamard(v) if layout(codec).rotated else v).reshape(-1)[:numel]


def summands(codec: Codec, scales: Bytes, codes: Bytes) -> F32:
    """Return what a sum adds of the planes' bytes, block by block; it is rotated back as a whole."""
    form = layout(codec)
    v = values_of(form.format, unpack_runs(codes, bits_of(form.format)).astype(np.uint8)).reshape(-1, form.block)
    with np.errstate(all="ignore"):
        return v * decoded_scales(form, scales, len(v))[:, None]


def decoded_scales(form: Layout, wire: Bytes, blocks: int) -> F32:
    """Return what the values of each block are multiplied by."""
    if form.scale == "e8m0":
        scale = np.where(wire == 255, np.nan, np.ldexp(1.0, wire.astype(np.int64) - 127)).astype(np.float32)
    elif form.scale == "bf16":
        scale = (wire.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif form.scale == "message":
        amax = np.abs(wire.view(np.float32))
        scale = np.where(amax < TINY, np.float32(0), short_scales(amax, largest(form.format), 8))
        scale = np.repeat(np.where(np.isfinite(amax), scale, np.float32(np.nan)), blocks)
    elif form.scale == "dual":
        s, alpha = wire.view(np.float32).reshape(-1, 2).T
        scale = s / alpha * root(form)
    else:
        scale = wire.view(np.float32) * np.float32(1 / form.block if form.rotated else 1)
    scale = cut(scale.astype(np.float32), 8)
    if form.scale != "e8m0":
        least = 2.0**-125 if form.rotated and form.format != "e5m2" else 2.0**-117
        scale = np.where(np.abs(scale) < least, np.float32(0), scale)
    return np.where(np.isfinite(scale * bound(form.format)), scale, np.float32(np.nan)).astype(np.float32)
