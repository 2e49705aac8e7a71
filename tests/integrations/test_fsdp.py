"""FSDP2 with compressed collectives, over ranks that are processes: the bits of training without it, and errors."""

import hashlib
import inspect
import signal
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, PlanMismatch
from fusionlayer.codecs import Codec
from fusionlayer.sharded import fsdp_collectives
from fusionlayer.sharded.fsdp_collectives import AllGather, ReduceScatter, ReplicaGather, _scale
from fusionlayer.training.codec_or_auto import CodecOrAuto
from fusionlayer.training.parameters import all_finite, local_part
from tests.harness import checkpoint, outcomes_of
from tests.integrations.training import fill, weights
from tests.loops import looped
from tests.ranks import on_processes
from tests.synthetic import gradient
from tests.tiers import exhaustive

pytestmark = pytest.mark.medium

FEATURES, WIDTH, BATCH, LAYERS = 24, 65, 4, 3  # no number of ranks but 1 divides 65: shards are padded

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
F16 = MixedPrecisionPolicy(param_dtype=torch.float16)
POLICIES = {"f32": MixedPrecisionPolicy(), "bf16": BF16, "f16": F16}

Shard = Callable[[nn.Module], object]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 1)).to(dtype)
    fill(model)
    return model


def sharded(mesh: DeviceMesh, policy: str = "f32", dtype: torch.dtype = torch.float32, **how: Any) -> nn.Sequential:
    """Return a model with nested wraps: a perceptron within a layer, layers, and what is left at the root."""
    model = make_model(dtype)
    shard: Shard = partial(fully_shard, mesh=mesh, mp_policy=POLICIES[policy], **how)
    shard(model[1].up)  # type: ignore[arg-type]
    for layer in model[1:-1]:
        shard(layer)
    shard(model)
    return model


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = gradient(BATCH * FEATURES, 7_000_000 + 1000 * step + rank).view(BATCH, FEATURES).to(dtype)
    return x, x.float().sin().sum(1, keepdim=True)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    losses = []
    for step in steps:
        x, y = batch(dist.get_rank(), step, dtype)
        optimizer.zero_grad()
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def full(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor.full_tensor().detach() for tensor in tensors if tensor is not None]  # type: ignore[attr-defined]


def run(model: nn.Module, steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return all losses of this rank and the whole weights after training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = full(model.parameters())
    losses = train(model, optimizer, range(steps), dtype)
    end = full(model.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(start, end, strict=True)), "nothing was learnt"
    return losses + end


def elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def same_on_all_ranks(x: Tensor) -> bool:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x.detach().contiguous())
    return all(torch.equal(other, every[0]) for other in every)


# ---- what torch expects ---------------------------------------------------------------------------------------------


