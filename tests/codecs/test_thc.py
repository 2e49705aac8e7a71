"""``thc``: levels, agreement, and codes that add up."""

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionlayer import native
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs.research.thc import THC
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import over_threads
from tests.synthetic import gradient

from .arithmetic import halves
from .torch_oracles import TorchTHC, section_rms

HOST = torch.device("cpu")


def agreed(x: Tensor, **options: Any) -> THC:
    """Return the codec that ranks agree on whose largest root mean squares are all that of ``x``."""
    rms = x.double().square().mean().sqrt().float().expand(1 << 23)  # more than offsets of the tests reach
    return replace(THC(**options), rms=rms, signs=3).bare


def messages(codec: THC, tensors: list[Tensor]) -> Tensor:
    payloads = torch.zeros(len(tensors), codec.wire(tensors[0].numel()).capacity, dtype=torch.uint8)
    for i, x in enumerate(tensors):
        codec.encode(x, payloads[i], seed=i)
    return payloads


def test_levels_are_the_published_ones() -> None:
    assert THC.clip == pytest.approx(NormalDist().inv_cdf(1 - 1 / 64), rel=1e-12)
    levels = TorchTHC().grid(HOST)
    assert ((levels + 30) / 2).tolist() == [0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30]
    assert torch.equal(levels, -levels.flip(0))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"levels": "uniform"},
    {"rounding": "nearest"},
    {"levels": "uniform", "rounding": "nearest", "clip": 3.0},
    *({"block_size": block} for block in (32, 64, 128, 256, 512)),
]


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@looped("options", OPTIONS, ids=str)
def test_the_core_makes_the_bytes_of_the_oracle(options: dict[str, Any], dtype: torch.dtype) -> None:
    codec = THC(**options).bare
    assert isinstance(codec, THC)
    for numel in (1, 31, 33, 100, 1000, 1025, 5000):
        x = gradient(numel, 7, dtype)
        for each in (codec, replace(agreed(x, **options), signs=0xFFFF_FFF1)):
            oracle = TorchTHC(codec=each, header=False)
            payload, want = (torch.zeros(each.wire(numel, dtype).capacity, dtype=torch.uint8) for _ in range(2))
            each.encode(x, payload, seed=11, offset=2**32 - 1024)
            oracle.encode(x, want, seed=11, offset=2**32 - 1024)
            assert torch.equal(payload, want)
            assert torch.equal(each.decompress(payload, numel), oracle.decompress(want, numel))


