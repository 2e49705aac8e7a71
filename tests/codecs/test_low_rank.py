"""Factors: orthonormal rows and products whose bits no library decides."""

from fractions import Fraction

import numpy as np
import torch

from fusionlayer import codecs
from fusionlayer.codecs.lowrank.factors import _gram, orthonormal, product, random_factor, square_shape
from tests.loops import looped
from tests.synthetic import gradient


@looped("condition", [1.0, 1e2, 1e4])
def test_rows_become_orthonormal_and_span_the_same(condition: float) -> None:
    common = gradient(300, 1)
    factors = torch.stack([common + gradient(300, i + 2) / condition for i in range(4)])
    found = orthonormal(factors[None])[0].double()
    assert torch.allclose(found @ found.T, torch.eye(4, dtype=torch.float64), atol=2e-6)
    left = factors.double() - factors.double() @ found.T @ found
    assert left.norm() < 1e-5 * factors.norm()


def test_what_depends_on_rows_before_vanishes_and_what_is_not_finite_surfaces() -> None:
    a, b = gradient(50, 1), gradient(50, 2)
    huge, tiny = torch.stack([a, b]) * 2.0**100, torch.stack([a, b]) * 2.0**-130
    cases = torch.stack([torch.stack([a, 2 * a, b]), torch.zeros(3, 50), torch.full((3, 50), torch.inf)])
    depends, zeros, infinite = orthonormal(cases)
    assert depends.any(1).tolist() == [True, False, True] and not zeros.any() and infinite.isnan().all()
    for scaled in (huge, tiny):
        found = orthonormal(scaled[None])[0]
        assert torch.allclose(found @ found.T, torch.eye(2), atol=1e-5)


def test_sums_of_products_are_exact() -> None:
    """So their bits cannot depend on the order in which a library adds; here, against fractions."""
    rows = gradient(2 * 1000, 3).double().view(1, 2, 1000)
    found = _gram(rows)[0].tolist()
    assert found[0][1] == found[1][0]
    for i, j in ((0, 0), (0, 1), (1, 1)):
        pairs = zip(rows[0, i].tolist(), rows[0, j].tolist(), strict=True)
        exact = sum(Fraction(x) * Fraction(y) for x, y in pairs)
        assert abs(Fraction(found[i][j]) - exact) <= abs(exact) * Fraction(1, 1 << 42)


@looped("length", [1000, 1024, 1025, 65_536])
def test_sums_of_the_largest_products_need_no_more_bits_than_there_are(length: int) -> None:
    """All near 1 and of one sign: with a bit more in each integer the sums would depend on their order."""
    rows = (1.0 - gradient(2 * length, 7).double().abs() / 64).view(1, 2, length)
    found = _gram(rows)
    for order in (torch.arange(length - 1, -1, -1), torch.randperm(length, generator=torch.Generator().manual_seed(1))):
        assert torch.equal(_gram(rows[..., order]), found)
    for i, j in ((0, 0), (0, 1)):
        pairs = zip(rows[0, i].tolist(), rows[0, j].tolist(), strict=True)
        exact = sum(Fraction(x) * Fraction(y) for x, y in pairs)
        assert abs(Fraction(found[0, i, j].item()) - exact) <= exact * Fraction(1, 1 << 34)


def test_a_factor_has_the_same_bits_alone_among_others_and_with_more_threads() -> None:
    factors = gradient(3 * 4 * 700, 4).view(3, 4, 700)
    together = orthonormal(factors)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(torch.cat([orthonormal(each[None]) for each in factors]), together)
        assert torch.equal(orthonormal(factors.flip(2)), together.flip(2)), "the order of elements makes no difference"
    finally:
        torch.set_num_threads(threads)


@looped("shape", [(1, 1), (7, 13), (3, 70000), (70000, 3)])
def test_products_add_their_terms_in_order(shape: tuple[int, int]) -> None:
    left, right = gradient(3 * shape[0], 5).view(3, -1), gradient(3 * shape[1], 6).view(3, -1)
    out = torch.empty(shape)
    product(left, right, out)
    expected = np.zeros(shape, dtype=np.float32)
    for a, b in zip(left.numpy(), right.numpy(), strict=True):
        expected += np.outer(a, b)
    assert np.array_equal(out.numpy(), expected)


def test_squares_have_room_and_starts_their_own_numbers() -> None:
    assert [square_shape(n) for n in (0, 1, 2, 5, 9, 10, 1000)] == [
        *((1, 0), (1, 1), (2, 1), (3, 2), (3, 3), (4, 3), (32, 32))
    ]
    start = random_factor(2, 5000, 1, 2)
    assert start.shape == (2, 5000) and not torch.equal(start, random_factor(2, 5000, 1, 3))
    assert -1 <= start.min() < -0.99 and 0.99 < start.max() < 1 and abs(float(start.mean())) < 0.02


def test_a_message_alone_has_all_of_a_tensor_of_that_rank() -> None:
    x = torch.empty(40, 40)
    product(gradient(2 * 40, 7).view(2, -1), gradient(2 * 40, 8).view(2, -1), x)
    codec = codecs.get("powersgd", rank=2)
    back = codec.decompress(codec.compress(x), x.shape)
    assert (back - x).norm() < 1e-5 * x.norm()
    assert codec.bare.wire(1600).capacity == 2 * 384, "two factors of 80 f32 each"
