"""FSDP2 whose weights travel as differences: copies of weights on every rank, when they travel, and checkpoints."""

import hashlib
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint as recomputed

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, UsageError
from fusionlayer.sharded.fsdp import FSDPCompression
from fusionlayer.training.weights import Weights
from tests.harness import checkpoint, outcomes_of, run_ranks
from tests.integrations.test_fsdp import BF16, FEATURES, WIDTH, Layer, batch, same_on_all_ranks, train
from tests.integrations.training import fill
from tests.ranks import on_processes

pytestmark = pytest.mark.medium


class Recomputing(nn.Module):
    """A layer whose activations are made anew in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return recomputed(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]


def make(mesh: DeviceMesh, reshard: bool | int = True, recompute: bool = False) -> nn.Sequential:
    """Return a model of two groups of FSDP2: a layer, and what is around it."""
    layer = Recomputing() if recompute else Layer()
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), layer, nn.Linear(WIDTH, 1))
    fill(model)
    for module in (model[1], model):
        fully_shard(module, mesh=mesh, mp_policy=BF16, reshard_after_forward=reshard)
    return model


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def main_and_replica(model: nn.Module, compression: FSDPCompression) -> tuple[Tensor, Tensor]:
    """Return this rank's weights as the optimizer has them, and as the ranks' copies do, flat."""
    reshard(model)
    state = compression.state_dict()
    parameters = dict(model.named_parameters())
    assert {f"replica.{name}" for name in parameters} | {"counts", "rows"} == state.keys()
    pairs = [(p.to_local(), state[f"replica.{name}"].to_local()) for name, p in parameters.items()]  # type: ignore[attr-defined]
    ours, theirs = (torch.cat([pair[i].detach().float().flatten() for pair in pairs]) for i in (0, 1))
    return ours, theirs


def unsharded(model: nn.Module) -> Tensor:
    """Return all weights as the model computes with them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    reshard(model)
    return found


# ---- when weights travel ----------------------------------------------------------------------------------------


