"""``delta``: the bytes of docs/wire_format.md by a decoder in Python; short messages, exact values, no wrong ones."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionlayer import native
from fusionlayer.base.errors import ConfigError, FusionLayerError, WireError
from fusionlayer.codecs.lossless.delta import Delta
from tests.codecs.conformance import as_bits, same_bits
from tests.loops import looped
from tests.synthetic import bit_patterns, gradient, mixed
from tests.tiers import tiered

CODEC = Delta(header=False)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 16384


def uniform(numel: int, stream: int) -> np.ndarray:
    return mixed(np.arange(numel, dtype=np.uint64) + np.uint64(stream << 40)).astype(np.float64) / 2.0**64


def moved(base: Tensor, share: float, reach: float = 1.0, stream: int = 1) -> Tensor:
    """Return ``base`` with a ``share`` of its elements changed by some steps of their type, about ``reach``."""
    bits, n = as_bits(base).clone(), base.numel()
    steps = 1 + np.floor(-np.log(1 - uniform(n, stream)) * max(0.0, reach - 0.5)).astype(np.int64)
    signed = np.where(uniform(n, stream + 1) < 0.5, steps, -steps) * (uniform(n, stream + 2) < share)
    return bits.add_(torch.from_numpy(signed).to(bits.dtype)).view(base.dtype)


def change(x: Tensor, base: Tensor, codec: Delta = CODEC) -> Tensor:
    payload = torch.zeros(codec.wire(x.numel(), x.dtype).capacity, dtype=torch.uint8)
    codec.encode_change(x, base, payload)
    return payload


def applied(payload: Tensor, base: Tensor, codec: Delta = CODEC) -> Tensor:
    out = torch.full_like(base, 3.0)
    codec.apply_change(payload, base, out)
    return out


def used(payload: Tensor, like: Tensor) -> int:
    return CODEC.used_bytes(payload, like.numel(), like.dtype)


# ---- the format -----------------------------------------------------------------------------------------------------


class Bits:
    """A block's bytes, as docs/wire_format.md reads them."""

    def __init__(self, data: bytes) -> None:
        self.number, self.size, self.at = int.from_bytes(data, "little"), 8 * len(data), 0

    def take(self, width: int) -> int:
        assert self.at + width <= self.size
        taken = self.number >> self.at & ((1 << width) - 1)
        self.at += width
        return taken

    def fields(self, count: int, width: int) -> list[int]:
        values = [0] * count
        for shift in range(0, width, 8):
            self.at = -(-self.at // 8) * 8
            values = [value | self.take(min(8, width - shift)) << shift for value in values]
        return values

    def places(self, n: int, count: int) -> list[int]:
        if count in (0, n):
            return list(range(count))
        if 2 * count > n:
            others = set(self.places(n, n - count))
            return [place for place in range(n) if place not in others]
        low = self.fields(count, width := low_bits(n - count, count))
        gaps = []
        for rest in low:
            zeros = next(zeros for zeros in itertools.count() if self.take(1))
            gaps.append(zeros << width | rest)
        return [int(place) for place in np.cumsum(np.array(gaps) + 1) - 1]

    def numbers(self, count: int) -> list[int]:
        above = self.take(count.bit_length())
        numbers = [1] * count
        if above:
            places, lowest = self.places(count, above), [self.take(1) for _ in range(above)]
            for place, bit, more in zip(places, lowest, self.numbers(above), strict=True):
                numbers[place] = 2 * more + bit
        return numbers


def low_bits(total: int, count: int) -> int:
    return next(k for k in itertools.count() if 493 * (2 * total + count) < 2048 * count << k)


def ordered(bits: int, width: int) -> int:
    return bits ^ ((1 << (width - 1)) - 1) if bits >> (width - 1) else bits


def by_the_book(payload: Tensor, base: Tensor) -> Tensor:
    """Return the elements of a message, by docs/wire_format.md."""
    n, width = base.numel(), 8 * base.element_size()
    head, data = (bytes(view.numpy()) for view in CODEC.wire(n, base.dtype).views(payload))
    word = np.uint32 if width == 32 else np.uint16
    form, rest = np.frombuffer(head, np.uint32)[:2]
    if form == 0:
        return torch.from_numpy(np.frombuffer(data, word)[:n].copy()).view(base.dtype)
    blocks = -(-n // BLOCK)
    out = as_bits(base).numpy().view(word).copy()
    at = 2 * blocks
    for block, entry in enumerate(np.frombuffer(data, np.uint16)[:blocks].tolist()):
        own = out[block * BLOCK : (block + 1) * BLOCK]
        if entry == 0xFFFF:
            own[:] = np.frombuffer(data[at : at + own.nbytes], word)
            at += own.nbytes
        elif entry:
            bits = Bits(data[at : at + entry])
            at += entry
            count, low = bits.take(len(own).bit_length()), bits.take(5)
            places = bits.places(len(own), count)
            lowest = bits.fields(count, low)
            values = [number - 1 << low | rest for number, rest in zip(bits.numbers(count), lowest, strict=True)]
            assert 0 <= bits.size - bits.at < 8
            for place, value in zip(places, values, strict=True):
                folded = value + 1
                difference = -(folded + 1 >> 1) if folded & 1 else folded >> 1
                own[place] = ordered((ordered(int(own[place]), width) + difference) % (1 << width), width)
    assert at == 2 * blocks + rest
    return torch.from_numpy(out).view(base.dtype)


@looped("dtype", DTYPES)
def test_messages_are_those_of_the_book(dtype: torch.dtype) -> None:
    base = gradient(BLOCK + 700, 3, dtype)
    for share, reach in ((0, 1), (0.003, 1), (0.03, 1), (0.15, 1.3), (0.6, 3), (1, 40), (1, 5000), (0.01, 9000)):
        for n in (1, 2, 5, 1000, base.numel()):
            x = moved(base[:n], share, reach)
            payload = change(x, base[:n])
            assert same_bits(by_the_book(payload, base[:n]), x), (share, reach, n)
            assert same_bits(applied(payload, base[:n]), x), (share, reach, n)


# ---- exact ----------------------------------------------------------------------------------------------------------


@looped("dtype", DTYPES)
def test_blocks_all_of_whose_elements_reach_the_same_layers(dtype: torch.dtype) -> None:
    base = gradient(BLOCK + 33, 9, dtype)
    for steps in range(1, 20):
        x = as_bits(base).add(steps).view(dtype)
        payload = change(x, base)
        assert same_bits(applied(payload, base), x), steps
        if steps in (3, 11):
            assert same_bits(by_the_book(payload, base), x)


@looped("dtype", DTYPES)
def test_every_bit_is_kept(dtype: torch.dtype) -> None:
    """NaNs with their payloads, infinities, signed zeros: from each pattern to others near and far, and back."""
    base = bit_patterns(dtype)
    shifted = as_bits(base).roll(1).view(dtype)
    negated = torch.cat([base[:100], -base[100:]])
    for x in (base, shifted, negated, moved(base, 0.05), torch.zeros_like(base), base.flip(0)):
        for one, other in ((x, base), (base, x)):
            for codec in (CODEC, Delta()):
                payload = change(one, other, codec)
                assert same_bits(applied(payload, other, codec), one)
                assert codec.used_bytes(payload, one.numel(), dtype) <= one.nbytes + 16 + 128 * codec.header
    in_place, payload = base.clone(), change(shifted, base)
    CODEC.apply_change(payload, in_place, in_place)
    assert same_bits(in_place, shifted)
    assert used(change(base, base), base) <= 16 + 2 * -(-base.numel() // BLOCK)


def entropy(x: Tensor, base: Tensor) -> float:
    """Return the bits of an element of the differences, as independent of one another, in the order of their values."""
    keys = [np.where(b < 0, b ^ 0x7FFF, b) for b in (as_bits(x).numpy().astype(int), as_bits(base).numpy().astype(int))]
    counts = np.unique(keys[0] - keys[1], return_counts=True)[1] / x.numel()
    return float(-(counts * np.log2(counts)).sum())


@looped("share, reach", [(0.004, 1), (0.025, 1.1), (0.15, 1.3), (0.31, 1.7), (0.56, 3), (0.9, 9)])
def test_messages_are_nearly_as_short_as_the_entropy(share: float, reach: float) -> None:
    """Of differences as training makes them, in bf16."""
    base = gradient(1 << 20, 5, torch.bfloat16)
    x = moved(base, share, reach)
    assert 8 * used(change(x, base), x) / x.numel() < (1.25 if share < 0.01 else 1.1) * entropy(x, base)


def test_small_weights_that_move_far_cost_the_others_nothing() -> None:
    """A step of an optimizer is as large for weights near 0, which pass many values of their type, or their sign."""
    main = gradient(1 << 20, 6) * 0.1
    base, x = main.bfloat16(), (main + 3e-6 * gradient(1 << 20, 7).sign()).bfloat16()
    assert 8 * used(change(x, base), x) / x.numel() < 1.15 * entropy(x, base)


# ---- never wrong ----------------------------------------------------------------------------------------------------


def test_another_base_is_an_error_and_nothing_is_written() -> None:
    base = gradient(3 * BLOCK, 1, torch.bfloat16)
    x = moved(base, 0.02)
    for codec in (CODEC, Delta()):
        payload = change(x, base, codec)
        for place in (0, BLOCK - 1, BLOCK, 3 * BLOCK - 1):
            other = base.clone()
            as_bits(other)[place] ^= 1
            kept = other.clone()
            with pytest.raises(WireError, match="another base.*send the whole values once"):
                codec.apply_change(payload, other, other)
            assert same_bits(other, kept)
    swapped = torch.cat([base[BLOCK : 2 * BLOCK], base[:BLOCK], base[2 * BLOCK :]])
    with pytest.raises(WireError, match="another base"):
        applied(change(x, base), swapped)
    for wrong in (base[:-1], base.half(), base.view(3, -1)):
        with pytest.raises(ConfigError, match="expected a contiguous one of the same type"):
            CODEC.encode_change(x, wrong, payload)


@pytest.mark.parametrize("tries", tiered([10_000, 150_000], lambda tries: tries == 10_000, lambda _: False))
def test_a_damaged_message_is_an_error_and_writes_nothing_elsewhere(tries: int) -> None:
    draw = np.random.default_rng(1)
    n, guard = 1500, 64
    cases = []
    for dtype, (share, reach) in itertools.product(DTYPES, ((0.02, 1), (0.3, 4), (1, 60))):
        base = gradient(n, 2, dtype)
        payload = change(x := moved(base, share, reach), base)
        form = CODEC.wire(n, dtype)
        room = torch.full((n + 2 * guard,), 3.0, dtype=dtype)
        spec = native.CodecParams(native.DELTA).spec(n, dtype)
        end = form.offsets[1] + used(payload, x) - 16
        meaningful = np.array([*range(16), *range(form.offsets[1], end)])
        cases.append((spec, form.offsets, payload, base, x, room, meaningful))
    harmed = 0
    for attempt in range(tries):
        spec, offsets, payload, base, x, room, meaningful = cases[attempt % len(cases)]
        bytes_ = payload.numpy()
        places = meaningful[draw.integers(0, len(meaningful), draw.integers(1, 4))]
        before, changes = bytes_[places].copy(), draw.integers(1, 256, len(places), dtype=np.uint8)
        bytes_[places] ^= changes
        out = room[guard:-guard]
        try:
            native.delta_decode(spec, offsets, payload, base, out)
            assert same_bits(out, x), "wrong weights were accepted"
        except WireError:
            harmed += 1
        bytes_[places[::-1]] = before[::-1]
        if attempt < 2000 or attempt % 100 == 0:
            assert bool((room[:guard] == 3).all() and (room[-guard:] == 3).all())
    assert harmed > 0.95 * tries
    for spec, offsets, payload, base, x, room, _ in cases:
        native.delta_decode(spec, offsets, payload, base, room[guard:-guard])
        assert same_bits(room[guard:-guard], x) and bool((room[:guard] == 3).all() and (room[-guard:] == 3).all())


def test_the_core_refuses_what_it_does_not_know() -> None:
    x = torch.zeros(8)
    payload = torch.zeros(1024, dtype=torch.uint8)
    for params, said in (
        (native.CodecParams(native.DELTA, (1,)), "refused an argument"),
        (native.CodecParams(native.ZIP), "does not have"),
    ):
        with pytest.raises(FusionLayerError, match=said):
            native.delta_encode(params.spec(8, x.dtype), [0, 128], x, None, payload)
        with pytest.raises(FusionLayerError, match=said):
            native.delta_decode(params.spec(8, x.dtype), [0, 128], payload, None, x)
