"""The formulas of threshold sparsifiers: how many elements they would send of values of a known distribution."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.codecs import TensorState
from fusionlayer.codecs.sparse.sidco import gamma_tail
from fusionlayer.codecs.sparse.sparsifier import ThresholdSparsifier
from fusionlayer.codecs.sparse.sparsifier import bits_of as bits_in_the_package
from fusionlayer.native import selection
from tests.loops import looped

from . import threshold_oracle
from .threshold_oracle import (
    INFINITE,
    bits_of,
    exponential_tail,
    pareto_tail,
    value_of,
)

N, K = 1 << 20, 10_485


@cache
def values(shape: str) -> Tensor:
    """Return N values: normal, Laplace, or Student-t with three degrees of freedom."""
    generator = torch.Generator().manual_seed(17)
    normal = torch.randn(N, generator=generator)
    if shape == "student":
        return normal / torch.randn(3, N, generator=generator).square().mean(0).sqrt()
    if shape == "laplace":
        return normal.sign() * -torch.rand(N, generator=generator).clamp_min(1e-12).log()
    return normal


def sent(name: str, shape: str, seed: int = 0, **options: object) -> tuple[float, float]:
    """Return what the estimate, and what the codec chose after refining it, would send; shares of k."""
    codec = codecs.get(name, **options)
    assert isinstance(codec, ThresholdSparsifier)
    how, sample = codec._chooser(values(shape), K, TensorState(), seed)
    estimates = threshold_oracle.estimates(how, values(shape), torch.zeros(5), sample)
    counts = selection.count_above(values(shape), [bits_of(value) for value in estimates])
    return counts[0] / K, counts[threshold_oracle.settled(how, counts)] / K


def test_bits_and_values() -> None:
    for bits in (bits_of, bits_in_the_package):
        assert [bits(value) for value in (1.0, 0.0, -1.0, 1e-50, math.inf, 1e300, math.nan)] == [
            *(0x3F800000, 1, 1, 1),
            *[INFINITE - 1] * 3,
        ]
    assert value_of(0x40490FDB) == pytest.approx(math.pi, rel=1e-6) and value_of(INFINITE) == math.inf


# ---- redsync --------------------------------------------------------------------------------------------------------


@looped("shape", ["normal", "laplace", "student"])
@looped("name", ["gaussiank", "redsync", "redsync_trim"])
def test_messages_hold_what_the_published_rule_gives(name: str, shape: str) -> None:
    """The rails that replace it by nearly the k largest are an option. Trimming ends with the k largest itself."""
    x = values(shape)

    def share(**options: object) -> float:
        codec = codecs.get(name, **options).bare
        assert isinstance(codec, ThresholdSparsifier)
        return codec.pairs(codec.compress(x), N) / K

    assert share() == (1 if name == "redsync_trim" else sent(name, shape)[1])
    assert 0.8 <= share(guarded=True, slack=1.1) <= 1.1


# ---- dgc ------------------------------------------------------------------------------------------------------------


@looped("shape", ["normal", "laplace", "student"])
def test_dgc_comes_close_whatever_the_distribution(shape: str) -> None:
    draws = [sent("dgc", shape, seed=seed) for seed in range(20)]
    assert all(0.75 <= refined <= 1.25 for _, refined in draws[:1])
    assert all(0.7 <= refined <= 1.4 for _, refined in draws)
    assert len({raw for raw, _ in draws}) == 20, "the sample begins somewhere else with each seed"
    assert abs(sum(raw for raw, _ in draws) / 20 - 1) < 0.1


# ---- sidco ----------------------------------------------------------------------------------------------------------


def test_tails() -> None:
    assert exponential_tail(2.0, 0.01) == pytest.approx(2 * math.log(100))
    # Shape 1/2 is (1 - x / 2 a)^2 beyond x, with a = 3: mean 2, variance 2.
    assert pareto_tail(2.0, 2.0, 0.25) == pytest.approx(3.0)
    for near in (4.0, 4.0 * (1 + 1e-7), 0.0):
        assert pareto_tail(2.0, near, 0.01) == pytest.approx(exponential_tail(2.0, 0.01), rel=1e-5)
    # Gamma with shape 1 is exponential; its mean logarithm is log(mean) minus Euler's constant.
    assert gamma_tail(2.0, 0.5772157, 0.01) == pytest.approx(exponential_tail(2.0, 0.01), rel=0.01)
    assert gamma_tail(1.0, 0.0, 0.01) == pytest.approx(1.0, rel=0.01), "all values are the same"