@looped("ours, theirs", [(AllGather, "AllGather"), (ReplicaGather, "AllGather"), (ReduceScatter, "ReduceScatter")])
def test_the_interface_is_torch_s(ours: type, theirs: str) -> None:
    """That of 2.11 and 2.13, by whose names arguments are given; it is not public, so it may change."""
    abstract = getattr(pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_api"), theirs)
    for method in ("__call__", "allocate"):
        mine, expected = (inspect.signature(getattr(kind, method)).parameters for kind in (ours, abstract))
        assert [(p.name, p.kind, p.default) for p in mine.values()] == [
            (p.name, p.kind, p.default) for p in expected.values()
        ]


def test_sums_are_scaled_as_torch_asks() -> None:
    operations: list[tuple[Any, float]] = [
        (dist.ReduceOp.SUM, 1.0),
        (dist.ReduceOp(dist.ReduceOp.SUM), 1.0),
        (dist.ReduceOp.AVG, 0.25),
        (dist.ReduceOp(dist.ReduceOp.AVG), 0.25),
        (dist._make_nccl_premul_sum(0.125), 0.125),  # type: ignore[attr-defined]
    ]
    for operation, factor in operations:
        total = torch.full((3,), 8.0)
        _scale(total, operation, 4)
        assert total.tolist() == [8 * factor] * 3
    with pytest.raises(ConfigError, match="asks for a reduction by .*MAX"):
        _scale(torch.zeros(1), dist.ReduceOp.MAX, 4)


def test_steps_modules_and_replicas_round_by_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    monkeypatch.setattr(fsdp_collectives, "_reduce", lambda *given: seeds.append(given[-1]))
    monkeypatch.setattr(fsdp_collectives.Direction, "sending", lambda *_: nullcontext(fl.transport.local.alone()))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
    direction = fsdp_collectives.Direction("gradients", CodecOrAuto.of("int4", {}))
    for module, ranks in product(range(2), ([0, 1], [2, 3])):
        reduce: Any = ReduceScatter(direction, None, module)  # type: ignore[arg-type]
        for _ in range(2):
            reduce(torch.zeros(4), torch.zeros(4), ranks, dist.ReduceOp.SUM)
    assert len(set(seeds)) == 8


# ---- training to the last bit ---------------------------------------------------------------------------------------


@on_processes(2)
def test_zipped_weights_train_to_the_bits_of_torch_s_own(rank: int, world: int) -> None:
    mesh, steps = init_device_mesh("cpu", (world,)), 2
    for policy, reshard in (("f32", True), ("bf16", False)):
        native = run(sharded(mesh, policy, reshard_after_forward=reshard), steps)
        model = sharded(mesh, policy, reshard_after_forward=reshard)
        compression = fl.fsdp.compress(model, all_gather="zip", reduce_scatter=None)
        assert compression.weights == str(fl.codecs.get("zip")) and compression.gradients is None
        assert same(run(model, steps), native)
        gathered = steps * elements(model) * (4 if policy == "f32" else 2) * (1 + reshard) / world * (world - 1)
        low, high = (0.8, 0.95) if policy == "f32" else (0.6, 0.85)
        assert low * gathered < compression.bytes_sent < high * gathered, "every module's, and zipped"


def digest(model: nn.Module) -> Tensor:
    """Return what tells apart this rank's shards: it is compared over steps, not printed."""
    data = b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters())  # type: ignore[attr-defined]
    return torch.tensor(list(hashlib.sha256(data).digest()), dtype=torch.uint8)


