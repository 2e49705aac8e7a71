"""Where a user's tensors are made by default changes nothing: fusionlayer names the device of each tensor it makes."""

import ast
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import fusionlayer as fl
from fusionlayer import codecs
from fusionlayer.transport import local
from tests.integrations.training import make_model, train, weights
from tests.loops import looped
from tests.synthetic import gradient
from tests.tiers import tiered

PACKAGE = Path(fl.__file__).parent
MAKE = {function.__name__ for function in _device_constructors()}
"""Functions of torch that make a tensor on the default device, unless they are given another."""


def test_code_names_the_device_of_every_tensor_it_makes() -> None:
    """For tensors of the host write ``device="cpu"``, for others the device of the tensor that they lie beside."""
    named, unnamed = 0, []
    for path in PACKAGE.rglob("*.py"):
        code = ast.parse(path.read_text())
        for made in _made(code):
            if any(keyword.arg == "device" for keyword in made.keywords):
                named += 1
            else:
                unnamed.append(f"{path.relative_to(PACKAGE.parent)}:{made.lineno}: {ast.unparse(made)}")
    assert not unnamed, "\n".join(unnamed)
    assert named > 150


def _made(code: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(code):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)) if name in MAKE:
                yield node
            # A function that is passed on instead of called: nobody sees what it is given.
            case ast.Call(args=args, keywords=keywords):
                for each in (*args, *(keyword.value for keyword in keywords)):
                    match each:
                        case ast.Attribute(value=ast.Name("torch"), attr=name) if name in MAKE:
                            yield ast.Call(each, [], [], lineno=each.lineno)


class _Ours(TorchFunctionMode):
    """Within it the default device is that of fusionlayer's tensors only; others are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _device_constructors() and kwargs.get("device") is None and not _is_ours(sys._getframe(1)):
            kwargs = {**kwargs, "device": "cpu"}
        return function(*args, **kwargs)


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether fusionlayer makes a tensor, or has a function of torch make it. State of optimizers is torch's."""
    module = "torch.nn"
    while frame and module.startswith("torch.") and not module.startswith("torch.optim"):
        module, frame = f"{frame.f_globals['__name__']}.", frame.f_back
    return module.startswith("fusionlayer.")


@contextmanager
def default_device() -> Iterator[None]:
    """Have a default device whose tensors have no numbers: whoever reads one is noticed."""
    run = threading.Thread.run

    def run_within(thread: threading.Thread) -> None:
        with torch.device("meta"), _Ours():
            run(thread)

    with mock.patch.object(threading.Thread, "run", run_within), torch.device("meta"), _Ours():
        yield


def _planned(**options: Any) -> Callable[[int], Tensor]:
    def body(rank: int) -> Tensor:
        fl.init()
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer: Any = fl.DistributedOptimizer(sgd, model.named_parameters(), **options)
        train(model, optimizer, rank, range(3))
        optimizer.load_state_dict(optimizer.state_dict())
        fl.broadcast_parameters(model.state_dict())
        fl.broadcast_optimizer_state(optimizer)
        train(model, optimizer, rank, range(3, 6))
        optimizer.close()
        fl.shutdown()
        return weights(model)

    return body


def _both(world: int, body: Callable[[int], Tensor]) -> None:
    """Run ``body`` on ranks that are threads, without a default device and with one; results must be the same."""
    expected = local.run(body, world)
    with default_device():
        found = local.run(body, world)
    assert all(map(torch.equal, expected, found))


OPTIONS: list[dict[str, Any]] = [
    *({"codec": name} for name in codecs.names()),
    {"codec": "int4", "planner": "safusion"},
    {"codec": "auto"},
    {"codec": "int8", "sync": fl.Local(2)},
]
FEW = ("raw", "int4", "zip", "topk", "thc", "dynamiq", "powersgd")


@looped(
    "options",
    tiered(OPTIONS, lambda options: len(options) > 1 or options["codec"] in FEW),
    ids=lambda options: "-".join([options["codec"], *list(options)[1:]]),
)
def test_optimizers_train_the_same(options: dict[str, Any]) -> None:
    _both(2, _planned(**options))


def test_single_calls_give_the_same() -> None:
    def body(rank: int) -> Tensor:
        fl.init()
        x, found = gradient(5000, rank), []
        for codec in (*FEW, "auto", "oktopk", "omnireduce"):
            found.append(fl.all_reduce(x.clone(), codec=codec))
        for codec in ("raw", "int8", "zip", "auto"):
            found += [fl.all_gather(x, codec=codec), fl.reduce_scatter(x, codec=codec), fl.all_to_all(x, codec=codec)]
        assert fl.broadcast_object({"rank": rank}) == {"rank": 0}
        fl.shutdown()
        return torch.cat([each.reshape(-1) for each in found])

    _both(2, body)
