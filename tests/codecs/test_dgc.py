"""What only ``dgc`` has: momentum correction, factor masking, clipping, warm-up."""

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs import TensorState
from fusionlayer.codecs.sparse.dgc import DGC, clipping, warm_up_density
from tests.loops import looped
from tests.synthetic import gradient

N = 3000


def send(codec: DGC, x: Tensor, state: TensorState, **options: float) -> Tensor:
    """Return what was sent of ``x``."""
    payload = torch.zeros(codec.bare.wire(x.numel()).capacity, dtype=torch.uint8)
    codec.bare.encode_tensor(x, payload, state, **options)
    return codec.bare.decompress(payload, x.numel())


@looped("reuse", [1, 4])
@looped("nesterov", [False, True])
def test_momentum_is_accumulated_and_masked_where_it_was_sent(nesterov: bool, reuse: int) -> None:
    codec = DGC(0.02, slack=1.5, reuse=reuse, momentum=0.9, nesterov=nesterov)
    state = TensorState(torch.zeros(N))
    u, v, m, scale = torch.zeros(N), torch.zeros(N), torch.tensor(0.9), torch.tensor(0.5)
    for step in range(12):
        x = gradient(N, step)
        s = x * scale
        if nesterov:
            u = (u + s) * m
            v = v + (u + s)
        else:
            u = m * u + s
            v = v + u
        out = send(codec, x, state, scale=0.5, seed=step)
        sent = out != 0
        assert codec.target(N) / 4 <= sent.sum() <= codec.capacity(N)
        assert torch.equal(out, torch.where(sent, v, torch.zeros(())))
        v, u = torch.where(sent, 0, v), torch.where(sent, 0, u)
        assert torch.equal(state.residual, v) and torch.equal(state.tensors["velocity"], u)


def test_dense_momentum_is_that_of_sgd() -> None:
    """With everything sent in every step masking makes it plain SGD."""
    codec, state = DGC(1.0, momentum=0.9), TensorState(torch.zeros(N))
    for step in range(3):
        assert torch.equal(send(codec, gradient(N, step), state), gradient(N, step))


def test_momentum_needs_the_memory_of_a_tensor() -> None:
    for codec in (codecs.get("dgc", momentum=0.9), codecs.get("dgc", clip_norm=1.0)):
        with pytest.raises(ConfigError, match="ahead of fusion"):
            codec.compress(torch.ones(10))
        payload = codecs.get("dgc").bare.compress(torch.ones(10))
        with pytest.raises(ConfigError, match="ahead of fusion"):
            codec.bare.recode(payload.unsqueeze(0), payload.clone(), 10)


def test_clipping_leaves_each_rank_its_part() -> None:
    for norm, ranks, factor in ((3.0, 1, 1.0), (2.0, 4, 1.0), (8.0, 1, 0.5), (8.0, 4, 0.25)):
        assert clipping(torch.tensor(norm), 4.0, ranks) == factor
    x = gradient(N, 1, torch.bfloat16)
    norm = float(x.double().norm())
    for ranks, scale in ((1, 1.0), (4, 0.25)):
        given = send(DGC(1.0, clip_norm=norm / 8), x, TensorState(), scale=scale, ranks=ranks)
        expected = min(norm * scale, norm / 8 / ranks**0.5)
        assert float(given.double().norm()) == pytest.approx(expected, rel=1e-5)
    untouched = send(DGC(1.0, clip_norm=norm * 1.01), x, TensorState())
    assert torch.equal(untouched, x.float())


def test_densities_fall_exponentially_during_warm_up() -> None:
    assert [round(warm_up_density(0.001, stage, 4), 4) for stage in range(5)] == [0.2512, 0.0631, 0.0158, 0.004, 0.001]
    codec = DGC(0.001, momentum=0.9, warmup_steps=10, warmup_stages=4)
    steps = [codec.at_step(step) for step in range(12)]
    assert all(isinstance(each, DGC) and each.momentum == 0.9 for each in steps)
    assert [round(each.options["density"], 3) for each in steps] == [0.251] * 3 + [0.063] * 2 + [0.016] * 3 + [
        0.004
    ] * 2 + [0.001] * 2
    assert steps[10] is codec and codec.at_step(10**9) is codec
    assert steps[0] == steps[2] != steps[3] and steps[0].at_step(0) is steps[0]
    plain = codecs.get("dgc")
    assert plain.at_step(0) is plain
