"""Float8 weights of torchao under ``fsdp.compress``, where torchao is installed. Last run: 0.18.0."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fusionlayer as fl
from tests.integrations.training import fill
from tests.ranks import on_processes
from tests.synthetic import gradient
from tests.tiers import engine, long, needs

pytestmark = [pytest.mark.medium, engine, needs("torchao")]

WIDTH = 64


def trained(rank: int, world: int, **codecs: Any) -> tuple[list[Tensor], Any]:
    """Return losses and weights of a model that gathers float8; without ``codecs`` f32, since gloo has no float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    fill(model)
    how = Float8LinearConfig(enable_fsdp_float8_all_gather=bool(codecs), emulate=True)
    convert_to_float8_training(model, config=how)
    mesh = init_device_mesh("cpu", (world,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    compression = fl.fsdp.compress(model, **codecs) if codecs else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        x = gradient(16 * WIDTH, 10 * step + rank).view(16, WIDTH)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if codecs:
            precompute_float8_dynamic_scale_for_fsdp(model)
        found.append(loss.detach())
    return found + [p.full_tensor().detach() for p in model.parameters()], compression  # type: ignore[attr-defined]


@long(guarded_by="tests/integrations/test_fsdp.py::test_weights_of_several_types_travel_as_they_are")
@on_processes(2)
def test_float8_weights_are_sent_as_they_are(rank: int, world: int) -> None:
    plain, _ = trained(rank, world)
    first, compression = trained(rank, world, weights="raw", gradients="raw")
    torch.testing.assert_close(first, plain, rtol=1e-4, atol=1e-5)
    steps, numel = 3, 3 * WIDTH * WIDTH // world
    # A step sends shards in float8, in forward and backward, and gradients in f32.
    assert compression.bytes_sent <= steps * numel * (1 + 1 + 4) + 1000
    for weights in ("auto", "qwd", "int8"):
        found, _ = trained(rank, world, weights=weights, gradients="raw")
        assert all(map(torch.equal, found, first)), weights
    near, _ = trained(rank, world, gradients="int8")
    torch.testing.assert_close(near, first, rtol=0.05, atol=0.02)
    assert not all(map(torch.equal, near, first))