@on_processes(2)
def test_changes_of_weights_train_to_the_bits_of_torch_s_own(rank: int, world: int) -> None:
    mesh, steps = init_device_mesh("cpu", (world,)), 6
    found: list[list[Tensor]] = []
    sent: list[int] = []
    for by in (None, "delta"):
        model = sharded(mesh, "bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        compression = fl.fsdp.compress(model, by, None) if by else None
        trace = []
        for step in range(steps):
            before = compression.bytes_sent if compression else 0
            trace += [*train(model, optimizer, [step]), digest(model)]
            sent += [compression.bytes_sent - before] if compression else []
        found.append(trace)
    assert same(*found), "the losses and the weights of torch's own, to the bit, in every step"
    whole = elements(model) * 2 / world * (world - 1)
    assert sent[0] >= whole, "whole weights are sent once"
    assert max(sent[1:]) < whole / 4, "then the changed ones, once in each step"


@on_processes(2)
def test_zipped_gradients_train_as_torch_s_own(rank: int, world: int) -> None:
    """Two summands have one order, so torch's sum is ours to the last bit. Weights are bf16, sums f32."""
    mesh, policy = init_device_mesh("cpu", (world,)), "bf16"
    native = run(sharded(mesh, policy), 6)
    for codec in ("raw", "zip", "auto"):
        model = sharded(mesh, policy)
        fl.fsdp.compress(model, weights=codec, gradients=codec)
        assert same(run(model, 6), native), codec
    calls: list[Tensor] = []
    own = dist.reduce_scatter_tensor

    def counting(output: Tensor, *given: Any, **named: Any) -> Any:
        calls.append(output)
        return own(output, *given, **named)

    with patch.object(dist, "reduce_scatter_tensor", counting):
        model = sharded(mesh, policy)
        fl.fsdp.compress(model, baseline="native")
        assert same(run(model, 6), native)
    assert calls, "torch's own is timed, and so used"
    kinds = {decision.kind for decision in fl.switcher(mesh.get_group()).decisions}
    assert kinds == {"all_gather", "reduce_scatter"}


@on_processes(2)
def test_gradients_that_fit_in_bf16_travel_as_bf16(rank: int, world: int) -> None:
    """Gradients of a bf16 model are f32 for the sum only; those that were accumulated in f32 are not."""
    mesh = init_device_mesh("cpu", (world,))
    sent = {}
    for policy, accumulate in (("bf16", False), ("bf16", True), ("f32", False)):
        for codec in ("raw", "zip"):
            model = sharded(mesh, policy)
            compression = fl.fsdp.compress(model, weights=None, gradients=codec)
            for last in (False, True) if accumulate else (True,):
                model.set_requires_gradient_sync(last)
                x, y = batch(rank, int(last))
                (model(x).float() - y).square().mean().backward()
            sent[policy, accumulate, codec] = compression.bytes_sent
    assert sent["bf16", False, "zip"] < 0.45 * sent["bf16", False, "raw"]
    for policy, accumulate in (("bf16", True), ("f32", False)):
        assert 0.7 < sent[policy, accumulate, "zip"] / sent[policy, accumulate, "raw"] < 0.95


@exhaustive(guarded_by="tests/integrations/test_fsdp.py::test_weights_are_the_same_bits_on_all_ranks")
@on_processes(4)
def test_every_way_to_shard_keeps_its_bits(rank: int, world: int) -> None:
    """Prefetching, early unsharding, smaller groups after forward, two-dimensional meshes, other types, offloading."""
    mesh = init_device_mesh("cpu", (world,))
    replicated = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))

    def prefetching(model: nn.Sequential) -> None:
        layers = list(model[1:-1])
        for layer, following in zip(layers, layers[1:], strict=False):
            layer.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
            following.set_modules_to_backward_prefetch([layer])  # type: ignore[operator]

    def unsharding_early(model: nn.Sequential) -> None:
        def unshard(*_: object) -> None:
            for layer in model[1:-1]:
                layer.unshard(async_op=True)  # type: ignore[operator]

        model[0].register_forward_pre_hook(unshard)
        model._set_unshard_async_op(True)  # type: ignore[operator]

    def accumulating(model: nn.Sequential) -> None:
        def once_in_two(module: nn.Module, *_: object) -> None:
            accumulating_steps.append(None)
            module.set_requires_gradient_sync(len(accumulating_steps) % 2 == 0)  # type: ignore[operator]

        accumulating_steps: list[None] = []
        model.register_forward_pre_hook(once_in_two)

    def freezing(model: nn.Sequential) -> None:
        model[2].requires_grad_(False)

    ways: list[tuple[DeviceMesh, dict[str, Any], Callable[[nn.Sequential], object]]] = [
        (mesh, {}, prefetching),
        (mesh, {}, unsharding_early),
        (mesh, {}, accumulating),
        (mesh, {}, freezing),
        (mesh, {"reshard_after_forward": world // 2}, id),
        (replicated, {"policy": "bf16"}, id),
        (mesh, {"policy": "f16"}, id),
        (mesh, {"dtype": torch.float64}, id),
        (mesh, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, id),
    ]
    for over, how, arrange in ways:
        ends = []
        for compressed in (False, True):
            model = sharded(over, **how)
            arrange(model)
            compression = fl.fsdp.compress(model, "zip", None) if compressed else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            ends.append(train(model, optimizer, range(4), how.get("dtype", torch.float32)) + full(model.parameters()))
            assert compression is None or compression.bytes_sent > 0
        assert same(*ends), (how, arrange)


@on_processes(2)
def test_weights_of_several_types_travel_as_they_are(rank: int, world: int) -> None:
    """Weights of several types are bytes to torch, and travel as they are."""
    mesh = init_device_mesh("cpu", (world,))
    outputs = []
    for compressed in (False, True):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())
        fill(model)
        model[1].requires_grad_(False)
        fully_shard(model, mesh=mesh)
        compression = fl.fsdp.compress(model, weights="int4") if compressed else None
        model.unshard()  # type: ignore[operator]
        outputs.append([parameter.detach().clone() for parameter in model.parameters()])
        assert compression is None or compression.bytes_sent == (4 + 2) * 72 // world * (world - 1)
    assert same(*outputs)


# ---- lossy codecs ---------------------------------------------------------------------------------------------------


@on_processes(2)
def test_gradients_come_close(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))

    def gradients(codec: str | Codec | None, factor: float | None = None, policy: str = "f32") -> list[Tensor]:
        model = sharded(mesh, policy)
        if codec is not None:
            compression = fl.fsdp.compress(model, weights=None, gradients=codec)
        if factor is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(factor)
        x, y = batch(rank, 0)
        (model(x).float() - y).square().mean().backward()
        if codec is not None:
            assert compression.weights is None and compression.bytes_sent > 0
        return full(parameter.grad for parameter in model.parameters())

    expected = torch.cat([grad.flatten() for grad in gradients(None)])
    # One group of QSDP's default size has gradients of several parameters here.
    fine = fl.codecs.get("qsdp", group_size=128)
    bounds = {"raw": 1e-6, "bf16": 0.01, "int8": 0.02, "int4": 0.2, "taco": 0.05, "thc": 0.5, fine: 0.02}
    for codec, bound in bounds.items():
        found = torch.cat([grad.flatten() for grad in gradients(codec)])
        assert float((found - expected).norm()) <= bound * float(expected.norm()), codec
    # A factor other than the number of ranks: torch asks for a premultiplied sum, which gloo itself has not.
    found = torch.cat([grad.flatten() for grad in gradients("raw", factor=5.0)])
    torch.testing.assert_close(found, expected * world / 5, rtol=1e-5, atol=1e-7)
    # f16 is summed and divided before and after.
    half = torch.cat([grad.flatten() for grad in gradients(None, policy="f16")])
    found = torch.cat([grad.flatten() for grad in gradients("int8", policy="f16")])
    assert float((found - half).norm()) <= 0.03 * float(half.norm())


