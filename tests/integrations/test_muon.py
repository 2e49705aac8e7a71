"""Sharded Muon: torch's own when nothing is compressed, and what compression, checkpoints and FSDP2 may change."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fusionlayer as fl
from fusionlayer.sharded import muon_fsdp
from fusionlayer.sharded.layout import Layout
from fusionlayer.sharded.muon_replicas import MuonOfReplicas
from fusionlayer.transport import Transport
from tests.harness import run_ranks
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0}


class Net(nn.Module):
    """Wide, tall and square matrices, of which two belong to no part; 17 rows are cut unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 24)
        self.up = nn.Linear(24, 40)
        self.square = nn.Linear(40, 40)
        self.down = nn.Linear(40, 17, bias=False)
        self.rare = nn.Linear(17, 17, bias=False)
        self.head = nn.Linear(17, 5)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        x = self.down(torch.tanh(self.square(torch.tanh(self.up(self.embed(x))))))
        logits: Tensor = self.head(self.rare(x) if rare else x)
        return logits


def make_model() -> Net:
    model = Net()
    for i, p in enumerate(model.parameters()):
        p.data.copy_(0.2 * gradient(p.numel(), i).view_as(p))
    return model


def loss_of(model: nn.Module, rank: int, step: int, rare: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    loss: Tensor = model(torch.randint(11, (8,), generator=generator), rare).square().mean()
    return loss


def flat(model: nn.Module) -> Tensor:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def of_replicas(model: nn.Module, transport: Transport, **options: Any) -> MuonOfReplicas:
    optimizer = fl.Muon(model, others=ADAMW, group=transport, **{**OPTIONS, **options})
    assert isinstance(optimizer, MuonOfReplicas)
    return optimizer


def expected(world: int, steps: int, **options: Any) -> Tensor:
    """Return the weights of one process that averages over ``world`` batches and has torch's optimizers."""
    model = make_model()
    hidden = {model.up.weight, model.square.weight, model.down.weight, model.rare.weight}
    others = [p for p in model.parameters() if p not in hidden]
    muon = torch.optim.Muon([p for p in model.parameters() if p in hidden], **options)
    both: list[Any] = [muon, torch.optim.AdamW(others, **ADAMW)]
    for step in range(steps):
        model.zero_grad()
        for rank in range(world):
            (loss_of(model, rank, step) / world).backward()
        for each in both:
            each.step()
    return flat(model)


@looped(
    "world, options",
    [
        (1, {}),
        (2, {"nesterov": False, "weight_decay": 0.0}),
        (2, {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8, "ns_steps": 3}),
        (4, {}),
    ],
)
def test_uncompressed_it_does_what_torch_does(options: dict[str, Any], world: int) -> None:
    options = {**OPTIONS, **options}

    def body(transport: Transport) -> Tensor:
        model = make_model()
        optimizer = of_replicas(model, transport, codec="raw", **options)
        train(model, optimizer, transport.rank, range(4))
        return flat(model)

    for got in over_threads(world, body):
        torch.testing.assert_close(got, expected(world, 4, **options), rtol=1e-4, atol=2e-5)


@looped("update", [None, "int8", "int4"])
@looped("world", [2, 4])
def test_replicas_are_equal_after_each_step_and_near_the_owners(world: int, update: Any) -> None:
    def body(transport: Transport) -> list[Tensor]:
        model, trace = make_model(), []
        optimizer = of_replicas(model, transport, update=update, check_replicas=1)
        for step in range(6):
            train(model, optimizer, transport.rank, range(step, step + 1))
            trace.append(flat(model))
        for part in optimizer._parts:
            lost = (part.main.detach() - part._own)[: part._filled]
            assert lost.any() and lost.abs().max() < 0.05, "far less than six steps"
        return trace

    first, *others = over_threads(world, body)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[-1])


def test_four_bits_and_two_send_ten_times_fewer_bytes_than_f32() -> None:
    def body(transport: Transport, codec: str) -> int:
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
        optimizer = fl.Muon(model, codec=codec, group=transport, lr=0.02)
        model(torch.ones(2, 128)).sum().backward()
        before = transport.bytes_sent
        optimizer.step()
        return transport.bytes_sent - before

    raw, less = (sum(over_threads(2, partial(body, codec=codec))) for codec in ("raw", "int4"))
    assert less < raw / 9.5, "4 bits and 2, and a scale of 32 for 128 elements each, instead of 32 and 32"


