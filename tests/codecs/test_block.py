"""``taco``, ``fp8``, ``fp8_block`` and the MX codecs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, native
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs import Codec
from fusionlayer.codecs.quantized.fp8 import FP8, FP8Block
from fusionlayer.codecs.quantized.mx import MXFP4, MXFP6, MXFP8
from fusionlayer.codecs.research.taco import Taco
from tests.loops import looped
from tests.samples import gaussian, tensor_parallel
from tests.synthetic import awkward, bit_patterns, gradient, noise

from . import block_reference as reference
from .conformance import DTYPES, decoded, encoded, planes, same_bits, vnmse
from .int_reference import short_scales
from .test_isa import available

pytestmark = pytest.mark.short

TACO = [
    Taco(number, block, hadamard, scales, header=False)
    for number, block, hadamard, scales in product(
        ("e4m3", "e5m2", "int8"), (32, 64, 128, 256, 512), (False, True), ("folded", "dual")
    )
]
TACO += [
    Taco("e4m3", 64, scales="dual", tau=20.0, epsilon=2.0**-10, limited=False, header=False),
    Taco("int8", 256, scales="dual", tau=100.3, epsilon=3e-5, header=False),
]
FP8S = [FP8Block(number, block, header=False) for number in ("e4m3", "e5m2") for block in (32, 128, 512)]
TENSOR = [FP8(number, header=False) for number in ("e4m3", "e5m2")]
MX: list[Codec] = [
    *(MXFP8(number, scale, header=False) for number in ("e4m3", "e5m2") for scale in ("e8m0", "bf16")),
    *(MXFP6(number, scale, header=False) for number in ("e2m3", "e3m2") for scale in ("e8m0", "bf16")),
    *(MXFP4(scale, header=False) for scale in ("e8m0", "bf16")),
]
STANDARD = [codec for codec in MX if codec.options["scale"] == "e8m0"]
EVERY: list[Codec] = [*TACO, *FP8S, *TENSOR, *MX]


def message(codec: Codec, scales: np.ndarray, codes: np.ndarray, numel: int) -> Tensor:
    """Return a payload of the given scales and codes, a byte each."""
    form = reference.layout(codec)
    payload = torch.zeros(codec.wire(numel).capacity, dtype=torch.uint8)
    filled = planes(codec, payload, numel, torch.float32)
    for plane, data in zip(filled, (scales, reference.pack(form.format, codes)), strict=True):
        plane.copy_(torch.from_numpy(data.view(np.uint8)))
    return payload


@looped("dtype", DTYPES)
@looped("codec", EVERY, ids=str)
def test_bytes_are_those_of_the_reference(codec: Codec, dtype: torch.dtype) -> None:
    for n in (1, 31, codec.block + 7, 8 * codec.block + 33):
        x = awkward(n, codec.block, dtype)
        payload = encoded(codec, x)
        scales, codes = reference.encode(codec, x.float().numpy())
        given = [plane.numpy().tobytes() for plane in planes(codec, payload, n, dtype)]
        assert given == [scales.tobytes(), codes.tobytes()]
        out = decoded(codec, payload, n, dtype, torch.float32)
        expected = torch.from_numpy(reference.decode(codec, scales, codes, n))
        assert torch.equal(out.isnan(), expected.isnan())
        assert same_bits(out.nan_to_num(1.0), expected.nan_to_num(1.0))


@looped("codec", [*TACO[:4], *FP8S, *TENSOR, *MX], ids=str)
def test_any_message_is_decoded_as_by_the_reference(codec: Codec) -> None:
    n = 40 * codec.block
    for stream in range(4):
        payload = noise(codec.wire(n).capacity, stream)
        scales, codes = (plane.numpy() for plane in planes(codec, payload, n, torch.float32))
        out, expected = codec.decompress(payload, n), torch.from_numpy(reference.decode(codec, scales, codes, n))
        assert torch.equal(out.isnan(), expected.isnan())
        assert same_bits(out.nan_to_num(1.0, 2.0, 3.0), expected.nan_to_num(1.0, 2.0, 3.0))


OWN_NANS = [codec for codec in (*TACO[:10], *FP8S, *TENSOR, *MX) if codec.options.get("format") == "e4m3"]


@looped("codec", OWN_NANS, ids=str)
@looped("place", [0, 1029, 3007])
@looped("which", [0, 9])
def test_a_nan_among_codes_reaches_the_sum(codec: Codec, place: int, which: int) -> None:
    """No encoder writes one, and sums look for it beforehand. They read eight messages side by side."""
    n = 3008
    payloads = torch.stack([encoded(codec, gradient(n, stream, torch.float32)) for stream in range(11)])
    planes(codec, payloads[which], n, torch.float32)[-1][place] = 0x7F if which else 0xFF
    total = torch.zeros(n)
    for payload in payloads:
        total += codec.decompress(payload, n)
    try:
        for isa in available():
            out = torch.empty(n)
            native.select_isa(isa)
            codec.decode_sum(payloads, out)
            assert out[place].isnan() and torch.equal(out.isnan(), total.isnan()), isa
            torch.testing.assert_close(out, total, rtol=1e-5, atol=1e-5, equal_nan=True)
    finally:
        native.select_isa("auto")


@looped("codec", STANDARD, ids=str)
def test_every_code_under_every_scale_has_its_exact_value(codec: Codec) -> None:
    """A scale under which the largest code is infinite is no encoder's: NaN."""
    name = reference.layout(codec).format
    every = np.resize(np.arange(2 ** reference.bits_of(name), dtype=np.uint8), 256)
    scales = np.repeat(np.arange(256, dtype=np.uint8), 8)
    payload = message(codec, scales, np.tile(every, 256), 256 * 256)
    out = codec.decompress(payload, 256 * 256).view(256, 256)
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    exact = torch.from_numpy(reference.values_of(name, every)).double() * powers[:, None]
    exact[(powers * float(reference.largest(name))).float().isinf()] = torch.nan
    assert out[255].isnan().all() and out[254].isnan().all()
    assert torch.equal(out[:255].isnan(), exact[:255].isnan())
    assert torch.equal(out[:255].nan_to_num(7.0, 8.0, 9.0), exact[:255].float().nan_to_num(7.0, 8.0, 9.0))


