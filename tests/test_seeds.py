from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionlayer.base.seeds import derive_seed

pytestmark = pytest.mark.short

NUMBERS = st.lists(st.integers(-(2**63), 2**64 - 1), max_size=4)


def test_known_values() -> None:
    """All ranks of a job compute these by themselves: they may not change between versions."""
    assert derive_seed(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 seeded with 0
    assert [derive_seed(1, 2, 3), derive_seed(3, 2, 1), derive_seed(-1)] == [
        0x6AE515C1C0AC7E37,
        0xD62A7F6E291FEF64,
        0xE4D971771B652C20,
    ]


@given(NUMBERS)
def test_seeds_have_64_bits(numbers: list[int]) -> None:
    assert 0 <= derive_seed(*numbers) < 1 << 64


def test_small_numbers_never_collide() -> None:
    """Steps, buckets, ranks, phases: small numbers in every order and of every length."""
    made = [derive_seed(*numbers) for length in range(1, 5) for numbers in product(range(7), repeat=length)]
    assert len(set(made)) == len(made)


def test_every_bit_depends_on_every_number() -> None:
    for position in range(3):
        flips = 0
        for bit in range(64):
            numbers = [11, 22, 33]
            numbers[position] ^= 1 << bit
            flips += (derive_seed(11, 22, 33) ^ derive_seed(*numbers)).bit_count()
        assert 0.45 < flips / 64**2 < 0.55
