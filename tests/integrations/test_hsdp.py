"""FSDP2 on meshes of replicas and shards: the all-reduce between replicas, its error feedback, and checkpoints."""

import hashlib
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError
from fusionlayer.scheduler import Memory
from fusionlayer.sharded.fsdp_compression import FSDPCompression
from fusionlayer.training.parameters import local_part
from tests.harness import checkpoint, outcomes_of, run_ranks
from tests.integrations.test_fsdp import POLICIES, batch, full, make_model, same, sharded, train
from tests.ranks import on_processes
from tests.tiers import exhaustive

pytestmark = pytest.mark.medium

POLICIES["reduced in bf16"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def same_over(x: Tensor, group: dist.ProcessGroup) -> bool:
    every = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(every, x.detach().contiguous(), group=group)
    return all(torch.equal(other, every[0]) for other in every)


def replicas_agree(tensors: Iterable[Tensor], mesh: DeviceMesh) -> bool:
    flat = torch.cat([local_part(x.detach()).float().flatten() for x in tensors])
    return same_over(flat, mesh.get_group("replicate"))


def backward(model: nn.Module, step: int, rank: int) -> list[Tensor]:
    """Return this rank's gradients of a step that nothing is learnt in."""
    model.zero_grad()
    x, y = batch(rank, step)
    (model(x).float() - y).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def accumulate_and_clip(model: nn.Module, steps: int) -> list[Tensor]:
    """Return losses, norms and weights of steps of two micro-batches, of which replicas exchange the sum."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found: list[Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in (0, 1):
            model.set_requires_all_reduce(part == 1)  # type: ignore[operator]
            x, y = batch(dist.get_rank(), 2 * step + part)
            loss = (model(x).float() - y).square().mean()
            loss.backward()
            found.append(loss.detach())
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())  # type: ignore[attr-defined]
        optimizer.step()
    return found + full(model.parameters())


@on_processes(4)
def test_replicas_train_as_torch_s_own_and_agree_with_lossy_codecs(rank: int, world: int) -> None:
    """Rows are uneven: 65 over two shards."""
    mesh = mesh_of(2, 2)
    for policy in ("f32", "bf16", "reduced in bf16", "f16"):
        native = accumulate_and_clip(sharded(mesh, policy), 3)
        for codec in ("raw", "auto"):
            model = sharded(mesh, policy)
            compression = fl.fsdp.compress(model, None, None, replicas=codec)
            assert same(accumulate_and_clip(model, 3), native), (policy, codec)
            assert compression.bytes_sent == compression.bytes_between_replicas > 0
            assert compression.replicas is not None and compression.state_dict().keys() == {"counts"}
    model = sharded(mesh)
    fl.fsdp.compress(model, None, None, replicas="int4")
    assert fl.fsdp.compress(model, None, None, replicas=None).replicas is None, "torch's group is back"
    assert same(accumulate_and_clip(model, 3), accumulate_and_clip(sharded(mesh), 3))

    exact = torch.cat([local_part(g).flatten() for g in backward(sharded(mesh), 0, rank)])
    ways: list[tuple[Any, str | None, float]] = [
        ("int8", None, 0.02),
        ("int4", "two_shot", 0.3),
        (fl.codecs.get("int", bits=4, rounding="stochastic"), "ring", 0.6),
        (fl.codecs.get("topk", density=0.3), None, 0.9),
        ("onebit", None, 2.0),
        (fl.codecs.get("powersgd", rank=4, warmup_steps=0), None, 1.1),
    ]
    for codec, algorithm, bound in ways:
        model = sharded(mesh)
        fl.fsdp.compress(model, None, None, replicas=codec, algorithm=algorithm)
        found = backward(model, 0, rank)
        lost = torch.cat([local_part(g).flatten() for g in found]) - exact
        assert 0 < float(lost.norm()) < bound * float(exact.norm()), codec
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        train(model, optimizer, range(3))
        assert replicas_agree(model.parameters(), mesh), codec


def shard_elements(model: nn.Module) -> int:
    """Return how many elements a rank has of the module's flat shards, padding included."""
    return sum(p._sharded_param_data.numel() for p in params_of(model))


def params_of(model: nn.Module) -> list[Any]:
    found = []
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state") and (group := module._get_fsdp_state()._fsdp_param_group):
            found += group.fsdp_params
    return found


@on_processes(4)
def test_error_feedback_sends_later_what_was_lost(rank: int, world: int) -> None:
    """The mean of what was applied for one gradient goes to that gradient; without feedback it does not."""
    mesh, steps = mesh_of(2, 2), 16
    exact = torch.cat([local_part(g).flatten() for g in backward(sharded(mesh), 0, rank)])
    lost = {}
    for bits in (32, 8):
        keep = patch("fusionlayer.sharded.fsdp_replicas.Memory", lambda _, bits=bits: Memory(bits))
        for feedback in (None, False):
            model = sharded(mesh)
            with keep:
                compression = fl.fsdp.compress(model, None, None, replicas="int4", error_feedback=feedback)
            total = torch.zeros_like(exact)
            for _ in range(steps):
                total += torch.cat([local_part(g).flatten() for g in backward(model, 0, rank)])
            lost[bits, feedback] = float((total / steps - exact).norm() / exact.norm())
            if feedback is None:
                state = compression.state_dict()
                owed = torch.cat(
                    [local_part(state[f"residual.{name}"]).flatten() for name, _ in model.named_parameters()]
                )
                off = (total + owed - steps * exact).norm() / (steps * exact).norm()
                assert off < (1e-5 if bits == 32 else 2e-3), "sent and owed are what was given"
                assert same_over(owed, mesh.get_group("replicate"))
        assert lost[bits, None] < lost[bits, False] / 4, lost
    # Messages between replicas: int4 in one shot, once for each module.
    before = compression.bytes_between_replicas
    backward(model, 0, rank)
    sent = compression.bytes_between_replicas - before
    n = shard_elements(model)
    assert n / 2 < sent < 0.65 * n + 4096, (sent, n)
    unused(mesh, rank)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(24, 6), nn.Linear(24, 6)
        self.takes_all = True

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + (self.unused(x) if self.takes_all else 0)


def unused(mesh: DeviceMesh, rank: int) -> None:
    """Without a gradient of each parameter a module's sum is sent as it is; a frozen one does not count."""
    found = []
    for codec in (None, "int4"):
        model = Unused()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        fully_shard(model, mesh=mesh)
        compression = fl.fsdp.compress(model, None, None, replicas=codec)
        backward(model, 0, rank)
        owed = compression.state_dict().get("residual.used.weight")
        model.takes_all = False
        found.append([local_part(g).clone() for g in backward(model, 1, rank)])
    assert same(*found) and len(found[0]) == 2
    assert owed is not None and torch.equal(
        local_part(compression.state_dict()["residual.used.weight"]), local_part(owed)
    )
    model.unused.requires_grad_(False)
    assert not same(found[0], map(local_part, backward(model, 1, rank)))


# ---- a lost replica, and a new start from a checkpoint ----------------------------------------------------------


class Job:
    def __init__(self, replicas: int, shards: int) -> None:
        self.mesh = mesh_of(replicas, shards)
        self.model = sharded(self.mesh, "bf16")
        rotated = fl.codecs.get("int", bits=4, hadamard=True)  # it spreads noise into padding
        self.compression = fl.fsdp.compress(self.model, "qwd", "int8", replicas=rotated)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def train(self, *steps: int) -> None:
        train(self.model, self.optimizer, steps)

    def states(self) -> dict[str, object]:
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "compression": self.compression}

    def load(self, folder: str) -> None:
        found: dict[str, Any] = self.states()
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    def digest(self) -> str:
        parts = [*self.model.parameters(), *owed(self.compression)]
        data = b"".join(local_part(x.detach()).contiguous().numpy().tobytes() for x in parts)
        return hashlib.sha256(data).hexdigest()


