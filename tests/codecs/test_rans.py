"""``rans``: the bytes of docs/wire_format.md by a decoder in Python; messages are as short as entropy allows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionlayer.base.errors import WireError
from fusionlayer.codecs.lossless.zip import Zip
from fusionlayer.codecs.research.rans import Rans
from tests.codecs.conformance import as_bits, decoded, encoded, same_bits
from tests.codecs.test_zip import NAMED, exponents, gaussian
from tests.loops import looped
from tests.native.abi import threads
from tests.synthetic import bit_patterns

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F16, F32)
CODEC = Rans(header=False)


def filled(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def by_the_book(payload: Tensor, n: int, dtype: torch.dtype) -> np.ndarray:
    """Return the bits of a message's elements, by docs/wire_format.md."""
    head, data = (view.numpy() for view in CODEC.wire(n, dtype).views(payload))
    form, nbytes = head[:8].view(np.uint32)
    word = np.uint32 if dtype is F32 else np.uint16
    if form == 0:
        return data[: n * word().itemsize].view(word)
    blocks = -(-n // 16384)
    frequencies = data[:512].view(np.uint16).astype(int)
    assert frequencies.sum() == 4096
    starts = np.cumsum(frequencies) - frequencies
    symbol_of = np.repeat(np.arange(256), frequencies)
    ends = data[512 : 512 + 4 * blocks].view(np.uint32)
    at = filled(512 + 4 * blocks)
    states = data[at : at + 128 * blocks].view(np.uint32).reshape(blocks, 32).astype(int)
    at += 128 * blocks
    told = data[at : at + n - 64 * (n // 16384)]
    byte = np.zeros(n, dtype=word)
    at += filled(len(told))
    low = data[at : at + 2 * n].view(np.uint16) if dtype is F32 else None
    at += filled(2 * n) if dtype is F32 else 0
    words = iter(data[at : at + nbytes].view(np.uint16).tolist())
    symbols, taken = np.zeros(n, dtype=word), 0
    for block in range(blocks):
        state = states[block].tolist()
        for i in order(min(16384, n - 16384 * block)):
            x = state[i % 256 // 8]
            symbol = int(symbol_of[x % 4096])
            x = int(frequencies[symbol]) * (x // 4096) + x % 4096 - int(starts[symbol])
            if x < 65536:
                x, taken = x << 16 | next(words), taken + 1
            state[i % 256 // 8] = x
            symbols[16384 * block + i] = symbol
        mine = told[16320 * block : 16320 * (block + 1)]
        if n >= 16384 * (block + 1):  # the states of a whole block begin with bytes of its last row
            assert all(x >> 16 == 1 for x in state)
            rows, last = mine[:16128], mine[16128:].reshape(32, 6)
            carried = np.array([(x & 255, x >> 8 & 255) for x in state])
            byte[16384 * block : 16384 * (block + 1)] = np.concatenate([rows, np.hstack([carried, last]).reshape(-1)])
        else:
            assert state == [65536] * 32
            byte[16384 * block :] = mine
        assert taken == ends[block]
    if dtype is F16:
        return symbols << 8 | byte
    if dtype is BF16:
        return byte >> 7 << 15 | symbols << 7 | byte & 127
    assert low is not None
    return byte >> 7 << 31 | symbols << 23 | (byte & 127) << 16 | low


def order(n: int) -> list[int]:
    """Return the numbers of a block's symbols as decoding takes them."""
    turns = [row + 8 * state + turn for row in range(0, n, 256) for turn in range(8) for state in range(32)]
    return [i for i in turns if i < n]


def bits_each(x: Tensor) -> float:
    return 8 * CODEC.used_bytes(encoded(CODEC, x), x.numel(), x.dtype) / x.numel()


def entropy(symbols: np.ndarray) -> float:
    shares = np.bincount(symbols) / len(symbols)
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


@looped("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_description(dtype: torch.dtype) -> None:
    for n in (1, 1000, 5000, 40_001):
        x = torch.cat([gaussian(n, dtype, 0.02)[: n - n // 50], bit_patterns(dtype)[: n // 50 * 3 : 3]])
        payload = encoded(CODEC, x)
        assert (by_the_book(payload, n, dtype) == as_bits(x).numpy().view(f"u{dtype.itemsize}")).all()
        assert n < 5000 or int(payload[0]) == 1, "a Gaussian of this length gets shorter"


@looped("dtype", DTYPES, ids=str)
def test_messages_are_as_short_as_entropy_allows(dtype: torch.dtype) -> None:
    for sigma in (1.0, 0.02, 0.7):
        x = gaussian(1 << 20, dtype, sigma)
        if dtype is F16:
            bound = 8 + entropy(as_bits(x).numpy().view(np.uint16) >> 8)
        else:
            bound = 8 * dtype.itemsize - 8 + entropy(exponents(x))
        assert bound < bits_each(x) < bound + 0.05
        assert bits_each(x) < 8 * Zip(header=False).used_bytes(encoded(Zip(header=False), x), 1 << 20, dtype) / (
            1 << 20
        )


@looped("kind", NAMED)
@looped("dtype", DTYPES, ids=str)
def test_no_data_loses_a_bit_or_gets_longer(kind: str, dtype: torch.dtype) -> None:
    for n in (513, 1024, 70_001):
        x = NAMED[kind](n).to(dtype)
        payload = encoded(CODEC, x)
        assert same_bits(decoded(CODEC, payload, n, dtype), x)
        assert CODEC.used_bytes(payload, n, dtype) <= n * dtype.itemsize + 16


@looped("count", [1, 3])
@looped("dtype", DTYPES, ids=str)
def test_every_bit_pattern_among_others(dtype: torch.dtype, count: int) -> None:
    x = torch.cat([gaussian(400_000, dtype), bit_patterns(dtype), gaussian(400_000, dtype)])
    with threads(count):
        payload = encoded(CODEC, x)
        assert int(payload[0]) == 1
        assert same_bits(decoded(CODEC, payload, x.numel(), dtype), x)
        total = torch.ones(x.numel())
        CODEC.decode_sum(torch.stack([payload, payload]), total, dtype=dtype, add=True)
        assert torch.equal(total.nan_to_num(), (1 + x.float() + x.float()).nan_to_num())


def test_a_table_adds_up_whatever_occurs() -> None:
    """One symbol, all 256, and rare ones beside one that has nearly everything."""
    every = torch.arange(1 << 15).to(torch.int16).view(BF16)
    for x in (every, torch.cat([torch.ones(1 << 17, dtype=BF16), every[::64]]), torch.ones(1 << 15, dtype=BF16)):
        payload = encoded(CODEC, x)
        assert same_bits(decoded(CODEC, payload, x.numel(), BF16), x)
        if int(payload[0]):
            assert int(CODEC.wire(x.numel(), BF16).views(payload)[1][:512].view(torch.int16).sum()) == 4096


def test_what_rounding_leaves_goes_to_the_smallest_of_equal_symbols() -> None:
    x = torch.tensor([1.0, 2.0, 4.0], dtype=BF16).repeat(1 << 14)
    table = CODEC.wire(x.numel(), BF16).views(encoded(CODEC, x))[1][:512].view(torch.int16)
    assert table[127:130].tolist() == [1366, 1365, 1365]


def test_a_message_that_contradicts_itself_is_refused() -> None:
    n = 70_001
    good = encoded(CODEC, gaussian(n))
    head, data = (section.offset for section in CODEC.wire(n, BF16).sections)
    words = data + CODEC.static_bytes(n, BF16) - 16
    states = data + filled(512 + 4 * 5)
    out = torch.empty(n, dtype=BF16)
    places = {
        "form": head,
        "length": head + 4,
        "zeros": head + 9,
        "a frequency": data + 2 * 122,
        "an end": data + 512,
        "the last end": data + 528,
        "a state": states + 5,
        "a state's end": states + 128 * 5 - 1,
        "a word": words + 1000,
    }
    for what, place in places.items():
        bad = good.clone()
        bad[place] ^= 2
        refused = False
        for verb in (CODEC.decode, CODEC.decode_add):
            try:
                verb(bad, out)
            except WireError:
                refused = True
        assert refused or what == "zeros", what
    bad = good.clone()
    bad[head + 9] = 2
    with pytest.raises(WireError, match="form 1"):
        CODEC.used_bytes(bad, n, BF16)