@on_processes(3)
def test_weights_are_the_same_bits_on_all_ranks(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for codec, bound in (("int8", 0.02), ("int4", 0.2), ("bf16", 0.005), ("qsdp", 0.02)):
        model = sharded(mesh)
        fl.fsdp.compress(model, weights=codec)
        before = full(model.parameters())
        y = model(batch(0, 0)[0])  # of rank 0 on all ranks
        assert same_on_all_ranks(y)
        y.sum().backward()
        assert same(full(model.parameters()), before), "shards are what they were"
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        found, exact = weights(model), weights(make_model())
        assert same_on_all_ranks(found), "also where the shard is the rank's own"
        assert 0 < float((found - exact).norm()) <= bound * float(exact.norm()), codec
    # It learns, and what is left out of the weights' messages is not lost to the optimizer.
    model = sharded(mesh, "bf16")
    fl.fsdp.compress(model, weights="int8", gradients="int8")
    losses = torch.stack(train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), [0] * 15))
    dist.all_reduce(losses)
    assert losses[-1] < losses[0] / 3


@on_processes(4)
def test_replicas_of_a_shard_agree(rank: int, world: int) -> None:
    """The two replicas of HSDP begin with the weights of the first, and decode the same, rounding at random too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    own = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().mul_(1 + rank // 2)  # type: ignore[attr-defined]
    fl.fsdp.compress(model, broadcast=False)
    assert all(torch.equal(p.to_local(), q * (1 + rank // 2)) for p, q in zip(model.parameters(), own, strict=True))  # type: ignore[attr-defined]
    fl.fsdp.compress(model)
    assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), own, strict=True))  # type: ignore[attr-defined]
    stochastic = fl.codecs.get("int", bits=4, rounding="stochastic")
    fl.fsdp.compress(model, weights=stochastic, gradients=stochastic)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        x, y = batch(0, step)
        prediction = model(x)
        assert same_on_all_ranks(prediction)
        optimizer.zero_grad()
        (prediction - y).square().mean().backward()
        optimizer.step()


# ---- parts of a model, and what cannot be ---------------------------------------------------------------------------


@on_processes(2)
def test_parts_of_a_model_have_codecs_of_their_own(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = sharded(mesh)
    fl.fsdp.compress(model, weights="zip")
    part = fl.fsdp.compress(model[1], weights="int8")
    x, _ = batch(0, 0)
    y = model(x)
    assert part.bytes_sent > 0
    expected = make_model()(x)
    assert not torch.equal(y, expected) and same_on_all_ranks(y)


@on_processes(1)
def test_what_cannot_be_is_refused(rank: int, world: int) -> None:
    with pytest.raises(
        ConfigError, match="got a Sequential with none of its modules where modules of FSDP2 are.*fully"
    ):
        fl.fsdp.compress(make_model())
    model = sharded(init_device_mesh("cpu", (world,)))
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        fl.fsdp.compress(model, weights="int88")
    with pytest.raises(ConfigError, match="gradients=topk.*which leaves most elements out"):
        fl.fsdp.compress(model, gradients="topk")
    with pytest.raises(ConfigError, match="gradients=powersgd.*needs error feedback"):
        fl.fsdp.compress(model, gradients="powersgd")
    with pytest.raises(ConfigError, match="weights=int8 and all_gather=bf16, which mean the same; give one"):
        fl.fsdp.compress(model, weights="int8", all_gather="bf16")
    with pytest.raises(ConfigError, match="gradients=int8 and reduce_scatter=None"):
        fl.fsdp.compress(model, gradients="int8", reduce_scatter=None)
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicated = make_model()
    replicate(replicated, mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(ConfigError, match="replicate.. was applied to, whose weights are not sent"):
        fl.fsdp.compress(replicated)
    from torch.distributed.fsdp import FullyShardedDataParallel

    with pytest.raises(ConfigError, match="FullyShardedDataParallel, FSDP1, where modules of FSDP2"):
        fl.fsdp.compress(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))


@on_processes(3)
def test_a_rank_with_another_codec_or_another_type_is_named(rank: int, world: int) -> None:
    for what in ("codec", "type"):
        odd = rank == 1 and what
        mesh = init_device_mesh("cpu", (world,))
        model = sharded(mesh, dtype=torch.bfloat16 if odd == "type" else torch.float32)
        fl.fsdp.compress(model, weights="zip" if odd == "codec" else "int8")
        with pytest.raises(PlanMismatch, match="the codec or the parameters of FSDP's weights differs") as error:
            model(batch(rank, 0)[0].to(next(model.parameters()).dtype))
        assert error.value.ranks == (1,)


def lose_a_peer(rank: int, world: int) -> None:
    fl.init()
    model = sharded(init_device_mesh("cpu", (world,)))
    fl.fsdp.compress(model, weights="zip", gradients="int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    model[2].register_full_backward_pre_hook(lambda *_: checkpoint("backward"))
    train(model, optimizer, range(2, 100))


def test_a_lost_peer_is_named() -> None:
    outcomes = outcomes_of(lose_a_peer, 3, signals={(1, "backward"): signal.SIGKILL})
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error[0] == "TransportError", outcomes[rank]
        assert "rank 1 is gone" in outcomes[rank].error[1]
        assert outcomes[rank].attributes["ranks"] == (1,)


@pytest.mark.timeout(200)
@on_processes(2, timeout=150)
def test_an_overflow_in_one_shard_makes_all_ranks_skip(rank: int, world: int) -> None:
    """One element of rank 1's shard is infinite: all ranks skip, with one scale."""
    model = sharded(init_device_mesh("cpu", (world,)))
    fl.fsdp.compress(model, "qw", "int8")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        scaler.scale((model(x) - y).square().mean()).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if step == 1 and rank == 1:
            local_part(gradients[0]).view(-1)[0] = float("inf")
        assert all_finite(gradients) is (step != 1)
        before = [local_part(p.detach()).clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(a, local_part(p.detach())) for a, p in zip(before, model.parameters(), strict=True)]
        assert any(moved) is (step != 1)
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
