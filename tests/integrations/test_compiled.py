"""Programs that ``torch.compile`` has compiled: graphs that do not break, and the values of the program as it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusionlayer as fl
from fusionlayer import context
from tests.integrations import test_fsdp
from tests.integrations.training import make_model, train, weights
from tests.ranks import on_processes
from tests.synthetic import gradient

pytestmark = pytest.mark.medium

WIDTH = 64
Result = list[Tensor]


def breaks_in(program: Callable[[], object]) -> dict[str, int]:
    """Return how often each reason has broken a graph while ``program`` compiled and ran."""
    torch._dynamo.reset()
    counters.clear()
    program()
    return dict(counters["graph_break"])


def compiled(function: Any, fullgraph: bool = True) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)


def same(one: Result, other: Result) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


@on_processes(2)
def test_single_calls_are_operators_with_gradients(rank: int, world: int) -> None:
    group = dist.new_group([0, 1])
    up, down = gradient(2 * WIDTH * WIDTH, 1).view(2, WIDTH, WIDTH)
    whole = fl.codecs.get("int", bits=8)

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        x = fl.all_gather(x @ up, "int8", group)
        x = fl.reduce_scatter(x.tanh() @ down, "int", fl.Average, group, bits=8, group_size=32)
        x = fl.all_to_all(x * 2, codec="bf16", group=group) + fl.all_gather(x, "auto").chunk(2)[0]
        seen = x.detach().clone()
        fl.all_reduce(seen, whole, op=fl.Sum)
        return x, seen

    def outcome(function: Any) -> Result:
        x = gradient(4 * WIDTH, 10 + rank).view(4, WIDTH).requires_grad_()
        y, seen = function(x)
        y.square().sum().backward()
        assert x.grad is not None
        return [y.detach(), seen, x.grad]

    expected, found = outcome(layer), []
    assert breaks_in(lambda: found.extend(outcome(compiled(layer)))) == {}
    assert same(found, expected)
    assert torch._dynamo.explain(layer)(torch.ones(4, WIDTH)).graph_break_count == 0

    torch._dynamo.reset()
    with pytest.raises(fl.ConfigError, match=r"returned \(3,\) where the graph has"):
        compiled(lambda x: fl.all_gather(x) + 1)(torch.ones(rank + 1))
    ours = context.transport()
    for apart in (lambda x: fl.all_to_all(x, [1, 1]) + 1, lambda x: fl.all_reduce(x.detach() + 1, group=ours)):
        with pytest.raises(Exception, match="has no operator"):
            compiled(apart)(torch.ones(2))
        x = torch.ones(2, requires_grad=True)
        assert torch.equal(compiled(apart, fullgraph=False)(x), torch.full((2,), 2.0))
    with pytest.raises(Exception, match="give a process group of torch"):
        compiled(lambda x: fl.all_reduce(x, group=fl.transport.Transport) + 1)(torch.ones(2))


def check_gradients(rank: int, world: int) -> None:
    """The gradient of a sum over all ranks, against one process that has every rank's tensor."""
    for lengths in ([2, 2], [1, 3]):
        every = [gradient(n * 3, 20 + r).view(n, 3).requires_grad_() for r, n in enumerate(lengths)]
        factors = [gradient(sum(lengths) * 3, 30 + r).view(-1, 3) for r in range(world)]
        sum(((torch.cat(every) * f).sum() for f in factors), torch.zeros(())).backward()
        mine = every[rank].detach().requires_grad_()
        (fl.all_gather(mine) * factors[rank]).sum().backward()
        torch.testing.assert_close(mine.grad, every[rank].grad)


@on_processes(2)
def test_gradients_of_single_calls(rank: int, world: int) -> None:
    check_gradients(rank, world)
    for op, scale in ((fl.Sum, 1.0), (fl.Average, 0.5)):
        x = torch.ones(4, 2, requires_grad=True)
        (fl.reduce_scatter(x, op=op) * (rank + 1)).sum().backward()
        assert x.grad is not None and x.grad[:, 0].tolist() == [scale, scale, 2 * scale, 2 * scale]
    splits = [1, 2] if rank == 0 else [3, 1]
    x = torch.ones(sum(splits), 2, requires_grad=True)
    (fl.all_to_all(x, splits) * (rank + 1)).sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [1.0] * splits[0] + [2.0] * splits[1]
    x = torch.ones(4 if rank == 0 else 2, 2, requires_grad=True)  # without splits, each rank cuts its own rows evenly
    (fl.all_to_all(x) * (rank + 1)).sum().backward()
    half = len(x) // 2
    assert x.grad is not None and x.grad[:, 0].tolist() == [1.0] * half + [2.0] * half
    empty = torch.ones(0, 3, requires_grad=True)
    (fl.all_gather(empty).sum() + fl.reduce_scatter(empty).sum()).backward()
    assert empty.grad is not None and empty.grad.shape == (0, 3)
    scalar = torch.tensor(1.0 + rank, requires_grad=True)
    fl.all_gather(scalar).sum().backward()
    assert scalar.grad is not None and scalar.grad.item() == 2.0


@on_processes(2)
def test_ddp_with_the_hook(rank: int, world: int) -> None:
    def outcome(hooked: bool, is_compiled: bool) -> Result:
        model = DistributedDataParallel(make_model())
        hook = fl.ddp.register(model, "int4") if hooked else None
        used = compiled(model, fullgraph=False) if is_compiled else model
        train(used, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(3))
        if hook is not None:
            hook.close()
        return [weights(model)]

    found: list[Result] = []
    theirs = breaks_in(lambda: outcome(False, True))
    assert breaks_in(lambda: found.append(outcome(True, True))) == theirs
    torch.testing.assert_close(found[0], outcome(True, False))


@on_processes(2)
def test_fsdp_with_compress(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))

    def outcome(how: str, codecs: tuple[str | None, str | None] = ("int8", "int8")) -> Result:
        model = test_fsdp.make_model()
        for layer in model[1:-1]:
            if how == "layers":
                layer.compile(backend="aot_eager", fullgraph=True)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        fl.fsdp.compress(model, *codecs)
        used = compiled(model, fullgraph=False) if how == "whole" else model
        return test_fsdp.run(used, 3)

    found: list[Result] = []
    expected = outcome("eager")
    assert breaks_in(lambda: found.append(outcome("layers"))) == {}
    torch.testing.assert_close(found.pop(), expected)
    theirs = breaks_in(lambda: outcome("whole", (None, None)))
    assert breaks_in(lambda: found.append(outcome("whole"))) == theirs
    torch.testing.assert_close(found.pop(), expected)