def owed(compression: FSDPCompression) -> list[Tensor]:
    return [x for name, x in compression.state_dict().items() if name.startswith("residual.")]


def train_until_killed(rank: int, world: int, folder: str) -> None:
    fl.init()
    job = Job(2, 2)
    job.train(*range(3))
    dcp.save(job.states(), checkpoint_id=f"{folder}/saved")
    everything = full(owed(job.compression))
    assert any(bool(x.count_nonzero()) for x in everything)
    if rank == 0:
        torch.save(everything, f"{folder}/owed")
    job.train(3, 4)
    Path(folder, f"digest {rank}").write_text(job.digest())
    job.model[2].register_full_backward_pre_hook(lambda *_: checkpoint("backward"))  # type: ignore[operator]
    job.train(5, 6)


def go_on(rank: int, world: int, folder: str) -> None:
    job = Job(2, 2)
    job.load(f"{folder}/saved")
    job.train(3, 4)
    assert job.digest() == Path(folder, f"digest {rank}").read_text()


def go_on_elsewhere(rank: int, world: int, folder: str) -> None:
    for replicas in (3, 1):
        job = Job(replicas, world // replicas)
        job.load(f"{folder}/saved")
        found = full(owed(job.compression))
        expected = torch.load(f"{folder}/owed") if replicas > 1 else []
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert (job.compression.replicas is None) == (replicas == 1)
        job.train(3)
        assert replicas_agree(job.model.parameters(), job.mesh)


def test_a_killed_job_goes_on_from_its_checkpoint_on_any_mesh(tmp_path: Path) -> None:
    outcomes = outcomes_of(train_until_killed, 4, str(tmp_path), signals={(1, "backward"): signal.SIGKILL})
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert outcomes[rank].error[0] == "TransportError" and "is gone" in outcomes[rank].error[1], outcomes[rank]
    run_ranks(go_on, 4, str(tmp_path))
    run_ranks(go_on_elsewhere, 3, str(tmp_path))


# ---- more dimensions, and local steps -------------------------------------------------------------------------------


def with_tensor_parallel(rank: int, world: int, shards: int) -> None:
    """TP x FSDP x replicate; and TP x FSDP, which has no replicas."""
    whole = init_device_mesh("cpu", (2, shards, 2), mesh_dim_names=("replicate", "shard", "tp"))
    data = whole["replicate", "shard"]
    found = []
    for codec in (None, "raw", "int8"):
        model = make_model()
        for layer in model[1:-1]:
            parallelize_module(layer, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
        compression = fl.fsdp.compress(model, None, None, replicas=codec)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(3):
            x, y = batch(rank // 2, step)  # ranks of one model have one batch
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        assert (compression.bytes_between_replicas > 0) == (codec is not None)
        found.append(full(model.parameters()))
        assert replicas_agree(model.parameters(), data)
        if codec == "int8":
            state = compression.state_dict()
            assert any(bool(x.count_nonzero()) for x in full(owed(compression)))
            compression.load_state_dict(state)
    assert same(*found[:2])
    off = torch.cat([(a - b).flatten() for a, b in zip(found[0], found[2], strict=True)])
    assert 0 < float(off.norm()) < 0.05 * float(torch.cat([a.flatten() for a in found[0]]).norm())


@pytest.mark.timeout(200)
def test_tensor_parallel_replicas_are_compressed() -> None:
    run_ranks(with_tensor_parallel, 4, 1, timeout=150)


@exhaustive(guarded_by="tests/integrations/test_hsdp.py::test_tensor_parallel_replicas_are_compressed")
def test_tensor_parallel_replicas_of_shards_are_compressed() -> None:
    run_ranks(with_tensor_parallel, 8, 2, timeout=300)


@on_processes(4)
def test_local_steps_between_replicas_keep_compressed_shards(rank: int, world: int) -> None:
    """Shards are summed in each step, compressed; replicas sync every second one. torch must not sum them itself."""
    mesh = mesh_of(2, 2)
    group = mesh.get_group("replicate")
    model = sharded(mesh["shard"])
    compression = fl.fsdp.compress(model, "int8", "int8")
    assert compression.replicas is None
    plain = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer: Any = fl.DistributedOptimizer(plain, model, codec="int4", group=group, sync=fl.Local.averaging(every=2))
    agreed = []
    for step in range(4):
        train(model, optimizer, [step])
        agreed.append(replicas_agree(model.parameters(), mesh))
    assert agreed == [False, True, False, True]
    optimizer.close()
    model = sharded(mesh)
    plain = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with pytest.raises(ConfigError, match="for local steps between replicas give fully_shard the mesh of the shards"):
        fl.DistributedOptimizer(plain, model, group=group, sync=fl.Local.averaging(every=2))


@on_processes(1)
def test_what_replicas_cannot_have_is_refused(rank: int, world: int) -> None:
    model = sharded(init_device_mesh("cpu", (world,)))
    for name, value in (("replicas", "int4"), ("algorithm", "ring"), ("error_feedback", True)):
        given: dict[str, Any] = {"replicas": "int8", name: value}
        if name == "error_feedback":
            given.pop("replicas")
        with pytest.raises(ConfigError, match="no module has replicas; give fully_shard a mesh of two dimensions"):
            fl.fsdp.compress(model, **given)
    with pytest.raises(ConfigError, match="error_feedback='on'; expected True, False or None"):
        fl.fsdp.compress(model, error_feedback="on")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="algorithm='ring' with replicas='auto'"):
        fl.fsdp.compress(model, algorithm="ring")
    with pytest.raises(ConfigError, match="algorithm 'low_rank' .* cannot use int"):
        fl.fsdp.compress(model, replicas="int8", algorithm="low_rank")
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        fl.fsdp.compress(model, replicas="int8", algorithm="rnig")
