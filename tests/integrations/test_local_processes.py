"""Local steps over real processes: sharded models, the process-group backend, and ranks that are killed."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import fusionlayer as fl
from fusionlayer import backend
from tests.harness import checkpoint, outcomes_of, run_ranks
from tests.integrations.test_failures import join
from tests.integrations.test_local import Oracle, adamw, load, make_pair, saved, sgd
from tests.integrations.training import assert_same_on_all_ranks, loss_of, make_model, train, weights
from tests.ranks import on_processes

pytestmark = pytest.mark.medium


def full_weights(model: nn.Module) -> Tensor:
    """Return all parameters, flat and whole; all ranks of a mesh call it together."""
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().reshape(-1) for p in model.parameters()])


# ---- models that the ranks of a node share out, or average in each step ----------------------------------------------


def nodes_by_hand(nodes: int, steps: int) -> Tensor:
    """Return what nodes of two ranks end with that average gradients in each step, and parameters in each second."""
    models = [make_model() for _ in range(nodes)]
    optimizers = [sgd(model.parameters()) for model in models]
    for step in range(steps):
        for number, (model, plain) in enumerate(zip(models, optimizers, strict=True)):
            plain.zero_grad()
            for member in (2 * number, 2 * number + 1):
                (loss_of(model, member, step) / 2).backward()
            plain.step()
        if step % 2:
            average = torch.stack([weights(model) for model in models]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(average.clone(), model.parameters())
    return average


def mesh_of_nodes(world: int) -> DeviceMesh:
    return dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("nodes", "ranks"))


def train_nodes(mesh: DeviceMesh, shard: bool, **options: Any) -> Tensor:
    """Train by FSDP2 or DDP within nodes, and by local steps between them; return the weights, whole."""
    rank = dist.get_rank()
    network = model = make_model()
    if shard:
        fully_shard(model, mesh=mesh["ranks"])
    else:
        model = DistributedDataParallel(network, process_group=mesh["ranks"].get_group())
    optimizer: Any = fl.DistributedOptimizer(
        sgd(network.parameters()), network, group=mesh["nodes"].get_group(), sync=fl.Local(every=2), **options
    )
    train(model, optimizer, rank, range(4))
    found = full_weights(network)
    assert_same_on_all_ranks(found)
    optimizer.close()
    return found


@on_processes(4)
def test_sharded_replicas_resume_from_within_a_fragment(rank: int, world: int) -> None:
    """Save while a fragment of a model's shards is under way, start anew, load: as if nothing had happened."""
    check_page(rank, world)
    mesh = mesh_of_nodes(world)

    def make() -> tuple[nn.Module, Any]:
        model = make_model()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["ranks"])
        sync = fl.Local.streaming(every=4, fragments=2, delay=2)
        group = mesh["nodes"].get_group()
        options = {"codec": "int4", "error_feedback": True, "check_replicas": 1, "group": group, "sync": sync}
        return model, fl.DistributedOptimizer(adamw(model.parameters()), model, **options)

    def state_of(model: nn.Module, optimizer: Any) -> Any:
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, whole)

    model, optimizer = make()
    train(model, optimizer, rank, range(5))
    kept = state_of(model, optimizer)
    assert kept["optimizer"]["fusionlayer"]["local"]["under_way"] and kept["optimizer"]["fusionlayer"]["residuals"]
    train(model, optimizer, rank, range(5, 11))
    own = full_weights(model)
    optimizer.synchronize()
    uninterrupted = full_weights(model)
    assert_same_on_all_ranks(uninterrupted)
    assert not torch.equal(own, uninterrupted), "nodes differ between syncs"
    optimizer.close()

    model, optimizer = make()
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    train(model, optimizer, rank, range(5, 11))
    assert torch.equal(full_weights(model), own)
    optimizer.synchronize()
    assert torch.equal(full_weights(model), uninterrupted)