@looped("rounding", ["stochastic", "nearest"])
@looped("levels", ["normal", "uniform"])
def test_values_beside_the_place_where_they_are_rounded(levels: str, rounding: str) -> None:
    # A block with one value: its rotated values are equal, and within three bits of where one of them is rounded up.
    blocks, seed = 7 * 32 * 64, 5
    codec = replace(THC(levels=levels, rounding=rounding, block_size=32), rms=torch.ones(blocks // 32), signs=9).bare
    assert isinstance(codec, THC)
    oracle = TorchTHC(codec=codec, header=False)
    block = torch.arange(blocks)
    random = torch.from_numpy(halves(seed, 0, 32 * blocks)).view(blocks, 32)[block, block // 7 % 32]
    parts = 65536 - (random if rounding == "stochastic" else torch.full((blocks,), 32767))
    grid, low = oracle.grid(HOST).double() * oracle.units, block // 224 % 15
    value = (grid[low] + grid.diff()[low] * parts / 65536).ceil() - 0.5
    x = torch.zeros(blocks, 32)
    only = (value / (float(torch.tensor(oracle._steps_per_rms(32))) * oracle.units)).float()
    x[:, 0] = torch.where(only == 0, 0, only.view(torch.int32) + (block % 7 - 3).int()).view(torch.float32)
    x = oracle._with_signs(x.flatten())
    payload, want = (torch.zeros(codec.wire(x.numel()).capacity, dtype=torch.uint8) for _ in range(2))
    codec.encode(x, payload, seed=seed)
    oracle.encode(x, want, seed=seed)
    assert torch.equal(payload, want)


@looped("levels", ["normal", "uniform"])
@looped("numel", [1, 33, 1000, 1025, 5000])
def test_the_sum_of_codes_is_the_code_of_the_sum(levels: str, numel: int) -> None:
    tensors = [gradient(numel, rank) for rank in range(8)]
    codec = agreed(max(tensors, key=lambda x: float(x.square().sum())), levels=levels)
    payloads = messages(codec, tensors)
    total = torch.zeros(codec.sum_bytes(numel, 8), dtype=torch.uint8)
    codec.add_codes(payloads, total, numel, torch.float32)
    oracle = TorchTHC(codec=codec, header=False)
    integers = sum(oracle.integers(codec.wire(numel).views(payload)).int() for payload in payloads)
    assert isinstance(integers, Tensor)
    added, out = torch.empty(numel), torch.empty(numel)
    oracle.decode_integers(integers, 8, added)
    codec.decode_sums(total.unsqueeze(0), out, numel, 8)
    assert torch.equal(out, added)
    decoded = torch.stack([codec.decompress(payload, numel).double() for payload in payloads])
    assert (out.double() - decoded.sum(0)).abs().max() <= 2**-22 * decoded.abs().sum(0).max()


def test_widths_hold_the_largest_sum() -> None:
    codec, uniform = THC(), THC(levels="uniform")
    assert [codec.sum_bits(n) for n in (1, 8, 9, 136, 137, 2184)] == [8, 8, 12, 12, 16, 16]
    assert [uniform.sum_bits(n) for n in (1, 17, 18, 273, 274, 4369)] == [8, 8, 12, 12, 16, 16]
    for each, most in ((codec, 2184), (uniform, 4369)):
        with pytest.raises(ConfigError, match=f"at most {most} ranks, these are {most + 1}; choose another"):
            each.sum_bits(most + 1)


def test_the_largest_sum_comes_back() -> None:
    x = torch.zeros(1024)
    x[5] = 1.0
    codec = agreed(x, rounding="nearest")
    for count in (8, 9, 136, 137):
        same = torch.full((1024,), 30 * count, dtype=torch.int32)
        out, wanted = torch.empty(1024), torch.empty(1024)
        TorchTHC(codec=codec).decode_integers(same, count, wanted)
        payload = messages(codec, [x])[0]
        codec.wire(1024).views(payload)[1].fill_(0xFF)
        total = torch.zeros(codec.sum_bytes(1024, count), dtype=torch.uint8)
        codec.add_codes(payload.repeat(count, 1), total, 1024, torch.float32)
        codec.decode_sums(total.unsqueeze(0), out, 1024, count)
        assert torch.equal(out, wanted)


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_root_mean_squares_are_those_of_the_oracle(dtype: torch.dtype) -> None:
    """Of sections, the last one short: of usual values, of all scales, of nothing, and with what is not finite."""
    x, residual = gradient(14 * 1024 + 333, 5, dtype), gradient(14 * 1024 + 333, 6)
    for i, factor in enumerate((0.0, 1e-45, 1e-31, 7.7e-31, 1e-30, 1e-20, 1e20, 3e38)):
        x[1024 * i :][:1024] = (gradient(1024, 7) * factor).to(dtype)
    x[9 * 1024], x[10 * 1024 + 5], x[11 * 1024 + 7] = float("nan"), -float("inf"), torch.finfo(dtype).max
    spec = THC().core_spec(x.numel(), dtype)
    for kept in (None, residual):
        rms = native.thc_rms(spec, x, kept, 15)
        assert torch.equal(rms.nan_to_num(-1), section_rms(x if kept is None else x + kept).nan_to_num(-1))
    assert rms.isnan().any() and rms[12:] == pytest.approx(_roots(x + residual)[12:], rel=2e-3)


def test_agreement_is_the_largest_of_all_ranks() -> None:
    """Of every section by itself, residuals included."""

    def summand(rank: int) -> tuple[Tensor, Tensor]:
        x, residual = gradient(5000, rank), torch.zeros(5000)
        x[1024 * rank :][:1024] *= 8
        residual[1024 * rank :][:1024] = 3.0
        return x, residual

    def body(transport: Transport) -> tuple[list[float], int]:
        x, residual = summand(transport.rank)
        codec = THC().agree(x, transport, seed=9, residual=residual)
        assert codec.rms is not None and codec == THC() and str(codec) == str(THC())
        return codec.rms.tolist(), codec.signs

    results = over_threads(4, body)
    assert all(result == results[0] for result in results)
    sections = torch.stack([_roots(torch.add(*summand(rank))) for rank in range(4)])
    assert results[0][0] == pytest.approx(sections.amax(0).tolist(), rel=2e-3)
    assert sections.argmax(0)[:4].tolist() == [0, 1, 2, 3]


def _roots(x: Tensor) -> Tensor:
    return torch.stack([section.double().square().mean().sqrt() for section in x.split(1024)])


def test_seeds_change_the_signs() -> None:
    def body(transport: Transport) -> list[int]:
        found = [THC().agree(torch.ones(10), transport, seed=seed) for seed in (1, 2)]
        return [codec.signs for codec in found]

    (signs,) = over_threads(1, body)
    assert signs[0] != signs[1]
    x = gradient(1024, 1)
    one, other = (replace(agreed(x), signs=sign) for sign in signs)
    assert not torch.equal(one.compress(x), other.compress(x))
