"""The fused verbs of integer codecs write the bytes of the verbs that they are made of."""

import dataclasses
from itertools import product

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError, WireError
from fusionlayer.codecs import Codec
from fusionlayer.codecs.quantized.integer import Int
from tests.collectives.counting import native_calls
from tests.loops import looped
from tests.native.abi import each_isa
from tests.synthetic import awkward, gradient
from tests.tiers import tiered

from .conformance import DTYPES, blank, encoded, rows, same_bits

SOURCES = [
    Int(bits, group, hadamard, header=False)
    for bits, group, hadamard in product((8, 4, 3, 2), (32, 512), (False, True))
]
TARGETS = [
    Int(4, 128, False, "stochastic", header=False),
    Int(8, 4096, True, header=False),
    Int(3, 64, True, header=False),
    codecs.get("tlq_hs").bare,
]
CPU = torch.device("cpu")


def in_two_steps(source: Codec, target: Codec, messages: Tensor, n: int, residual: Tensor | None) -> Tensor:
    total = torch.empty(n)
    source.decode_sum(messages, total)
    return encoded(target, total, seed=3, offset=target.block, residual=residual)


@looped(
    "source, target",
    tiered(product(SOURCES, TARGETS), lambda source, target: (source.bits < 4) == (target.bits < 4)),
    ids=str,
)
def test_messages_of_one_codec_become_one_of_another(source: Int, target: Int) -> None:
    for n, count in ((1, 1), (31, 0), (4097, 5), (12_500, 2)):
        kept = gradient(n, 9)
        for _ in each_isa():
            for residual in (None, kept):
                messages = (
                    rows(source, count, n, torch.float32, CPU) if count else torch.empty(0, source.wire(n).capacity)
                )
                messages = messages.to(torch.uint8)
                lost, expected_lost = (None if residual is None else residual.clone() for _ in range(2))
                got = blank(target, n, torch.float32, CPU, fill=0xA5)
                given = {"source": source, "seed": 3, "offset": target.block, "residual": lost}
                target.recode(messages, got, n, **given)  # type: ignore[arg-type]
                expected = blank(target, n, torch.float32, CPU, fill=0xA5)
                total = torch.empty(n)
                source.decode_sum(messages, total)
                target.encode(total, expected, seed=3, offset=target.block, residual=expected_lost)
                assert torch.equal(got, expected)
                if lost is not None and expected_lost is not None:
                    assert same_bits(lost, expected_lost)


def test_rows_of_one_codec_become_rows_of_another() -> None:
    """One call of the core makes what one for each row makes; it refuses rows that are too short."""
    n, source, target = 1100, Int(8, 512, header=False), Int(4, 128, rounding="stochastic", header=False)
    messages = rows(source, 5, n, torch.float32, CPU)
    summands = torch.stack([messages, messages.flip(0)], 1)
    starts, kept = [5120, 0], gradient(8000, 3)
    got, lost = torch.zeros(2, target.wire(n).capacity, dtype=torch.uint8), kept.clone()
    with native_calls() as calls:
        target.recode_rows(summands, got, n, starts, source=source, seed=3, residual=lost)
    assert calls == ["fl_recode_rows"]
    for row, start in enumerate(starts):
        wanted, part = blank(target, n, torch.float32, CPU), kept[start : start + n]
        target.recode(summands[:, row], wanted, n, source=source, seed=3, offset=start, residual=part)
        assert torch.equal(got[row], wanted)
    assert same_bits(lost, kept)
    with pytest.raises(WireError, match="cut short"):
        target.recode_rows(summands[..., :100], got, n, starts, source=source)
    with pytest.raises(WireError, match="cut short"):
        target.recode_rows(summands, got[:, :100], n, starts, source=source)


def test_more_messages_than_are_read_side_by_side_and_what_is_not_finite() -> None:
    """Sums of 19 messages, in their order; groups of NaN, of zeros and of the largest values stay what they are."""
    n, source, target = 9_000, Int(8, 512, header=False), Int(4, 128, rounding="stochastic", header=False)
    tensors = [gradient(n, i) * 2.0 ** (i % 7) for i in range(17)] + [awkward(n, 512, torch.float32)] * 2
    for each in tensors:
        each[2048:4096] = 0.0
    tensors[3][600] = torch.nan
    messages = torch.stack([encoded(source, x) for x in tensors])
    for _ in each_isa():
        total, one_by_one = torch.empty(n), torch.zeros(n)
        source.decode_sum(messages, total)
        for message in messages:
            source.decode_add(message, one_by_one)
        assert same_bits(total, one_by_one)
        got = blank(target, n, torch.float32, CPU)
        target.recode(messages, got, n, source=source, seed=3, offset=128)
        assert torch.equal(got, in_two_steps(source, target, messages, n, None))


@looped("dtype", DTYPES)
@looped("codec", [*TARGETS, codecs.get("taco").bare], ids=str)
def test_a_difference_is_encoded_as_if_it_was_taken_before(codec: Codec, dtype: torch.dtype) -> None:
    for n in (0, 1, 129, 5_000):
        x, base = awkward(n, codec.block, torch.float32), gradient(n, 2, dtype)
        for _ in each_isa():
            got, whole = (blank(codec, n, torch.float32, CPU, fill=0xA5) for _ in range(2))
            codec.encode_difference(x, base, got, seed=5, offset=codec.block)
            codec.encode(x - base.float(), whole, seed=5, offset=codec.block)
            assert torch.equal(got, whole)


def test_headers_of_fused_messages_are_checked_and_made() -> None:
    n, source, target = 1000, Int(8, 512), Int(4, 128)
    messages = rows(source, 3, n, torch.float32, CPU)
    payload, difference = (blank(target, n, torch.float32, CPU) for _ in range(2))
    target.recode(messages, payload, n, source=source)
    target.encode_difference(gradient(n, 1), gradient(n, 2), difference)
    for message in (payload, difference):
        target.decode(message, torch.empty(n))
    messages[1, -1] ^= 1
    with pytest.raises(WireError, match="checksum"):
        target.recode(messages, payload, n, source=source)
    with pytest.raises(WireError, match="cut short"):
        bare = dataclasses.replace(source, header=False)
        target.recode(messages[:, :100], payload, n, source=bare)


def test_a_difference_of_other_tensors_is_refused() -> None:
    codec = Int(4, 128, header=False)
    payload = blank(codec, 8, torch.float32, CPU)
    for x, base in ((torch.zeros(8), torch.zeros(7)), (torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8))):
        with pytest.raises(ConfigError, match="expected float32, one shape"):
            codec.encode_difference(x, base, payload)
    with pytest.raises(ConfigError, match="expected a flat contiguous one"):
        codec.encode_difference(torch.zeros(8), torch.zeros(8, dtype=torch.float64), payload)
