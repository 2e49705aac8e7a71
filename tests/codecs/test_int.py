from itertools import combinations, product

import numpy as np
import torch
from numpy.typing import NDArray

from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs.quantized.integer import FullRangeInt, Int
from tests.loops import looped
from tests.synthetic import awkward, noise

from . import int_reference as reference
from .arithmetic import halves
from .conformance import DTYPES, decoded, encoded, planes, same_bits

VARIANTS = [
    Int(bits, group, hadamard, rounding, header=False)
    for bits, group, hadamard, rounding in product(
        (8, 4, 3, 2), (32, 128, 4096), (False, True), ("nearest", "stochastic")
    )
]
VARIANTS += [FullRangeInt(bits, group, header=False) for bits, group in product((8, 4), (32, 128, 4096))]
LONG_AGO = (1 << 32) - 8192  # elements from here on have numbers above and below 2^32


@looped("dtype", DTYPES)
@looped("codec", VARIANTS)
def test_bytes_are_those_of_the_reference(codec: Int, dtype: torch.dtype) -> None:
    group = codec.group_size
    for n, seed, offset in ((1, 0, 0), (31, 1, group), (group + 7, 2**64 - 1, 0), (8 * group + 33, 5, LONG_AGO)):
        x = awkward(n, group, dtype)
        payload = encoded(codec, x, seed=seed, offset=offset)
        scales, codes = reference.encode(codec, x.float().numpy(), seed, offset)
        given = [plane.numpy().tobytes() for plane in planes(codec, payload, n, dtype)]
        assert given == [scales.tobytes(), codes.tobytes()]
        for message in (payload, noise(payload.numel(), n)):
            wire = [view.numpy() for view in codec.wire(n, dtype).views(message)]
            out = decoded(codec, message, n, dtype, torch.float32)
            expected = torch.from_numpy(reference.decode(codec, wire[0], wire[1], n))
            assert torch.equal(out.isnan(), expected.isnan())
            assert same_bits(out.nan_to_num(1.0, 2.0, 3.0), expected.nan_to_num(1.0, 2.0, 3.0))


def test_known_answers() -> None:
    x = torch.arange(-8.0, 8.0)
    narrow = decoded(Int(4, 32), encoded(Int(4, 32), x), 16, torch.float32)
    scale = 37450 / 2**15  # the least number of 16 bits from 8 / 7 on
    assert torch.equal(narrow, (x / scale).round() * scale)
    assert (narrow - x).abs().max().item() == 4 - 3 * scale
    whole = torch.arange(-127.0, 128.0)
    assert torch.equal(decoded(Int(8, 256), encoded(Int(8, 256), whole), 255, torch.float32), whole)


def test_known_answers_of_the_full_range() -> None:
    """As ZeRO++ has it: scale 16 / (2 max), limited to -8 .. 7. A largest magnitude that is positive saturates."""
    for bits, group, most in ((4, 32, 8), (8, 512, 128)):
        codec, x = FullRangeInt(bits, group), torch.arange(-most, most + 1.0)
        assert torch.equal(decoded(codec, encoded(codec, x), len(x), torch.float32), x.clamp(max=most - 1))


def test_known_answers_of_levels_beside_zero() -> None:
    """The step is 1 where the largest magnitude is the span. Ties go to the even code: 1/2, -3/2, 5/2, -7/2."""
    two = {2.375: 1.5, 1.1: 1.5, 1.0: 0.5, 0.9: 0.5, 0.0: 0.5, -0.1: -0.5, -0.9: -0.5, -1.0: -1.5, -2.375: -1.5}
    three = {4.15625: 3.5, 3.1: 3.5, 3.0: 2.5, 2.9: 2.5, 0.0: 0.5, -0.1: -0.5, -1.0: -1.5, -2.9: -2.5, -4.15625: -3.5}
    for bits, answers in ((2, two), (3, three)):
        x = torch.tensor(list(answers))
        assert decoded(Int(bits, 32), encoded(Int(bits, 32), x), len(x), torch.float32).tolist() == [*answers.values()]


def test_planes_of_nothing_are_zeros_and_of_broken_groups_canonical() -> None:
    for codec in VARIANTS:
        n = 3 * codec.group_size
        tiny = torch.full((n,), 2.0**-110)
        assert not codec.compress(torch.zeros(n), seed=3).any()
        assert not codec.compress(tiny, seed=3).any()
        tiny[codec.group_size] = float("-inf")
        scales, codes = codec.wire(n).views(codec.compress(tiny, seed=3))
        assert scales.view(torch.int32).tolist() == [0, 0x7FC00000, 0]
        assert not codes.any()


# ---- stochastic rounding --------------------------------------------------------------------------------------------

COUNT = 1 << 18
Noise = NDArray[np.int64]


