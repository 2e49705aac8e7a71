"""qsdp: a grid that is shifted at random."""

import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.base.seeds import derive_seed
from fusionlayer.training.weights import both_ways
from tests.loops import looped
from tests.synthetic import gradient


@looped("bits", [4, 8])
def test_no_value_is_off_by_more_than_half_a_step(bits: int) -> None:
    codec, x = codecs.get("qsdp", bits=bits).bare, gradient(5000, 1)
    for seed in range(50):
        payload = codec.compress(x, seed=seed)
        steps, origins, _ = codec.wire(5000).views(payload)
        lowest, highest = torch.stack([torch.stack(part.aminmax()) for part in x.split(1024)]).unbind(1)
        parts = 2**bits - 2
        assert torch.equal(steps, highest / parts - lowest / parts)
        place = (origins - (lowest + highest) / 2) / steps
        assert (place > -1e-3).all() and (place < 1.001).all()
        error = (codec.decompress(payload, 5000) - x).abs().view(-1)
        assert (error <= steps.repeat_interleave(1024)[:5000] * 0.50001).all()


@looped("bits", [4, 8])
def test_gradients_go_up_or_down_at_random(bits: int) -> None:
    """From minimum to maximum, whose codes are the outermost; the mean is the value, each of its own draw."""
    codec = codecs.get("qsdp_gradients", bits=bits, group_size=32).bare
    x = torch.linspace(-1, 2, 40)
    draws, step = 1500, torch.tensor([x[31] - x[0], x[39] - x[32]]) / (2**bits - 1)
    found = torch.stack([codec.decompress(codec.compress(x, seed=seed), 40) for seed in range(draws)])
    step = step.repeat_interleave(torch.tensor([32, 8]))
    assert ((found - x).abs() <= 1.0001 * step).all() and ((found - x).abs().amax(0) > 0.5 * step)[1:31].any()
    torch.testing.assert_close(found[:, [0, 31, 32, 39]], x[[0, 31, 32, 39]].expand(draws, 4), rtol=0, atol=1e-6)
    assert ((found.mean(0) - x).abs() < 5 * step / (4 * draws) ** 0.5 + 1e-6).all()
    middle = found[:, 1:31] - x[1:31]
    assert float(torch.corrcoef(middle.T).nan_to_num().fill_diagonal_(0).abs().max()) < 5 / draws**0.5


def test_a_name_of_the_paper_rounds_gradients_as_the_paper_does() -> None:
    assert both_ways("qsdp", None, None) == ("qsdp", "qsdp_gradients") == both_ways("qsdp", "qsdp", "auto")
    assert both_ways("qsdp", "int8", None) == ("qsdp", "int8"), "it is the name of a codec too"
    assert both_ways(None, "qsdp", None) == (None, "qsdp")


def draws(seed: int, first: int, groups: int, size: int) -> Tensor:
    """Return where in a step the grids of ``groups`` begin, read from origins: with values from -7 to 7 a step is 1."""
    x = torch.linspace(-7, 7, size).repeat(groups)
    codec = codecs.get("qsdp", bits=4, group_size=size).bare
    payload = torch.zeros(codec.wire(len(x)).capacity, dtype=torch.uint8)
    codec.encode(x, payload, seed=seed, offset=first)
    _, origins, _ = codec.wire(len(x)).views(payload)
    return origins


def known_draw(seed: int, element: int) -> float:
    """Return the first 24 bits of SplitMix64 at the place of an element, as a share of 1."""
    state = ((element + 1) * 0x9E3779B97F4A7C15 + derive_seed(seed)) & (1 << 64) - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (1 << 64) - 1
    return ((state ^ (state >> 31)) >> 40) / 2**24


def test_draws_are_of_seed_and_place() -> None:
    found = torch.cat([draws(seed, 0, 1000, 64) for seed in range(10)])
    assert 0 <= found.min() < 0.001 and 0.999 < found.max() < 1
    assert abs(float(found.mean()) - 0.5) < 0.01 and abs(float(found.var()) - 1 / 12) < 0.002
    assert torch.equal(draws(3, 5 * 64, 7, 64), draws(3, 0, 12, 64)[5:])
    assert len(set(draws(derive_seed(1), 0, 1000, 32).tolist())) > 990
    assert draws(7, 0, 3, 64).tolist() == [known_draw(7, 64 * group) for group in range(3)]