def check_page(rank: int, world: int) -> None:
    """The code of the page that shards a model."""
    page = (Path(__file__).parents[2] / "docs" / "local.md").read_text()
    (code,) = re.findall(r"^```python\n(mesh = .*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"fl": fl, "torch": torch, "model": make_model(), "nodes": world // 2, "ranks": 2}
    exec(code, names)
    train(names["model"], names["optimizer"], rank, range(4))
    assert_same_on_all_ranks(full_weights(names["model"]))


# ---- users of the backend -------------------------------------------------------------------------------------------


@on_processes(4, backend="fusionlayer")
def test_the_backend_s_users_take_local_steps(rank: int, world: int) -> None:
    """The default group is the backend's. Local steps are between all ranks, and between nodes that share a model."""
    sync = fl.Local.diloco(every=2)
    model, optimizer = make_pair(adamw, sync=sync)
    oracle = Oracle(world, sync, adamw)
    for step in range(5):
        train(model, optimizer, rank, [step])
        oracle.train([step])
        assert torch.equal(weights(model), weights(oracle.models[rank])), f"after step {step}"
    optimizer.close()

    by_hand, start = nodes_by_hand(world // 2, 4), weights(make_model())
    backend.use({"rules": [{"codec": "int8", "group": "mesh_ranks", "min_bytes": 256}]})
    mesh = mesh_of_nodes(world)
    for shard in (True, False):
        found = train_nodes(mesh, shard, codec="int4")
        assert (found - by_hand).norm() < 0.25 * (by_hand - start).norm()
    within, between = (backend.traffic(mesh[name].get_group()).calls for name in ("ranks", "nodes"))
    assert set(within) == {"all_reduce", "reduce_scatter"}
    assert not between, "differences travel by the optimizer's codec, not by a rule"


# ---- ranks that are killed ------------------------------------------------------------------------------------------

LATE: dict[str, Any] = {
    "codec": "int4",
    "error_feedback": True,
    "sync": fl.Local.streaming(every=4, fragments=2, delay=2),
}


def train_until_killed(rank: int, world: int, folder: str) -> tuple[int, ...]:
    """Save while the first fragment is under way, and train on; rank 1 is killed while the next one is."""
    join(rank, world, folder)
    model, optimizer = make_pair(adamw, **LATE)
    train(model, optimizer, rank, range(5))
    Path(folder, f"rank {rank}").write_bytes(saved(model, optimizer))
    train(model, optimizer, rank, [5])
    assert len(optimizer.reducer.policy.local.flights) == 1 and optimizer.reducer.policy.local.flights[0].left == 2
    checkpoint("under way")
    with pytest.raises(fl.TransportError) as error:
        train(model, optimizer, rank, range(6, 16))
    return error.value.ranks


def go_on(rank: int, world: int, folder: str) -> None:
    """Train without an interruption, and from what the killed job has saved."""

    def end(model: nn.Module, optimizer: Any, first: int) -> Tensor:
        train(model, optimizer, rank, range(first, 11))
        own = weights(model)
        optimizer.synchronize()
        assert_same_on_all_ranks(weights(model))
        optimizer.close()
        return torch.cat([own, weights(model)])

    uninterrupted = end(*make_pair(adamw, **LATE), first=0)
    model, optimizer = make_pair(adamw, **LATE)
    load(Path(folder, f"rank {rank}").read_bytes(), model, optimizer)
    assert optimizer.reducer.policy.local.flights, "what was under way was saved"
    assert torch.equal(end(model, optimizer, first=5), uninterrupted)


def test_a_killed_job_goes_on_from_within_a_fragment(tmp_path: Path) -> None:
    killed = {(1, "under way"): signal.SIGKILL}
    outcomes = outcomes_of(train_until_killed, 2, str(tmp_path), backend=None, signals=killed)
    assert outcomes[1].kind == "died", outcomes[1].trace
    assert outcomes[0].value == (1,), outcomes[0].trace or outcomes[0].kind
    run_ranks(go_on, 2, str(tmp_path))