@looped("codec", MX, ids=str)
def test_every_code_encodes_to_itself(codec: Codec) -> None:
    """In blocks that have the largest value too, so that the scale is the same again."""
    name = reference.layout(codec).format
    magnitudes = np.flatnonzero(np.isfinite(reference.magnitudes(name))).astype(np.uint8)
    sign = np.uint8(1 << reference.bits_of(name) - 1)
    finite = np.concatenate([magnitudes, magnitudes | sign])
    blocks = -(-len(finite) // 31)
    codes = np.full((blocks, 32), magnitudes[-1], np.uint8)
    codes[:, 1:] = np.resize(finite, (blocks, 31))
    ones = {"e8m0": np.full(blocks, 127, np.uint8), "bf16": np.full(blocks, 0x3F80, np.uint16)}
    payload = message(codec, ones[str(codec.options["scale"])], codes.reshape(-1), 32 * blocks)
    values = codec.decompress(payload, 32 * blocks)
    assert set(values.tolist()) == set(reference.values_of(name, finite).tolist())
    assert torch.equal(codec.compress(values), payload)


@looped("name, dtype, top", [("e4m3", torch.float8_e4m3fn, 448.0), ("e5m2", torch.float8_e5m2, 57344.0)])
def test_codes_are_those_of_torchs_cast(name: str, dtype: torch.dtype, top: float) -> None:
    """Of every bf16 in range, of the points halfway between two values, and of f32 next to those."""
    codec = codecs.get("mxfp8", format=name, header=False)
    table = torch.from_numpy(reference.finite(name))
    ties = (table[1:] + table[:-1]) / 2
    near = [torch.nextafter(ties, torch.tensor(limit)) for limit in (0.0, top)]
    some = bit_patterns(torch.bfloat16).float()
    x = torch.cat([table, ties, *near, some, gradient(1 << 16, 7) * top])
    x = torch.cat([x, -x])
    x = x[x.isfinite() & (x.abs() <= top)]
    rows = torch.full((-(-len(x) // 31), 32), top)  # the first of each block makes the scale 1
    flat = torch.zeros(rows.shape[0] * 31)
    flat[: len(x)] = x
    rows[:, 1:] = flat.view(-1, 31)
    payload = codec.compress(rows)
    scales, codes = codec.wire(rows.numel()).views(payload)
    assert (scales == 127).all()
    assert torch.equal(codes, rows.view(-1).to(dtype).view(torch.uint8))


def test_known_answers() -> None:
    block = torch.zeros(32)
    block[:8] = torch.tensor([0.1, -0.2, 0.3, -0.4, 1.0, -2.0, 4.0, 7.9])
    expected = {
        MXFP8(): [0.1015625, -0.203125, 0.3125, -0.40625, 1, -2, 4, 7],  # 7.9 saturates
        MXFP6("e3m2"): [0.09375, -0.1875, 0.3125, -0.375, 1, -2, 4, 7],
        MXFP4(): [0, -0.0, 0.5, -0.5, 1, -2, 4, 6],
    }
    for codec, values in expected.items():
        out = codec.decompress(codec.compress(block), 32)
        assert same_bits(out[:8], torch.tensor(values)) and not out[8:].any()
    pattern = torch.tensor([1.0, -2.0, 3.0, -4.0]).repeat(64) * 1e-3
    out = Taco().decompress(Taco().compress(pattern), 256)
    want = torch.tensor([0.00102679, -0.00200893, 0.00299108, -0.00397322]).repeat(64)
    assert (out - want).abs().max() < 6e-9


@looped("number", ["e4m3", "e5m2", "int8"])
@looped("block", [32, 64, 128, 256, 512])
def test_two_scales_lose_what_one_does(number: str, block: int) -> None:
    """The paper's alpha cancels but for the rounding of scales to 16 bits, which moves few codes, by one."""
    folded, dual = (
        codecs.get("taco", format=number, block_size=block, scales=scales, header=False)
        for scales in ("folded", "dual")
    )
    for factor in (2.0**-60, 1e-7, 1.0, 3e5, 2.0**60):
        x = gradient(64 * block, 3) * factor
        x[::97] *= 50
        one, two = folded.compress(x), dual.compress(x)
        codes = [planes(codec, made, len(x), x.dtype)[1] for codec, made in ((folded, one), (dual, two))]
        assert (codes[0] != codes[1]).float().mean() < (127 * 2.0**-15 if number == "int8" else 1e-3)
        lost = [vnmse(x, codec.decompress(made, len(x))) for codec, made in ((folded, one), (dual, two))]
        assert lost[1] == pytest.approx(lost[0], rel=1e-3)
        alpha = dual.wire(len(x)).views(two)[0].view(-1, 2)[:, 1]
        assert alpha.min() >= 1e-3 and alpha.max() <= 1e3
    steady = torch.full((block,), 2.0)
    s, alpha = dual.wire(block).views(dual.compress(steady))[0].tolist()
    assert alpha == pytest.approx(224.0, rel=1e-6)
    amax = np.array([448.0 * block**0.5], dtype=np.float32)
    assert s == short_scales(amax, np.float32(reference.largest(number)), 8)


def test_alpha_is_what_its_options_say() -> None:
    steady = torch.full((256,), 2.0)

    def alpha(x: Tensor, **options: object) -> float:
        codec = codecs.get("taco", scales="dual", header=False, **options)
        return float(codec.wire(256).views(codec.compress(x))[0][1])

    assert alpha(steady, tau=100) == pytest.approx(50, rel=1e-5)
    assert alpha(steady, epsilon=1.0) == pytest.approx(448 / 5**0.5, rel=1e-5)
    assert alpha(steady * 2.0**-20) == 1e3
    assert alpha(steady * 2.0**-20, limited=False) == pytest.approx(448e3, rel=1e-4)


def test_rotation_and_one_scale_are_equivariant() -> None:
    x = gradient(4096, 8)
    for codec in (Taco(), Taco("int8", 64), FP8Block(), FP8(), *STANDARD):
        once = codec.decompress(codec.compress(x), 4096)
        for power in (-30, -1, 7, 40):
            assert torch.equal(codec.decompress(codec.compress(x * 2.0**power), 4096), once * 2.0**power)


@looped("codec", [*STANDARD, *FP8S, *TENSOR], ids=str)
def test_encoding_what_was_decoded_changes_nothing(codec: Codec) -> None:
    x = awkward(16 * codec.block, codec.block)
    x = x[x.isfinite()] if isinstance(codec, FP8) else x
    x = torch.where(x.abs() > 1e30, 0.0, x)
    once = codec.decompress(codec.compress(x), len(x))
    twice = codec.decompress(codec.compress(once), len(x))
    assert torch.equal(once.isnan(), twice.isnan())
    if isinstance(codec, FP8 | FP8Block):  # an f32 scale is rounded
        assert torch.allclose(once.nan_to_num(), twice.nan_to_num(), rtol=1e-6, atol=0)
    else:
        assert torch.equal(once.nan_to_num(), twice.nan_to_num())


@looped("codec", MX, ids=str)
def test_only_scales_that_are_powers_of_two_saturate(codec: Codec) -> None:
    top = float(reference.largest(reference.layout(codec).format))
    x = torch.full((32,), 2.0 ** np.ceil(np.log2(top)) * (1 - 2.0**-20))
    out = codec.decompress(codec.compress(x), 32)
    if codec.options["scale"] == "e8m0":
        assert (out == top).all()
    else:
        assert (out - x).abs().max() <= x[0] * 2.0**-7


def test_planes_of_nothing_are_zeros_and_of_broken_blocks_canonical() -> None:
    nan = {"folded": [0, 0, 192, 127], "dual": [0, 0, 192, 127] * 2, "e8m0": [255], "bf16": [192, 127]}
    for codec in (*TACO, *FP8S, *MX):
        n, form = 3 * codec.block, reference.layout(codec)
        tiny = torch.full((n,), 2.0**-111)
        assert not codec.decompress(codec.compress(tiny), n).any()
        if form.scale != "dual":
            assert not codec.compress(tiny).any()
        tiny[codec.block] = float("-inf")
        scales, codes = planes(codec, codec.compress(tiny), n, torch.float32)
        assert scales.view(3, -1)[1].tolist() == nan[form.scale]
        assert not codes.any()


def test_one_scale_for_a_message() -> None:
    x = gradient(5000, 4)
    for codec in TENSOR:
        (amax, _) = codec.wire(5000).views(codec.compress(x))
        assert amax.item() == x.abs().max()
        for value, seen in ((float("inf"), 0x7FC00000), (float("nan"), 0x7FC00000)):
            bad = x.clone()
            bad[4321] = value
            payload = codec.compress(bad)
            amax, codes = codec.wire(5000).views(payload)
            assert amax.view(torch.int32).item() == seen and not codes.any()
            assert codec.decompress(payload, 5000).isnan().all()
        assert not codec.compress(torch.zeros(5000)).any()
        payloads = torch.zeros(3, codec.wire(2048).capacity, dtype=torch.uint8)
        codec.encode_chunks(x, payloads, 2048)
        for row, part in zip(payloads, x.split(2048), strict=True):
            assert codec.wire(2048).views(row)[0].item() == part.abs().max()


# ---- errors ---------------------------------------------------------------------------------------------------------


@looped(
    "codec, expected",
    [
        (Taco(), 6.8e-4),
        (Taco(block_size=32), 5.8e-4),
        (Taco(block_size=512), 6.9e-4),
        (Taco("e5m2"), 2.7e-3),
        (Taco("int8"), 4.8e-5),
        (FP8Block(block_size=256), 6.8e-4),
        (MXFP8(), 8.6e-4),
        (MXFP8("e5m2"), 2.9e-3),
        (MXFP6("e3m2"), 2.9e-3),
        (MXFP6("e2m3"), 7.9e-4),
        (MXFP4(), 1.3e-2),
    ],
    ids=str,
)
def test_error_on_gaussian_values(codec: Codec, expected: float) -> None:
    assert loss(codec, gaussian(1, 1 << 17)[0]) == pytest.approx(expected, rel=0.15)


def loss(codec: Codec, x: Tensor) -> float:
    return vnmse(x, codec.decompress(codec.compress(x), x.shape))


def test_errors_on_values_of_tensor_parallelism() -> None:
    x = tensor_parallel(1 << 18)
    step = x.abs().max() / 127
    per_tensor = vnmse(x, torch.round(x / step) * step)
    assert loss(Taco(), x) == pytest.approx(7.0e-4, rel=0.15)
    assert loss(Taco("int8"), x) < loss(FP8Block(), x) < loss(Taco(), x) < loss(Taco("e5m2"), x)
    assert loss(Taco("e5m2"), x) / loss(Taco(), x) == pytest.approx(3.97, rel=0.1)
    assert loss(Taco(), x) < loss(FP8(), x) < per_tensor
    assert loss(MXFP8(), x) < loss(MXFP8("e5m2"), x) < loss(MXFP4(), x) < per_tensor


def test_error_feedback_sends_what_rounding_lost() -> None:
    x, residual, steps = gradient(4096, 5), torch.zeros(4096), 20
    total = torch.zeros(4096, dtype=torch.float64)
    for _ in range(steps):
        total += decoded(MXFP4(), encoded(MXFP4(), x, residual=residual), 4096, x.dtype)
    assert vnmse(x, total / steps) < loss(MXFP4(), x) / 50


# ---- options --------------------------------------------------------------------------------------------------------


def test_bits_per_element_are_as_documented() -> None:
    n = 1 << 19
    bits = {
        **{codec: 8 + (64 if codec.scales == "dual" else 32) / codec.block_size for codec in TACO},
        **{codec: 8 + 32 / codec.block_size for codec in FP8S},
        **{codec: 8 + 32 / n for codec in TENSOR},
        **{codec: reference.bits_of(reference.layout(codec).format) + 0.25 for codec in STANDARD},
        **{replace(codec, scale="bf16"): reference.bits_of(reference.layout(codec).format) + 0.5 for codec in STANDARD},
    }
    assert set(bits) == set(EVERY)
    for codec, expected in bits.items():
        used = sum(section.plane.nbytes for section in codec.wire(n).sections)
        assert used * 8 == n * expected


@looped(
    "name, option, value",
    [
        ("taco", "format", "e3m4"),
        ("taco", "format", "e2m1"),
        ("taco", "block_size", 48),
        ("taco", "block_size", 1024),
        ("taco", "block_size", 256.0),
        ("taco", "hadamard", 1),
        ("taco", "scales", "both"),
        ("taco", "tau", 0.5),
        ("taco", "epsilon", 0.0),
        ("taco", "limited", 1),
        ("fp8", "format", "int8"),
        ("fp8_block", "format", "e2m3"),
        ("fp8_block", "block_size", 16),
        ("mxfp8", "format", "e2m3"),
        ("mxfp6", "format", "e4m3"),
        ("mxfp8", "scale", "f32"),
        ("mxfp4", "scale", 8),
    ],
)
def test_options_out_of_range_are_refused(name: str, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{option}={value!r}.*expected"):
        codecs.get(name, **{option: value})
