"""What oracles in torch compute with, held to the codec core and to plain definitions."""

from __future__ import annotations

import pytest
import torch

from fusionlayer import codecs
from tests.loops import looped
from tests.synthetic import gradient

from .torch_arithmetic import hadamard, pack_runs, random_bits, rounding_halves, unpack_runs

pytestmark = pytest.mark.short

HOST = torch.device("cpu")


def test_random_numbers_are_those_of_the_core() -> None:
    """Rounded to whole numbers, one half goes up where the highest of its 16 bits is set: the core's codes show it."""
    codec = codecs.get("int", bits=8, group_size=128, rounding="stochastic").bare
    for seed, offset in ((0, 0), (7, 128), ((1 << 64) - 1, (1 << 32) - 128), (3, 5 << 32)):
        x = torch.full((128,), 0.5)
        x[0] = 127.0  # the scale is 1
        payload = torch.zeros(codec.wire(128).capacity, dtype=torch.uint8)
        codec.encode(x, payload, seed=seed, offset=offset)
        codes = codec.wire(128).views(payload)[1].view(torch.int8)
        bits = random_bits(seed, offset, 128, HOST).view(4, 2, 16)[:, 0]  # of elements i and i + 16
        up = torch.stack((bits >> 15 & 1, bits >> 31 & 1), 1).view(-1) == 1
        assert torch.equal(codes[1:] == 1, up[1:])
        assert 30 < int(up.sum()) < 98


def test_numbers_belong_to_elements() -> None:
    whole = random_bits(5, 1000, 300, HOST)
    assert torch.equal(whole[100:], random_bits(5, 1100, 200, HOST))
    halves = rounding_halves(5, 0, 1 << 16, HOST)
    assert torch.equal(halves[320:], rounding_halves(5, 320, (1 << 16) - 320, HOST))
    assert torch.equal(halves[:100], rounding_halves(5, 0, 100, HOST))
    noise = halves.float() / 65536
    assert noise.min() >= 0 and noise.max() < 1
    assert abs(float(noise.mean()) - 0.5) < 0.005 and abs(float(noise.var()) - 1 / 12) < 0.002


@looped("block", [2, 32, 1024])
def test_the_transform_is_its_own_inverse(block: int) -> None:
    x = torch.arange(3 * block).remainder(17).float() - 8
    assert torch.equal(hadamard(hadamard(x, block), block), x * block)
    matrix = hadamard(torch.eye(block).view(-1), block).view(block, block)
    assert torch.equal(matrix, matrix.t()) and (matrix[0] == 1).all() and (matrix.abs() == 1).all()


def test_the_transform_is_that_of_the_handbook() -> None:
    """(1 .. 32) / 32 in natural order: known values."""
    out = hadamard(torch.arange(1, 33).float() / 32, 32) / 32**0.5
    torch.testing.assert_close(out[:4], torch.tensor([2.916816, -0.088388, -0.176777, 0.0]), rtol=0, atol=1e-6)
    assert float(out.square().sum()) == pytest.approx(11.171875, rel=1e-6)


@looped("bits", [1, 2, 3, 4, 6, 8, 12, 16])
def test_codes_come_back(bits: int) -> None:
    codes = (gradient(320, bits).view(torch.int32) & (1 << bits) - 1).to(torch.int32)
    data = pack_runs(codes, bits)
    assert data.dtype == torch.uint8 and data.numel() == 40 * bits
    assert torch.equal(unpack_runs(data, bits), codes)


def test_places_of_codes() -> None:
    """12 bits: 32 low bytes, 16 of two high halves; 3 bits: 8 bytes of four low pairs, 4 of eight high bits."""
    codes = torch.zeros(32, dtype=torch.int32)
    codes[17] = 0xABC
    data = pack_runs(codes, 12)
    assert data[17] == 0xBC and data[32 + 1] == 0xA0 and int(data.count_nonzero()) == 2
    codes[17] = 0b110
    data = pack_runs(codes, 3)
    assert data[1] == 0b10 << 4 and data[8 + 1] == 1 << 4 and int(data.count_nonzero()) == 2
