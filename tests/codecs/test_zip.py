"""``zip``: the bytes of docs/wire_format.md by a decoder in numpy, what it saves, and that it never loses a bit."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionlayer.base.errors import WireError
from fusionlayer.codecs.lossless.zip import Zip, window_base
from tests.codecs.conformance import as_bits, decoded, encoded, same_bits
from tests.loops import looped
from tests.native.abi import each_isa, threads
from tests.synthetic import bit_patterns, noise

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F16, F32)
N = 1 << 18
SIGMAS = {1.0: 122, 0.02: 116, 0.7: 121, math.sqrt(2): 122, 3e-5: 107}


def gaussian(numel: int, dtype: torch.dtype = BF16, sigma: float = 1.0) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(7)) * sigma).to(dtype)


def bits_each(codec: Zip, x: Tensor) -> float:
    payload = encoded(codec.bare, x)
    return 8 * codec.bare.used_bytes(payload, x.numel(), x.dtype) / x.numel()


def tables(x: Tensor, codec: Zip) -> np.ndarray:
    """Return (regions, 7) exponents that got codes."""
    data = codec.bare.wire(x.numel(), x.dtype).views(encoded(codec.bare, x))[1].numpy()
    regions = -(-x.numel() // 65536)
    return data[: 16 * regions].reshape(regions, 16)[:, 1:8]


def exponents(x: Tensor) -> np.ndarray:
    bits = as_bits(x).numpy()
    return bits >> 23 & 255 if x.dtype is F32 else bits >> 10 & 31 if x.dtype is F16 else bits >> 7 & 255


def by_the_book(payload: Tensor, n: int, dtype: torch.dtype) -> np.ndarray:
    """Return the bits of a message's elements, by docs/wire_format.md."""
    head, data = (view.numpy() for view in Zip(header=False).wire(n, dtype).views(payload))
    form, escapes = head[:8].view(np.uint32)
    word = np.uint32 if dtype is F32 else np.uint16
    if form == 0:
        return data[: n * word().itemsize].view(word)
    regions, tiles = -(-n // 65536), -(-n // 1024)
    entries = data[: 16 * regions].reshape(regions, 16)
    firsts, counts = (entries[:, i : i + 4].copy().view(np.uint32).ravel() for i in (8, 12))
    assert counts.sum() == escapes and (firsts == np.cumsum(counts) - counts).all()
    index = data[16 * regions : 16 * regions + 2 * tiles].view(np.uint16)
    at = -(-(16 * regions + 2 * tiles) // 64) * 64
    planes = 6 if dtype is F16 else 3
    out, escaped = [], []
    for tile in range(tiles):
        m = min(1024, n - 1024 * tile)
        filled = -(-m // 64) * 64
        byte = data[at : at + filled].astype(word)
        at += filled
        plane = np.unpackbits(data[at : at + planes * filled // 8].reshape(planes, -1), axis=1, bitorder="little")
        at += planes * filled // 8
        code = plane[0] | plane[1] << 1 | plane[2] << 2
        assert (code[m:] == 1).all() and not byte[m:].any()
        exponent = entries[tile // 64][code].astype(word)
        escaped.append((code == 0, exponent, byte, plane, firsts[tile // 64] + index[tile]))
        low = data[at : at + 2 * filled].view(np.uint16) if dtype is F32 else None
        at += 2 * filled if dtype is F32 else 0
        out.append((low, m))
    words = []
    for (missing, exponent, byte, plane, first), (low, m) in zip(escaped, out, strict=True):
        exponent[missing] = data[at + first : at + first + missing.sum()]
        sign, mantissa = byte >> 7, byte & 127
        if dtype is F16:
            low3 = (plane[3] | plane[4] << 1 | plane[5] << 2).astype(word)
            words.append((sign << 15 | exponent << 10 | mantissa << 3 | low3)[:m])
        elif dtype is BF16:
            words.append((sign << 15 | exponent << 7 | mantissa)[:m])
        else:
            words.append((sign << 31 | exponent << 23 | mantissa << 16 | low)[:m])
    return np.concatenate(words)


@looped("exponent_choice", ["auto", "window", "table"])
@looped("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_description(dtype: torch.dtype, exponent_choice: str) -> None:
    codec = Zip(exponents=exponent_choice, header=False)  # type: ignore[arg-type]
    for n in (1, 65, 1000, 1024, 5000, 65536, 70_001, 140_000):
        x = gaussian(n, dtype, 0.02)
        payload = encoded(codec, x)
        assert (by_the_book(payload, n, dtype) == as_bits(x).numpy().view(f"u{dtype.itemsize}")).all()
        assert n < 1000 or int(payload[0]) == 1, "a Gaussian of this length gets shorter"


def test_a_window_begins_where_a_gaussian_is_covered_best() -> None:
    for sigma, base in SIGMAS.items():
        assert window_base(sigma) == base
        assert window_base(sigma, F32) == base
        for row in tables(gaussian(N, BF16, sigma), Zip(exponents="window")):
            assert list(row) == list(range(base, base + 7))
    assert window_base(1.0, F16) == 10
    assert (tables(gaussian(N, F16), Zip(exponents="window")) == np.arange(10, 17)).all()


def test_the_sample_finds_the_sigma_that_is_given() -> None:
    for octave in np.linspace(-20.0, 20.0, 41):
        sigma = 2.0**octave
        x = gaussian(N, BF16, sigma)
        best = math.log2(sigma) - 5.3607
        (given,) = {int(row[0]) for row in tables(x, Zip(sigma=sigma))}
        assert given - 127 in (math.floor(best), math.ceil(best))
        covered = [np.isin(exponents(x), np.arange(base, base + 7)).mean() for base in (given - 1, given, given + 1)]
        assert max(covered) - covered[1] < 0.003
        for row in tables(x, Zip(exponents="window")):
            assert max(covered) - np.isin(exponents(x), row).mean() < 0.02


def test_a_table_covers_zeros() -> None:
    relu = gaussian(N).relu()
    assert bits_each(Zip(exponents="window"), relu) > 14.5
    assert bits_each(Zip(exponents="table"), relu) < 11.5
    assert tables(relu, Zip())[0][0] == 0
    assert tables(gaussian(N), Zip(exponents="auto"))[0][0] > 0


def test_every_region_has_its_own_exponents() -> None:
    sizes = torch.tensor([1.0, 1e-6, 1e6, 1e-20])
    x = (gaussian(4 << 16).float().view(4, -1) * sizes[:, None]).to(BF16).flatten()
    assert bits_each(Zip(exponents="window"), x) < 11.5
    assert len({int(row[0]) for row in tables(x, Zip())}) == 4


NAMED: dict[str, Callable[[int], Tensor]] = {
    "zeros": torch.zeros,
    "negative zeros": lambda n: -torch.zeros(n),
    "NaN": lambda n: torch.full((n,), math.nan),
    "infinities": lambda n: torch.full((n,), -math.inf),
    "one outlier": lambda n: torch.cat([torch.zeros(n - 1), torch.tensor([3e38])]),
    "subnormals": lambda n: gaussian(n, F32) * 1e-40,
    "huge": lambda n: gaussian(n, F32) * 1e38,
    "all magnitudes": lambda n: torch.exp2(torch.linspace(-149, 127, n)),
    "constant": lambda n: torch.full((n,), 0.1),
    "alternating": lambda n: torch.tensor([1.0, -1e-30]).repeat(-(-n // 2))[:n],
    "noise": lambda n: noise(-(-4 * n // 8) * 8).view(F32)[:n],
    "escapes but for a few": lambda n: torch.cat([torch.ones(512), torch.exp2(-torch.arange(n - 512) % 100 - 10.0)]),
}


@looped("kind", NAMED)
@looped("dtype", DTYPES, ids=str)
def test_no_data_loses_a_bit_or_gets_longer(kind: str, dtype: torch.dtype) -> None:
    for n in (513, 1024, 70_001, 200_000):
        x = NAMED[kind](n).to(dtype)
        for codec in (Zip(), Zip(exponents="window"), Zip(exponents="table"), Zip(sigma=1.0)):
            payload = encoded(codec.bare, x)
            assert same_bits(decoded(codec.bare, payload, n, dtype), x)
            assert codec.bare.used_bytes(payload, n, dtype) <= n * dtype.itemsize + 16


@looped("dtype", DTYPES, ids=str)
def test_bytes_depend_neither_on_instruction_set_nor_on_threads(dtype: torch.dtype) -> None:
    """Of regions of several kinds: one has every bit pattern, escapes for the most part."""
    x = torch.cat([gaussian(200_000, dtype), bit_patterns(dtype), gaussian(200_000, dtype, 1e-3).relu()])
    codec, made = Zip(header=False), []
    for _ in each_isa():
        for count in (1, 3):
            with threads(count):
                payload = encoded(codec, x)
                assert same_bits(decoded(codec, payload, x.numel(), dtype), x)
                total = torch.ones(x.numel(), dtype=F16)
                codec.decode_sum(torch.stack([payload, payload]), total, dtype=dtype, add=True)
                made.append(torch.cat([payload, total.view(torch.uint8)]))
    assert int(made[0][0]) == 1 and all(torch.equal(other, made[0]) for other in made)


def test_a_message_that_contradicts_itself_is_refused() -> None:
    n, codec = 5000, Zip(header=False)
    good = encoded(codec, gaussian(n))
    head, data = (section.offset for section in codec.wire(n, BF16).sections)
    out = torch.empty(n, dtype=BF16)
    for place, value in ((head, 2), (head + 4, 0), (head + 6, 1), (data + 10, 1), (data + 17, 0xFF)):
        bad = good.clone()
        bad[place] = value
        with pytest.raises(WireError):
            codec.decode(bad, out)
        with pytest.raises(WireError):
            codec.decode_add(bad, out)
    bad = good.clone()
    bad[head] = 2
    for refused in (codec.used_bytes, codec.compact):
        with pytest.raises(WireError, match="form 2"):
            refused(bad, n, BF16)
    with pytest.raises(WireError, match="cut short"):
        codec.expand(good[:7], torch.zeros_like(good), n, BF16)