@on_processes(2)
def test_weights_travel_once_for_every_step(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    coded = []
    for how in ({"reshard": True}, {"reshard": False}, {"recompute": True}):
        model = make(mesh, **how)
        compression = fl.fsdp.compress(model, "qwd", None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sent = []
        for step in range(3):
            start = compression.bytes_sent
            x, y = batch(rank, step)
            # An evaluation before training brings what training would have brought.
            with torch.inference_mode() if step else torch.no_grad():
                model(x)
            reshard(model)
            first = compression.bytes_sent
            copy = unsharded(model)
            for _ in range(2):
                (model(x).float() - y).square().mean().backward()
            assert torch.equal(unsharded(model), copy), "backward has the weights of forward"
            assert compression.bytes_sent == first, "nothing more until weights have changed"
            sent.append(first - start)
            optimizer.step()
            optimizer.zero_grad()
        rows = {name: -(-p.shape[0] // world) * p[0].numel() for name, p in model.named_parameters()}
        layer = sum(length for name, length in rows.items() if name.startswith("1."))
        assert sent[0] == 2 * sum(rows.values()), "whole weights, in bf16"
        assert sent[1] - sent[2] in (0, 8), "nodes are found out once, by 8 bytes"
        messages = [Weights.of("qwd").codec.wire(n, torch.float32) for n in (layer, sum(rows.values()) - layer)]
        assert sent[2] == sum(message.capacity for message in messages), "4 bits, and scales"
        coded.append(sent[2])
    assert len(set(coded)) == 1
    hold_changes(model, compression, batch(0, 0)[0])


def hold_changes(model: nn.Module, compression: FSDPCompression, x: Tensor) -> None:
    """Weights that no step has changed are noticed; whoever says so gets them, and steps need not be said."""
    weight = model[2].weight  # type: ignore[index]

    def add(amount: float) -> None:
        reshard(model)
        with torch.no_grad():
            model[2].weight.add_(amount)  # type: ignore[index]

    def forward() -> Tensor:
        reshard(model)
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]

    forward()
    add(0.5)
    with pytest.raises(UsageError, match=r"2\.weight.*weights_changed\(\).*weights_changed\(whole=True\)"):
        forward()
    compression.weights_changed()
    before = compression.bytes_sent
    forward()
    differences = compression.bytes_sent - before
    add(0.5)
    compression.weights_changed(whole=True)
    before = compression.bytes_sent
    forward()
    assert compression.bytes_sent - before > 2 * differences, "16 bits instead of 4, and whole groups of those"
    main, copy = main_and_replica(model, compression)
    assert torch.equal(main.bfloat16().float(), copy), "whole weights"
    model.load_state_dict(model.state_dict())
    with pytest.raises(UsageError, match="by no optimizer's step"):
        forward()
    compression.weights_changed(whole=True)
    forward()
    assert weight is not None


@on_processes(4)
def test_smaller_groups_carry_the_weights_of_forward(rank: int, world: int) -> None:
    """ZeRO++: int8 weights over all ranks, and in backward, inside the node, what forward has had."""
    mesh = init_device_mesh("cpu", (world,))
    x, y = batch(rank, 0)
    stochastic = fl.codecs.get("int", bits=8, rounding="stochastic")
    for weights, gradients in (("zero++", "auto"), ("qwd", "ulq"), ("qw", "tlq"), (stochastic, None)):
        model = make(mesh, reshard=2)
        compression = fl.fsdp.compress(model, weights, gradients, nodes=2)
        copies: list[Tensor] = []

        def keep(layer: nn.Module, *_: object, to: list[Tensor] = copies) -> None:
            to.append(torch.cat([p.detach().flatten() for p in layer.parameters()]))

        model[1].up.register_forward_hook(keep)  # type: ignore[union-attr]
        model[1].up.register_full_backward_pre_hook(keep)  # type: ignore[union-attr]
        (model(x).float() - y).square().mean().backward()
        forward, backward = copies
        assert torch.equal(forward, backward) and same_on_all_ranks(forward.view(torch.uint8)), weights
        assert compression.bytes_sent > 0
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        assert bool(torch.isfinite(model(x)).all())
    for nodes in (3, 0, True, "2"):
        with pytest.raises(ConfigError, match="nodes=.*divides the 4 of the job"):
            fl.fsdp.compress(make(mesh), nodes=nodes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights=sdp4bit names gradients too, as tlq_hs"):
        fl.fsdp.compress(make(mesh), "sdp4bit", "int8")
    with pytest.raises(ConfigError, match=r"state of fsdp\.compress lacks \['replica"):
        fl.fsdp.compress(model, "qwd").load_state_dict(fl.fsdp.compress(model, "qw").state_dict())


# ---- a lost rank, and a new start from a checkpoint ---------------------------------------------------------------


class Job:
    """Training of a model under FSDP2, and of one under a sharded optimizer, both at four bits."""

    def __init__(self, world: int) -> None:
        self.model = make(init_device_mesh("cpu", (world,)))
        self.compression = fl.fsdp.compress(self.model, "sdp4bit")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.plain = nn.Sequential(nn.Linear(FEATURES, WIDTH), Layer(), nn.Linear(WIDTH, 1))
        fill(self.plain)
        self.sharded = fl.ShardedOptimizer(self.plain.parameters(), torch.optim.AdamW, weights="sdp4bit", lr=3e-3)

    def train(self, *steps: int) -> None:
        train(self.model, self.optimizer, steps)
        train(self.plain, self.sharded, steps)

    def digest(self) -> str:
        """Return what tells apart the weights of both, and the copies of them."""
        everything = [*main_and_replica(self.model, self.compression), *self.plain.parameters()]
        return hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in everything)).hexdigest()

    def copy(self) -> Tensor:
        """Return the whole copy that every rank computes with."""
        parts = self.compression.state_dict()
        return torch.cat([part.full_tensor().flatten() for name, part in parts.items() if name.startswith("replica.")])  # type: ignore[attr-defined]

    def save_copy(self, folder: str) -> None:
        if dist.get_rank() == 0:
            torch.save(self.copy(), f"{folder}/copy")
        else:
            self.copy()

    def states(self) -> dict[str, object]:
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": of_model,
            "optimizer": of_optimizer,
            "compression": self.compression,
            "plain": self.plain.state_dict(),
            "sharded": self.sharded,
        }

    def load(self, folder: str, *, plain: bool = True) -> None:
        states = self.states()
        if not plain:
            del states["plain"], states["sharded"]
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],  # type: ignore[arg-type]
            optim_state_dict=states["optimizer"],  # type: ignore[arg-type]
        )
        if plain:
            self.plain.load_state_dict(states["plain"])  # type: ignore[arg-type]


def train_until_killed(rank: int, world: int, folder: str) -> None:
    fl.init()
    through = Job(world)
    through.train(*range(5))
    Path(folder, f"digest {rank}").write_text(through.digest())
    job = Job(world)
    job.train(*range(3))
    dcp.save(job.states(), checkpoint_id=f"{folder}/saved")
    job.save_copy(folder)
    job.train(3)
    checkpoint("in the middle")
    job.train(4)


def go_on(rank: int, world: int, folder: str) -> None:
    job = Job(world)
    job.load(f"{folder}/saved")
    job.train(3, 4)
    assert job.digest() == Path(folder, f"digest {rank}").read_text()
    before = job.compression.bytes_sent
    late = Job(world)  # one that has trained otherwise before it loads
    late.train(20)
    late.load(f"{folder}/saved")
    late.train(3, 4)
    assert late.digest() == job.digest() and job.compression.bytes_sent == before
    dist.barrier()


def go_on_with_more(rank: int, world: int, folder: str) -> None:
    """Copies are cut anew for another number of ranks, as weights are."""
    job = Job(world)
    job.load(f"{folder}/saved", plain=False)
    assert torch.equal(job.copy().float(), torch.load(f"{folder}/copy").float())
    train(job.model, job.optimizer, [3])
    assert same_on_all_ranks(unsharded(job.model).view(torch.uint8))


def test_a_killed_job_goes_on_from_its_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    outcomes = outcomes_of(train_until_killed, 2, str(tmp_path), signals={(1, "in the middle"): signal.SIGKILL})
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].error[0] == "TransportError" and "rank 1 is gone" in outcomes[0].error[1], outcomes[0]
    run_ranks(go_on, 2, str(tmp_path))
    run_ranks(go_on_with_more, 3, str(tmp_path))
