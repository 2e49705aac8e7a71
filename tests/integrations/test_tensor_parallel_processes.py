"""Tensor parallelism with ranks that are processes: DTensor's styles, torch.compile, and data parallelism beside it."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as stock
from torch.nn import functional

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, TransportError
from fusionlayer.parallel import tensor_parallel as ours
from tests.harness import run_ranks
from tests.integrations.training import fill
from tests.ranks import on_processes
from tests.synthetic import gradient
from tests.tiers import exhaustive

pytestmark = pytest.mark.medium

BATCH, TOKENS, WIDTH, HIDDEN, LAYERS = 2, 8, 32, 64, 2


class Layer(nn.Module):
    """What a transformer's layer is to tensor parallelism: a norm, a layer cut by columns, one cut by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def make_model() -> nn.Sequential:
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    fill(model)
    for layer in model:
        assert isinstance(layer, Layer)
        nn.init.ones_(layer.norm.weight)  # DTensor's SequenceParallel expects it
    return model


def data(stream: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    values = gradient(2 * batch * TOKENS * WIDTH, 9000 + stream).view(2, batch, TOKENS, WIDTH)
    return values[0], values[1]


def plan(styles: Any, sequence: bool, **how: Any) -> dict[str, Any]:
    """Return the plan of a model for torch's styles or ours: the module of the styles is all that differs."""
    if not sequence:
        one = {"up": styles.ColwiseParallel(**how), "down": styles.RowwiseParallel(**how)}
    else:
        one = {
            "norm": styles.SequenceParallel(**how),
            "up": styles.ColwiseParallel(input_layouts=Shard(1), **how),
            "down": styles.RowwiseParallel(output_layouts=Shard(1), **how),
        }
    return {f"{i}.{name}": style for i in range(LAYERS) for name, style in one.items()}


def loss_of(model: nn.Module, x: Tensor, y: Tensor, mesh: DeviceMesh, sequence: bool) -> Tensor:
    """Return a loss whose sum over the ranks, with sequence parallelism, is that of the whole."""
    rank, size = mesh.get_local_rank(), mesh.size()
    if sequence:
        x, y = x.chunk(size, 1)[rank].contiguous(), y.chunk(size, 1)[rank]
    return (model(x) - y).square().sum() / (BATCH * TOKENS * WIDTH)


def full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of whole parameters."""
    grads = [parameter.grad for parameter in model.parameters()]
    return [full(grad).detach() for grad in grads if grad is not None]


def bits_equal(x: Tensor) -> bool:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x.detach().contiguous())
    return all(torch.equal(other, x) for other in every)


@on_processes(2)
def test_styles_are_those_of_torch(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    x, y = data(0)
    for sequence in (False, True):
        reference = stock.parallelize_module(make_model(), mesh, plan(stock, sequence))
        expected = loss_of(reference, x, y, mesh, sequence)
        expected.backward()
        for codec, tolerance in (("raw", 1e-5), ("bf16", 0.02), ("int8", 0.05)):
            model = stock.parallelize_module(
                make_model(), mesh, plan(ours, sequence, codec=codec, piece_bytes=1024 if codec == "int8" else None)
            )
            loss = loss_of(model, x, y, mesh, sequence)
            loss.backward()
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
            for mine, theirs in zip(gradients(model), gradients(reference), strict=True):
                assert float((mine - theirs).norm()) <= tolerance * float(theirs.norm()) + 1e-7, (sequence, codec)
            if not sequence:
                assert bits_equal(loss)
                assert all(bits_equal(p.grad) for p in model.parameters() if not isinstance(p, DTensor))
        # The bytes are the codec's: torch's own collectives carry nothing of this.
        model = stock.parallelize_module(make_model(), mesh, plan(ours, sequence, codec="int8"))
        transport = fl.context.transport(mesh.get_group())
        before = transport.bytes_sent
        loss_of(model, x, y, mesh, sequence).backward()
        assert transport.bytes_sent > before


@on_processes(2)
def test_layouts_are_those_of_torch(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    x = data(0)[0]

    def apply(style: Any, module: nn.Module, given: Any) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(0)
        fill(module)
        local = stock.parallelize_module(module, mesh, style)(given)
        whole = full(local)
        whole.square().sum().backward()
        return whole.detach(), full(given.grad) if isinstance(given, Tensor) and given.grad is not None else None

    def dtensor(layout: Any) -> DTensor:
        part = x.chunk(world, 1)[rank].contiguous() if isinstance(layout, Shard) else x.clone()
        return DTensor.from_local(part, mesh, (layout,)).requires_grad_()

    for layout in (Replicate(), Shard(1)):
        # Layers that take and give DTensors, of all the layouts that sequence parallelism has.
        for wanted in (Replicate(), Shard(1)):
            for name, how in (
                ("ColwiseParallel", {"input_layouts": layout, "output_layouts": wanted, "use_local_output": False}),
                ("RowwiseParallel", {"input_layouts": layout, "output_layouts": wanted, "use_local_output": False}),
            ):
                theirs = apply(getattr(stock, name)(**how), nn.Linear(WIDTH, HIDDEN), dtensor(layout))
                mine = apply(getattr(ours, name)(**how, codec="raw"), nn.Linear(WIDTH, HIDDEN), dtensor(layout))
                torch.testing.assert_close(mine, theirs, msg=f"{name} {layout} {wanted}")
        norm = {"use_local_output": False}
        theirs = apply(stock.SequenceParallel(**norm), nn.LayerNorm(WIDTH), dtensor(layout))
        mine = apply(ours.SequenceParallel(**norm, codec="raw"), nn.LayerNorm(WIDTH), dtensor(layout))
        torch.testing.assert_close(mine, theirs, msg=f"SequenceParallel {layout}")
        given = {"input_layouts": (layout,), "desired_input_layouts": (Replicate(),)}
        theirs = apply(stock.PrepareModuleInput(**given), nn.Identity(), dtensor(layout))
        mine = apply(ours.PrepareModuleInput(**given, codec="raw"), nn.Identity(), dtensor(layout))
        torch.testing.assert_close(mine, theirs, msg=f"PrepareModuleInput {layout}")

    # Embeddings: their rows are masked, which is not a plain sum.
    tokens = torch.arange(12).view(3, 4)
    for name in ("ColwiseParallel", "RowwiseParallel"):
        theirs = apply(getattr(stock, name)(use_local_output=False), nn.Embedding(12, 8), tokens)
        mine = apply(getattr(ours, name)(use_local_output=False, codec="int8"), nn.Embedding(12, 8), tokens)
        torch.testing.assert_close(mine[0], theirs[0])


@on_processes(4)
def test_what_cannot_be_is_refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ConfigError, match=r"got a mesh with the dimensions \('dp', 'tp'\).*mesh\['tp'\]"):
        ours.Channel(mesh, "int8")
    model = stock.parallelize_module(
        nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": ours.RowwiseParallel(codec="int8", output_layouts=Shard(1))}
    )
    with pytest.raises(ConfigError, match=r"dimension 1 of shape \(1, 3, 4\) is cut over 2 ranks; make its length"):
        model(torch.ones(1, 3, 2))
    if rank == 0:
        with pytest.raises(ConfigError, match="got 1 as group; expected a process group this process is in"):
            ours.Channel(1, "int8")  # type: ignore[arg-type]


@on_processes(2)
def test_operations_compile_as_one_graph(rank: int, world: int) -> None:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (world,))
    channel = ours.Channel(mesh, "int8", piece_bytes=1024)
    up = gradient(HIDDEN * WIDTH, 1).view(HIDDEN, WIDTH).chunk(world, 0)[rank]
    down = gradient(HIDDEN * WIDTH, 2).view(WIDTH, HIDDEN).chunk(world, 1)[rank]

    def layer(x: Tensor) -> Tensor:
        x = x + channel.reduce(functional.gelu(channel.copy(x) @ up.T) @ down.T)
        part = channel.split(x, 1)
        part = part + channel.reduce_scatter(functional.gelu(channel.gather(part, 1) @ up.T) @ down.T, 1)
        return channel.join(part, 1)

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = data(0)[0].clone().requires_grad_()
        y = function(x)
        y.backward(data(0)[1])
        assert x.grad is not None
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=0.02)
    assert bits_equal(results[1][0])


@exhaustive(guarded_by="tests/integrations/test_tensor_parallel_processes.py::test_operations_compile_as_one_graph")
@on_processes(2)
def test_styles_compile_as_one_graph(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    x, y = data(0)
    for sequence in (False, True):
        torch._dynamo.reset()
        eager = stock.parallelize_module(make_model(), mesh, plan(ours, sequence, codec="int8"))
        compiled = torch.compile(copy.deepcopy(eager), backend="aot_eager", fullgraph=True)
        for model in (eager, compiled):
            loss_of(model, x, y, mesh, sequence).backward()
        for mine, theirs in zip(gradients(compiled), gradients(eager), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=1e-4)


@on_processes(4)
def test_data_parallelism_beside_it(rank: int, world: int) -> None:
    """Train on a 2 x 2 mesh: compressed tensor parallelism, and gradients averaged by DistributedOptimizer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = stock.parallelize_module(make_model(), mesh["tp"], plan(ours, False, codec="int8"))
    whole = make_model()
    optimizer = fl.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        codec="raw",
        group=mesh["dp"].get_group(),
    )
    reference = torch.optim.SGD(whole.parameters(), lr=0.05)
    for step in range(5):
        x, y = data(100 + step, 2 * BATCH)
        half = slice(mesh["dp"].get_local_rank() * BATCH, (mesh["dp"].get_local_rank() + 1) * BATCH)
        optimizer.zero_grad()
        loss_of(model, x[half], y[half], mesh["tp"], False).backward()
        optimizer.step()
        reference.zero_grad()
        ((whole(x) - y).square().sum() / (2 * BATCH * TOKENS * WIDTH)).backward()
        reference.step()
    for mine, theirs, start in zip(model.parameters(), whole.parameters(), make_model().parameters(), strict=True):
        assert bits_equal(full(mine))
        moved = float((theirs - start).detach().norm())
        assert moved > 0 and float((full(mine) - theirs).detach().norm()) <= 0.05 * moved
    with pytest.raises(
        ConfigError, match=r"is sharded by FSDP or tensor parallelism over ranks \[.\].*have no average"
    ):
        fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), group=mesh["tp"].get_group())
    with pytest.raises(ConfigError, match="overlap_forward: parameter '0.up.weight' is a DTensor"):
        optimizer.close()
        fl.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            model.named_parameters(),
            overlap_forward=model,
            group=mesh["dp"].get_group(),
        )


def differ(rank: int, world: int) -> str:
    fl.init(timeout=5)
    channel = ours.Channel(codec="int8")
    with pytest.raises(TransportError) as error:
        channel.reduce(torch.ones(1000 + 1000 * rank))
    return str(error.value)


def test_ranks_that_send_other_shapes_are_named_and_nothing_hangs() -> None:
    for rank, message in enumerate(run_ranks(differ, 2)):
        assert f"rank {rank}: collective" in message
        assert "rank 1 sends" in message or "rank 0 sends" in message
