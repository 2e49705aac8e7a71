"""``tahquant``: which tokens are coarse, which tiles are rotated, how far values may go astray."""

import torch
from torch import Tensor

from fusionlayer.codecs.research.tahquant import TAHQuant
from tests.loops import looped
from tests.synthetic import gradient

from .torch_oracles import TorchTAHQuant, entropy, unpack_runs

SMALL = TAHQuant(channels=256)


def planes(codec: TAHQuant, x: Tensor) -> tuple[Tensor, ...]:
    payload = codec.bare.compress(x)
    return codec.bare.wire(x.numel()).views(payload)


def spread(tokens: int, channels: int = 256) -> Tensor:
    """Return (tokens * channels,) without a pivot anywhere: magnitudes of 1/2 to 1."""
    x = gradient(tokens * channels, 5)
    return torch.sign(x) * (0.5 + 0.5 * x.abs())


def test_the_tokens_of_lowest_entropy_are_coarse() -> None:
    x = spread(10).view(10, 256)
    x[3, 20:] *= 1e-3
    x[8] = 0
    chosen = planes(SMALL, x.view(-1))[0]
    assert chosen.numel() == 4
    marked = [token for token in range(10) if chosen[token % 4] >> token // 4 & 1]
    assert marked == [3, 8]


def coarse_tokens(codec: TAHQuant, x: Tensor, residual: Tensor | None = None) -> list[int]:
    payload = torch.zeros(codec.bare.wire(x.numel()).capacity, dtype=torch.uint8)
    codec.bare.encode(x, payload, residual=None if residual is None else residual.clone())
    marks = unpack_runs(codec.bare.wire(x.numel()).views(payload)[0], 1)
    return [token for token, mark in enumerate(marks.tolist()) if mark]


def test_a_section_of_32_tokens_has_its_own_share() -> None:
    """What other sections hold does not matter: a message of few tokens is as it is as a part of a longer one."""
    x = spread(100)
    x.view(100, 256)[:32, 20:] *= 1e-3
    chosen = coarse_tokens(SMALL, x)
    assert [len([token for token in chosen if token // 32 == section]) for section in range(4)] == [6, 6, 7, 1]
    assert chosen[:6] == coarse_tokens(SMALL, x[: 32 * 256])
    assert [token - 64 for token in chosen[12:19]] == coarse_tokens(
        TAHQuant(channels=256, coarse=7 / 32), x[64 * 256 :]
    )[:7]


def test_tokens_are_told_apart_by_a_millionth_of_their_entropy() -> None:
    """Those of one order at all scales, of which one is not finite."""
    x = gradient(1024, 3).repeat(32, 1)
    x[:, 5] = 10 + 2e-4 * torch.randperm(32, generator=torch.Generator().manual_seed(1))
    want = entropy(x).argsort()
    assert entropy(x)[want].diff().min() > 2e-6
    for factor in (1.0, 2.0**-90, 2.0**100):
        assert coarse_tokens(TAHQuant(coarse=0.5), x.view(-1) * factor) == sorted(want[:16].tolist())
    x[want[0], 7] = float("inf")
    assert coarse_tokens(TAHQuant(coarse=0.5), x.view(-1)) == sorted(want[1:17].tolist())
    other = gradient(32 * 1024, 4)
    assert coarse_tokens(TAHQuant(), other, x.view(-1)) == coarse_tokens(TAHQuant(), other + x.view(-1))


def test_of_equal_tokens_the_first_are_coarse() -> None:
    assert coarse_tokens(SMALL, spread(1).repeat(40)) == [0, 1, 2, 3, 4, 5, 32, 33]


def test_the_logarithm_is_that_of_the_wire_format() -> None:
    """Tokens whose values are all equal differ by its error alone."""
    x = (1 + torch.randperm(32, generator=torch.Generator().manual_seed(2)) / 32).repeat_interleave(256).view(32, 256)
    order = entropy(x).argsort()
    assert entropy(x)[order].diff()[15] > 2e-6
    half = TAHQuant(channels=256, coarse=0.5)
    assert coarse_tokens(half, x.view(-1)) == sorted(order[:16].tolist())


def test_a_fifth_of_the_tokens_is_coarse() -> None:
    tokens = torch.arange(1, 100_000)
    assert all(TAHQuant()._tokens(1024 * k)[1] == k // 5 for k in tokens.tolist())
    assert TAHQuant(coarse=1 / 3)._tokens(1024 * 3) == (3, 1) and TAHQuant(coarse=1 - 1e-12)._tokens(1024) == (1, 0)


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@looped("tile", [32, 64, 128])
@looped("bits", [4, 6])
def test_the_core_makes_the_bytes_of_the_oracle(bits: int, tile: int, dtype: torch.dtype) -> None:
    for channels, coarse in ((128, 0.2), (1024, 0.5), (384, 0.0)):
        codec = TAHQuant(bits, tile, channels, coarse if bits == 4 else 0.0, header=False)
        oracle = TorchTAHQuant(codec=codec, header=False)
        for numel in (1, channels - 1, 3 * channels, 11 * channels + 70, 32 * channels, 70 * channels):
            x = gradient(numel, 7, dtype)
            x[::97] *= 30  # pivots
            kind = torch.arange(numel) // tile % 4  # tiles of one sign, with zeros of the other one
            x = torch.where(kind == 1, x.abs(), torch.where(kind == 2, -x.abs(), x))
            x[::31] = torch.where(kind == 1, -0.0, 0.0)[::31].to(dtype)
            payload, want = (torch.zeros(codec.wire(numel, dtype).capacity, dtype=torch.uint8) for _ in range(2))
            codec.encode(x, payload)
            oracle.encode(x, want)
            for name, mine, theirs in zip(
                ("coarse", "pivots", "offsets", "steps", "codes"),
                codec.wire(numel, dtype).views(payload),
                codec.wire(numel, dtype).views(want),
                strict=True,
            ):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name
            assert torch.equal(codec.decompress(payload, numel), oracle.decompress(want, numel))


def test_twice_the_next_is_what_makes_a_pivot() -> None:
    x = torch.ones(256)
    for value, expected in ((1.99, 255), (2.0, 7), (-2.0, 7)):
        x[7] = value
        assert int(planes(SMALL, x)[1][0]) == expected


def test_garbage_marks_choose_as_many_tokens() -> None:
    """A damaged map of coarse tokens gives other values in its section alone, never another number of codes."""
    x = spread(70)
    payload = SMALL.bare.compress(x)
    want = SMALL.bare.decompress(payload, x.numel())
    for fill in (0, 255):
        SMALL.bare.wire(x.numel()).views(payload)[0][4:8].fill_(fill)
        out = SMALL.bare.decompress(payload, x.numel())
        assert out.isfinite().all()
        same = (out == want).view(70, 256).all(1)
        assert same[:32].all() and same[64:].all() and not same[32:64].all()
    _, _, offsets, steps, _ = planes(SMALL, x)
    codes = ((out.view(-1, 64) - offsets.float()[:, None]) / steps.float()[:, None]).round().view(70, 256)
    assert torch.equal(codes[37:64], codes[63:64].expand(27, -1))  # those of the last place, where 26 are fine