def test_what_a_gradient_loses_is_sent_later() -> None:
    """The sums that owners got, and what other ranks still owe, are the gradients of all steps."""

    def body(transport: Transport) -> tuple[Tensor, Tensor]:
        model = nn.Linear(64, 64, bias=False)
        optimizer = of_replicas(model, transport, codec=fl.codecs.get("int", bits=2), lr=0.0)
        (part,) = optimizer._parts
        got = torch.zeros_like(part.main)
        for _ in range(5):
            model.weight.grad = gradient(64 * 64, transport.rank).view(64, 64)
            optimizer.step()
            assert part.main.grad is not None
            got += part.main.grad
        assert part.residual is not None and part.residual.any() == (transport.rank != 0), "the owner sends nothing"
        return got, part.residual

    ranks = over_threads(2, body)
    sums = 2 * torch.cat([got for got, _ in ranks]) + ranks[0][1] + ranks[1][1]
    given = 5 * (gradient(64 * 64, 0) + gradient(64 * 64, 1))
    torch.testing.assert_close(sums[: 64 * 64], given, rtol=1e-4, atol=1e-4)


def test_a_matrix_that_no_rank_uses_keeps_its_values_and_what_is_owed() -> None:
    def body(transport: Transport) -> None:
        model = make_model()
        optimizer = of_replicas(model, transport)
        (part, _), place = optimizer._parts, optimizer._parts[0].layout.slices[3]
        train(model, optimizer, transport.rank, range(2))
        assert part.residual is not None
        assert part.residual[place].any() == (3 not in part.layout.owned(transport.rank))
        before, owed = model.rare.weight.detach().clone(), part.residual[place].clone()
        momentum = optimizer.state_dict()[f"rank {transport.rank} of 2"]["optimizer"]["state"][0]["momentum_buffer"]
        kept = momentum.clone()
        optimizer.zero_grad()
        loss_of(model, transport.rank, 2, rare=False).backward()
        optimizer.step()
        assert torch.equal(model.rare.weight, before) and torch.equal(part.residual[place], owed)
        for i, own in part.layout.owned(transport.rank).items():
            assert torch.equal(momentum[own], kept[own]) is (i == 3)

    over_threads(2, body)


