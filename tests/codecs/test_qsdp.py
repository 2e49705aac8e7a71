"""qsdp: a grid that is shifted at random."""

from __future__ import annotations

import pytest
import torch

from fusionlayer import codecs
from fusionlayer.codecs.qsdp import _draws
from fusionlayer.errors import ConfigError
from fusionlayer.seeds import derive_seed
from tests.synthetic import gradient

pytestmark = pytest.mark.short


@pytest.mark.parametrize("bits", [4, 8])
def test_no_value_is_off_by_more_than_half_a_step(bits: int) -> None:
    codec, x = codecs.get("qsdp", bits=bits).bare, gradient(5000, 1)
    for seed in range(50):
        payload = codec.compress(x, seed=seed)
        steps, shifts, _ = codec.wire(5000).views(payload)
        largest = torch.nn.functional.pad(x, (0, 120)).view(5, -1).abs().amax(1)
        assert torch.equal(steps, largest / (2 ** (bits - 1) - 1.5))
        assert (shifts.abs() <= steps / 2).all()
        error = (codec.decompress(payload, 5000) - x).abs().view(-1)
        assert (error <= steps.repeat_interleave(1024)[:5000] * 0.50001).all()


def test_every_place_between_two_points_of_the_grid_is_hit_in_proportion() -> None:
    """The mean over shifts is the value, of a value anywhere in a step."""
    codec = codecs.get("qsdp", bits=4, group_size=32)
    x = torch.linspace(-1, 1, 32)
    draws = 1500
    mean = torch.stack([codec.decompress(codec.compress(x, seed=seed), 32) for seed in range(draws)]).mean(0)
    step = 1 / 6.5
    assert (mean - x).abs().max() < 5 * step / (12 * draws) ** 0.5


def test_draws_are_of_seed_and_place() -> None:
    draws = torch.cat([_draws(seed, 0, 1000, 1024) for seed in range(10)])
    assert -0.5 <= draws.min() < -0.499 and 0.499 < draws.max() < 0.5
    assert abs(float(draws.mean())) < 0.01 and abs(float(draws.var()) - 1 / 12) < 0.002
    assert torch.equal(_draws(3, 5 * 1024, 7, 1024), _draws(3, 0, 12, 1024)[5:])
    assert len(set(_draws(derive_seed(1), 0, 1000, 32).tolist())) > 990


def test_bits_for_each_element() -> None:
    n = 1 << 20
    for bits in (8, 4):
        form = codecs.get("qsdp", bits=bits).bare.wire(n)
        assert sum(section.plane.nbytes for section in form.sections) * 8 / n == bits + 64 / 1024


@pytest.mark.parametrize("options", [{"bits": 5}, {"group_size": 1000}])
def test_wrong_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="qsdp codec: .*expected"):
        codecs.get("qsdp", **options)
