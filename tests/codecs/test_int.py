from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs.quantized.integer import FullRangeInt, Int
from tests.loops import looped
from tests.synthetic import awkward, gradient

from . import int_reference as reference
from .conformance import DTYPES, decoded, encoded, planes, same_bits

pytestmark = pytest.mark.short

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
        out = decoded(codec, payload, n, dtype, torch.float32)
        expected = torch.from_numpy(reference.decode(codec, scales, codes, n))
        assert torch.equal(out.isnan(), expected.isnan())
        assert same_bits(out.nan_to_num(1.0), expected.nan_to_num(1.0))


@looped("codec", VARIANTS, ids=str)
def test_error_is_half_a_step_or_below_a_step(codec: Int) -> None:
    n = 4 * codec.group_size
    x = gradient(n, 61)
    payload = encoded(codec, x, seed=2)
    scales = codec.wire(n).views(payload)[0].double().repeat_interleave(codec.group_size)
    domain = reference.hadamard32 if codec.hadamard else np.asarray
    before, after = (torch.from_numpy(domain(v.double().numpy())) for v in (x, decoded(codec, payload, n, x.dtype)))
    units, span, top = reference.sizes(codec)
    steps = scales * (units / span)
    error = (before - after).abs() / steps
    beyond = before.abs() / steps - top  # the outermost level
    bound = 0.5 if codec.rounding == "nearest" else 1.0
    assert (error <= beyond.clamp(min=bound) * (1 + 1e-4)).all()
    assert error.max() > 0.45


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
    x = torch.arange(-8.0, 9.0)
    expected = x.clamp(max=7)
    assert torch.equal(decoded(FullRangeInt(4, 32), encoded(FullRangeInt(4, 32), x), 17, torch.float32), expected)
    whole = torch.arange(-128.0, 129.0)
    got = decoded(FullRangeInt(8, 512), encoded(FullRangeInt(8, 512), whole), 257, torch.float32)
    assert torch.equal(got, whole.clamp(max=127))
    for options in ({"hadamard": True}, {"rounding": "stochastic"}, {"bits": 2}):
        with pytest.raises(ConfigError, match="full range is for 4 or 8 bits"):
            codecs.get("int_full", **options)
        with pytest.raises(ConfigError, match="full range"):
            codecs.get("qgz", **options)


def test_known_answers_of_levels_beside_zero() -> None:
    """The step is 1 where the largest magnitude is the span. Ties go to the even code: 1/2, -3/2, 5/2, -7/2."""
    two = {2.375: 1.5, 1.1: 1.5, 1.0: 0.5, 0.9: 0.5, 0.0: 0.5, -0.1: -0.5, -0.9: -0.5, -1.0: -1.5, -2.375: -1.5}
    three = {4.15625: 3.5, 3.1: 3.5, 3.0: 2.5, 2.9: 2.5, 0.0: 0.5, -0.1: -0.5, -1.0: -1.5, -2.9: -2.5, -4.15625: -3.5}
    for bits, answers in ((2, two), (3, three)):
        x = torch.tensor(list(answers))
        assert decoded(Int(bits, 32), encoded(Int(bits, 32), x), len(x), torch.float32).tolist() == [*answers.values()]


@looped("bits, bound", [(2, 0.125), (3, 0.04)])
@looped("group", [32, 128, 512, 4096])
def test_few_bits_lose_no_more_than_the_best_even_levels(bits: int, bound: float, group: int) -> None:
    """Of normal values, whatever the group: the best levels at even distances lose 0.119 and 0.037 of the energy."""
    x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(bits))
    codec = Int(bits, group)
    lost = (codec.decompress(codec.compress(x), x.shape) - x).square().sum() / x.square().sum()
    assert lost < bound


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


def test_a_scale_that_is_not_finite_makes_a_group_of_nan() -> None:
    codec = Int(8, 32, header=False)
    payload = codec.compress(torch.full((64,), 127.0))
    for scale in (float("inf"), float("-inf"), float("nan")):
        codec.wire(64).views(payload)[0][0] = scale
        out = codec.decompress(payload, 64)
        assert out[:32].isnan().all() and (out[32:] == 127).all()


def test_outliers_are_spread_by_the_rotation() -> None:
    x = gradient(1 << 14, 62)
    x[::64] *= 60
    plain, rotated = (codecs.get("int4", hadamard=flag) for flag in (False, True))
    error = [(codec.decompress(codec.compress(x), x.shape) - x).square().sum().item() for codec in (plain, rotated)]
    assert error[1] < 0.7 * error[0]


def test_bits_per_element_are_as_documented() -> None:
    for codec in VARIANTS:
        n = codec.group_size * 1024
        used = sum(section.plane.nbytes for section in codec.wire(n).sections)
        assert used * 8 == n * codec.bits + 32 * n // codec.group_size


@looped(
    "options",
    [
        {"bits": 5},
        {"bits": 1},
        {"bits": "8"},
        {"bits": 8.0},
        {"group_size": 48},
        {"group_size": 16},
        {"group_size": 128.0},
        {"hadamard": 1},
        {"rounding": "up"},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        codecs.get("int", **options)


def test_noise_is_uniform_and_independent_over_elements_seeds_and_ranks() -> None:
    """The reference's noise, which is the core's: its bytes are compared above."""
    count = 1 << 18
    seeds = [derive_seed(step, rank, 0) for step in range(2) for rank in range(3)]
    streams = [((reference.halves(seed, 0, count) + 0.5) / 65536 - 0.5).astype(np.float32) for seed in seeds]
    limit = 5 / count**0.5
    for noise in streams:
        assert noise.min() >= -0.5 and noise.max() < 0.5
        assert abs(noise.mean(dtype=np.float64)) < limit * 12**-0.5
        assert np.histogram(noise, 256)[0].std() < 1.2 * (count / 256) ** 0.5
    shifted = [(noise, np.roll(noise, lag)) for noise in streams[:2] for lag in (*range(1, 33), 64, 128, 256, 4096)]
    for a, b in [*shifted, *combinations(streams, 2)]:
        for power in (1, 2):
            assert abs(np.corrcoef(a**power, b**power)[0, 1]) < limit