@looped("size, whole", [(1, True), (3, True), (8, True), (3, False)])
def test_owners_have_whole_matrices_of_about_equal_size(size: int, whole: bool) -> None:
    numels = (400, 10, 300, 250, 90, 400, 1)
    layout = Layout(numels, size, 32, whole)
    covered = torch.zeros(size * layout.chunk)
    for place, numel in zip(layout.slices, numels, strict=True):
        assert place.stop - place.start == numel
        covered[place] += 1
    assert covered.max() == 1 and covered.sum() == sum(numels) and layout.chunk % 32 == 0
    filled = [layout.filled(rank) for rank in range(size)]
    assert not any(covered.view(size, -1)[rank, filled[rank] :].any() for rank in range(size))
    if whole:
        assert sorted(i for rank in range(size) for i in layout.owned(rank)) == [*range(len(numels))]
        assert max(filled) <= max(400, -(-sum(numels) // size) + 100)
    other = Layout(numels, 2, 32, whole)
    assert torch.equal(other.moved(layout.moved(covered, other), layout), covered)


def owed_by(optimizer: Any) -> Tensor:
    """Return the error feedback of a rank, parameter by parameter."""
    parts = [part for part in optimizer._parts if part.residual is not None]
    return torch.cat([part.residual[place] for part in parts for place in part.layout.slices] or [torch.zeros(1)])


@looped("before, after", [(2, 2), (2, 3), (4, 2), (3, 1)])
@looped("codec", ["raw", "int4"])
def test_a_checkpoint_loads_on_any_number_of_ranks(codec: str, before: int, after: int, tmp_path: Path) -> None:
    """On as many ranks with the same bits; on others ``raw`` gives torch's weights, and what is owed stays."""
    folder = tmp_path / f"{codec} {before} {after}"

    def make(transport: Transport) -> tuple[Net, Any]:
        model = make_model()
        return model, of_replicas(model, transport, codec=codec)

    def save(transport: Transport) -> tuple[dict[str, Any], Tensor, Any]:
        model, optimizer = make(transport)
        train(model, optimizer, transport.rank, range(3))
        fl.checkpoint.save_ranks(folder, optimizer=optimizer, group=transport)
        saved = {name: p.detach().clone() for name, p in model.state_dict().items()}
        owed = owed_by(optimizer) / before
        train(model, optimizer, transport.rank, range(3, 6))
        return saved, flat(model), owed

    def load(transport: Transport) -> tuple[Tensor, Any]:
        model, optimizer = make(transport)
        model.load_state_dict(saved)
        fl.checkpoint.load_ranks(folder, optimizer=optimizer, group=transport)
        owed = owed_by(optimizer) / after
        for step in range(3, 6):
            optimizer.zero_grad()
            for rank in range(transport.rank, before if after == 1 else after, after):
                (loss_of(model, rank, step) / (before if after == 1 else 1)).backward()
            optimizer.step()
        return flat(model), owed

    ranks = over_threads(before, save)
    saved = ranks[0][0]
    loaded = over_threads(after, load)
    if before == after:
        assert all(torch.equal(mine, ranks[0][1]) for mine, _ in loaded)
    elif after == 1 and codec == "raw":
        torch.testing.assert_close(loaded[0][0], ranks[0][1], rtol=1e-4, atol=2e-5)
    assert all(torch.equal(mine, loaded[0][0]) for mine, _ in loaded)
    owed_before, owed_after = (sum(each[-1] for each in of) for of in (ranks, loaded))
    assert (codec == "raw" or after == 1) is not bool(owed_after.any())
    if after > 1:
        torch.testing.assert_close(owed_after, owed_before, rtol=1e-4, atol=1e-6)


@on_threads(1)
def test_the_rule_leaves_embeddings_and_heads_to_adamw(transport: Transport) -> None:
    def chosen(model: Any, **options: Any) -> list[int]:
        optimizer = fl.Muon(model, group=transport, **options)
        return [p.numel() for group in optimizer.param_groups if "momentum" in group for p in group["params"]]

    model = make_model()
    assert chosen(model) == [24 * 40, 40 * 40, 40 * 17, 17 * 17]
    assert chosen(make_model().named_parameters()) == chosen(model)
    assert chosen(make_model(), matrices=lambda name, p: name == "head.weight") == [17 * 5]
    model.square.weight.requires_grad_(False)
    model.up.to(torch.bfloat16)
    assert chosen(model) == [24 * 40, 40 * 17, 17 * 17]
    tied = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9, bias=False), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    assert chosen(tied) == [64]


@looped(
    "arguments, message",
    [
        ({"codec": "topk"}, "sparse codec"),
        ({"codec": "int9"}, "int9"),
        ({"update": "powersgd"}, "sparse weights.*dense codec"),
        ({"lr": -1}, "torch.optim.Muon refuses.*Learning rate"),
        ({"adjust_lr_fn": "best"}, "torch.optim.Muon refuses.*best"),
        ({"mometum": 0.9}, "torch.optim.Muon refuses.*mometum"),
        ({"others": {"betas": 3}}, "torch.optim.AdamW refuses"),
        ({"matrices": lambda name, p: True}, "torch.optim.Muon refuses.*2D"),
        ({"matrices": lambda name, p: False}, "no matrix among 9 parameters; give matrices="),
    ],
)
@on_threads(1)
def test_wrong_arguments_are_refused(transport: Transport, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fl.ConfigError, match=message):
        fl.Muon(make_model(), group=transport, **arguments)


@on_threads(1)
def test_other_mistakes_are_refused(transport: Transport) -> None:
    model = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 8))
    optimizer = fl.Muon(model, group=transport)
    with pytest.raises(fl.UsageError, match="gradient is sparse"):
        model(torch.tensor([1])).sum().backward()
    with pytest.raises(fl.UsageError, match="takes all parameters when it is made"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    with pytest.raises(fl.ConfigError, match="AdamW, SGD or fl.Muon"):
        fl.ShardedOptimizer(nn.Linear(2, 2, bias=False).parameters(), torch.optim.Muon, group=transport)


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------


def of_shards(world: int, codec: str, replicas: int = 1) -> tuple[Net, Any]:
    model = make_model()
    sizes = (replicas, world // replicas)[replicas == 1 :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[replicas == 1 :])
    for module in (model.square, model.down, model):
        fully_shard(module, mesh=mesh)
    return model, fl.Muon(model, codec=codec, others=ADAMW, **OPTIONS)


def shards_trained(rank: int, world: int, codec: str, steps: int, replicas: int = 1) -> tuple[Tensor, float]:
    model, optimizer = of_shards(world, codec, replicas)
    train(model, optimizer, rank, range(steps))
    return flat(model), sum(loss_of(model, rank, step).item() for step in range(100, 104))


@pytest.mark.medium
@looped("world, replicas", [(2, 1), (4, 1), (4, 2)])
def test_shards_do_what_torch_does(world: int, replicas: int) -> None:
    reference = expected(world, 4, **OPTIONS)
    for got, _ in run_ranks(shards_trained, world, "raw", 4, replicas):
        torch.testing.assert_close(got, reference, rtol=1e-4, atol=2e-5)


@pytest.mark.medium
def test_replicas_of_shards_in_four_bits_are_equal() -> None:
    found = [got for got, _ in run_ranks(shards_trained, 4, "int4", 4, 2)]
    assert all(torch.equal(got, found[0]) for got in found)


@pytest.mark.medium
def test_shards_in_four_bits_learn_as_much() -> None:
    begun, raw, int4 = (run_ranks(shards_trained, 2, codec, n) for codec, n in (("raw", 0), ("raw", 20), ("int4", 20)))
    assert torch.equal(int4[0][0], int4[1][0]) and not torch.equal(int4[0][0], raw[0][0])
    for (_, before), (_, whole), (_, less) in zip(begun, raw, int4, strict=True):
        assert less - whole < 0.1 * (before - whole)


def shards_saved(rank: int, world: int, folder: str) -> tuple[Tensor, Tensor]:
    model, optimizer = of_shards(world, "int4")
    train(model, optimizer, rank, range(3))
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    return flat(model), _states(optimizer)


def shards_loaded(rank: int, world: int, folder: str) -> tuple[Tensor, Tensor]:
    model, optimizer = of_shards(world, "int4")
    of_model, of_optimizer = get_state_dict(model, optimizer)
    found: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    result = flat(model), _states(optimizer)
    train(model, optimizer, rank, range(3, 5))
    return result


def _states(optimizer: Any) -> Tensor:
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    assert dist.is_initialized()
    return torch.cat([s[key].full_tensor().flatten() for s in states for key in ("momentum_buffer", "owed")])


def shards_owed(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Return what this owner got in five steps, and what this rank owes, of one matrix."""
    got = torch.zeros(64, 64)

    def update(direction: Tensor, group: dict[str, Any]) -> Tensor:
        return got.add_(direction).mul(0)

    model, mesh = nn.Linear(64, 64, bias=False), init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh)
    optimizer = fl.Muon(model, codec=fl.codecs.get("int", bits=2), lr=0.0, momentum=0.0)
    with patch.object(muon_fsdp, "_update", update):
        for _ in range(5):
            whole = gradient(64 * 64, 0).view(64, 64)
            model.weight.grad = distribute_tensor(whole, mesh, [Shard(0)])
            optimizer.step()
    return got, optimizer.state[model.weight]["owed"].full_tensor()


@pytest.mark.medium
def test_what_momentum_loses_is_sent_later() -> None:
    ranks = run_ranks(shards_owed, 2)
    owed = ranks[0][1]
    assert owed.any()
    given = 5 * gradient(64 * 64, 0).view(64, 64)
    torch.testing.assert_close(sum(got for got, _ in ranks) + owed, given, rtol=1e-4, atol=1e-4)


@pytest.mark.medium
@looped("after", [2, 3])
def test_states_of_shards_load_on_another_number_of_ranks(after: int, tmp_path: Path) -> None:
    folder = str(tmp_path / str(after))
    weights, states = run_ranks(shards_saved, 2, folder)[0]
    assert states.any()
    for got in run_ranks(shards_loaded, after, folder):
        assert torch.equal(got[0], weights) and torch.equal(got[1], states)


def refused(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(fl.ConfigError, match="sharded by rows over one mesh, of shards or of replicas and shards"):
        fl.Muon(model)
    with pytest.raises(fl.ConfigError, match="the mesh says which ranks there are"):
        fl.Muon(model, group=dist.group.WORLD)
    plain = nn.Linear(8, 8)
    fully_shard(plain, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(fl.ConfigError, match="cannot send topk"):
        fl.Muon(plain, codec="topk")


@pytest.mark.medium
def test_meshes_and_codecs_that_shards_cannot_have_are_refused() -> None:
    run_ranks(refused, 2)
