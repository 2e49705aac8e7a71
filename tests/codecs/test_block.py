"""``taco``, ``fp8``, ``fp8_block`` and the MX codecs."""

from itertools import product

import torch

from fusionlayer import codecs
from fusionlayer.codecs import Codec
from fusionlayer.codecs.quantized.fp8 import FP8, FP8Block
from fusionlayer.codecs.quantized.mx import MXFP4, MXFP6, MXFP8
from fusionlayer.codecs.research.taco import Taco
from tests.loops import looped
from tests.native.abi import each_isa
from tests.synthetic import awkward, bit_patterns, gradient, noise

from . import block_reference as reference
from .conformance import DTYPES, decoded, encoded, planes, same_bits

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
EVERY: list[Codec] = [*TACO, *FP8S, *TENSOR, *MX]


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
    for stream in range(16):
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
    for isa in each_isa():
        out = torch.empty(n)
        codec.decode_sum(payloads, out)
        assert out[place].isnan() and torch.equal(out.isnan(), total.isnan()), isa
        torch.testing.assert_close(out, total, rtol=1e-5, atol=1e-5, equal_nan=True)


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