def excess(cells: Noise, count: int) -> float:
    """Return how far ``cells`` are from hitting each of ``count`` numbers equally often, in standard deviations."""
    expected = len(cells) / count
    chi2 = float(((np.bincount(cells, minlength=count) - expected) ** 2).sum() / expected)
    return abs(chi2 - (count - 1)) / (2 * (count - 1)) ** 0.5


def dependence(a: Noise, b: Noise) -> float:
    """Return how far pairs of ``a`` and ``b`` are from uniform on the square, in standard deviations."""
    return excess((a >> 11) * 32 + (b >> 11), 1024)


def test_noise_is_uniform_and_independent_over_elements_seeds_and_ranks() -> None:
    """The reference's noise, which is the core's: its bytes are compared above."""
    seeds = [0, 1, 1 << 32, (1 << 64) - 1, *(derive_seed(step, rank, 0) for step in range(2) for rank in range(3))]
    streams = [halves(seed, first, COUNT) for seed in seeds for first in (0, 1 << 40)]
    streams += [halves(5, high << 32, COUNT) for high in (0, 1, 2, 1000)]
    for v in streams:
        assert abs(v.mean() - 32767.5) < 5 * 65536 / (12 * COUNT) ** 0.5
        assert excess(v >> 6, 1024) < 5 and excess(v & 255, 256) < 5, "high bits, low bits"
        a, b = (half.reshape(-1) for half in np.moveaxis(v.reshape(-1, 2, 16), 1, 0))
        assert dependence(a, b) < 5, "of the two elements that share a number"
        for shift in (1, 3, 5):  # low bits of one, high bits of the other
            low, other = (half << shift + 5 & 65535 for half in (a, b))
            assert max(dependence(low, b), dependence(low, other), dependence(a, other)) < 5
    for v, lag in product(streams[:4], (1, 2, 16, 31, 32, 64, 128, 4096, 65536)):
        assert dependence(v[:-lag], v[lag:]) < 5, lag
    for a, b in combinations([*streams[:20:2], *streams[20:]], 2):
        assert dependence(a, b) < 5 and abs(np.corrcoef(a, b)[0, 1]) < 5 / COUNT**0.5


@looped("bits, top", [(2, 1.5), (3, 3.5), (4, 7), (8, 127)])
def test_stochastic_rounding_goes_to_the_neighbours_without_bias(bits: int, top: float) -> None:
    codec, below = Int(bits, 128, rounding="stochastic", header=False), 0.5 if bits < 4 else 0
    for value in (0.1, 0.25, 0.5, 0.9, -0.3, min(2.7, top - 0.2), top - 0.4):
        x = torch.full((COUNT,), value)
        x[::128] = top  # the scale of every group is 1
        rounded = decoded(codec, encoded(codec, x, seed=11), COUNT, x.dtype).view(-1, 128)[:, 1:].double()
        lower = np.floor(value - below) + below
        fraction = value - lower
        assert set(rounded.unique().tolist()) == ({lower, lower + 1} if fraction else {lower})
        assert abs(float(rounded.mean()) - value) <= 5 * (fraction * (1 - fraction) / rounded.numel()) ** 0.5
    # Over all that an element may draw the mean is the value, but for the units that are counted.
    every = np.arange(65536)
    for exact in (*np.linspace(-top, top, 101), -0.3, 2.0**-16, 2.0**-17, top * (1 - 2.0**-23)):
        parts = int(np.rint(np.float32(exact) * 65536))
        codes = parts + every - int(below * 65536) >> 16  # as ``reference.encode``
        assert abs(codes.mean() + below - float(np.float32(exact))) <= 2.0**-17


def test_noise_never_leaves_the_range() -> None:
    """No magnitude goes beyond the outermost level, with the least and the largest noise, whatever its scale became."""
    drawn, rng = halves(7, 0, 1 << 20), np.random.default_rng(2)
    largest = [1.0, 1 - 2.0**-23, 2.0**-100, *(rng.random(40) + 1), *7 * rng.integers(1 << 15, 1 << 16, 40)]
    for extreme, (bits, top) in product((0, 65535), ((2, 1.5), (3, 3.5), (4, 7), (8, 127))):
        place = int(np.flatnonzero(drawn == extreme)[0]) // 128 * 128
        codec = Int(bits, 128, rounding="stochastic", header=False)
        for each in largest:
            x = torch.tensor([each, -each], dtype=torch.float32).repeat(64)
            payload = encoded(codec, x, seed=7, offset=place)
            steps = decoded(codec, payload, 128, x.dtype) / codec.wire(128).views(payload)[0] / (1 if bits >= 4 else 2)
            assert steps.abs().max() <= top and ((steps - x.sign() * top).abs() <= 1).all()
