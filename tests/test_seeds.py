from itertools import product

from fusionlayer.base.seeds import derive_seed


def test_known_values() -> None:
    """All ranks of a job compute these by themselves: they may not change between versions."""
    assert derive_seed(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 seeded with 0
    assert [derive_seed(1, 2, 3), derive_seed(3, 2, 1), derive_seed(-1)] == [
        0x6AE515C1C0AC7E37,
        0xD62A7F6E291FEF64,
        0xE4D971771B652C20,
    ]


def test_small_numbers_never_collide() -> None:
    """Steps, buckets, ranks, phases: small numbers in every order and of every length."""
    made = [derive_seed(*numbers) for length in range(1, 5) for numbers in product(range(7), repeat=length)]
    assert len(set(made)) == len(made)
