"""Each feature of DistributedDataParallel under the hook: the result is DDP's own, or a refusal that names the feature.

A case takes steps without an update, so that lossy codecs get the gradients of plain DDP: what came out plus what ranks
hold back is what plain DDP gives, parameter by parameter.
"""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import fusionlayer as fl
from fusionlayer.scheduler import Memory
from tests.harness import run_ranks
from tests.integrations.test_averages_after_backward import CHANGES
from tests.integrations.training import assert_same_on_all_ranks, fill, weights
from tests.ranks import on_processes
from tests.synthetic import gradient
from tests.tiers import exhaustive

pytestmark = pytest.mark.medium

WIDTH = 24
CODECS: dict[str, dict[str, Any]] = {
    "raw": {"codec": "raw"},
    "int4": {"codec": "int4"},
    "topk": {"codec": "topk", "density": 0.1},
}
MORE_CODECS = CODECS | {
    "int4 in 8 bits": {"codec": "int4", "feedback_bits": 8},
    "int4 by hops": {"codec": "int4", "algorithm": "ring"},
    "topk fused": {"codec": "topk", "density": 0.1, "ahead": False},
    "powersgd": {"codec": "powersgd"},
}


class Net(nn.Module):
    """Layers, of which ``run`` says what is done with them."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.run: Callable[..., Tensor] = run
        fill(self)

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        return self.run(self, x, *how)


def straight(net: Any, x: Tensor) -> Any:
    return net.third(net.second(net.first(x).tanh()).tanh())


def reused(net: Any, x: Tensor) -> Any:
    return net.first(net.second(net.third(net.second(net.first(x).tanh()).tanh()).tanh()).tanh())


def without_second(net: Any, x: Tensor) -> Any:
    return net.third(net.first(x).tanh())


def branching(net: Any, x: Tensor, use_second: bool) -> Any:
    return straight(net, x) if use_second else without_second(net, x)


def checkpointed(use_reentrant: bool) -> Callable[..., Tensor]:
    def run(net: Net, x: Tensor) -> Tensor:
        for layer in (net.first, net.second, net.third):
            x = checkpoint(layer, x, use_reentrant=use_reentrant).tanh()
        return x

    return run


def in_two_segments(use_reentrant: bool) -> Callable[..., Tensor]:
    def run(net: Net, x: Tensor) -> Tensor:
        for layer in (net.first, net.second, net.first, net.third):
            x = checkpoint(layer, x, use_reentrant=use_reentrant).tanh()
        return x

    return run


def of_types(net: Net, x: Tensor) -> Tensor:
    for layer in (net.first, net.second, net.third):
        x = layer(x.to(layer.weight.dtype)).tanh()
    return x


def batch(rank: int, step: int) -> Tensor:
    return gradient(4 * WIDTH, 9000 + 100 * step + rank).view(4, WIDTH).requires_grad_()


def loss(model: Any, rank: int, step: int, *how: Any) -> Any:
    return (model(batch(rank, step), *how) ** 2).sum()


Steps = Callable[[Any, int], Iterator[None]]
"""Takes a model and a rank, and yields when the gradients of a step are in place."""


def ordinary(model: Any, rank: int) -> Iterator[None]:
    for step in range(4):
        loss(model, rank, step).backward()
        yield


def accumulated(model: Any, rank: int) -> Iterator[None]:
    for step in range(0, 6, 2):
        with model.no_sync():
            loss(model, rank, step).backward()
        loss(model, rank, step + 1).backward()
        yield


def two_forwards(model: Any, rank: int) -> Iterator[None]:
    for step in range(0, 6, 2):
        (loss(model, rank, step) + loss(model, rank, step + 1)).backward()
        yield


def branches(model: Any, rank: int) -> Iterator[None]:
    # Used by both, by rank 0 alone, by none, by none, by rank 1 alone, by both, by none.
    for step, users in enumerate([(0, 1, 2), (0,), (), (), (1,), (0, 1, 2), ()]):
        loss(model, rank, step, rank in users).backward()
        yield


def branches_accumulated(model: Any, rank: int) -> Iterator[None]:
    for step, users in enumerate([(0, 1, 2), (), (0,), ()]):
        with model.no_sync():
            loss(model, rank, 2 * step, rank in users).backward()
        loss(model, rank, 2 * step + 1, False).backward()
        yield


def uneven(model: Any, rank: int) -> Iterator[None]:
    with model.join():
        for step in range(2 + 2 * rank):
            loss(model, rank, step).backward()
            yield


def uneven_branches(model: Any, rank: int) -> Iterator[None]:
    with model.join():
        for step in range(2 + 2 * rank):
            loss(model, rank, step, step != 1).backward()
            yield
    for step in range(3):
        loss(model, rank, 10 + step, step == 1).backward()


def clipped(model: Any, rank: int) -> Iterator[None]:
    for _ in ordinary(model, rank):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5
        yield


@dataclass
class Feature:
    """A feature: layers, arguments of DDP, what is done."""

    run: Callable[..., Tensor] = straight
    steps: Steps = ordinary
    ddp: dict[str, Any] = field(default_factory=dict)
    in_full: bool = True
    types: tuple[torch.dtype, ...] = (torch.float32,) * 3
    compiled: bool = False
    set_to_none: bool = True
    plain: Callable[..., Any] | None = None

    def net(self) -> Net:
        net = Net(self.run)
        for layer, dtype in zip((net.first, net.second, net.third), self.types, strict=True):
            layer.to(dtype)
        return net


UNUSED = {"find_unused_parameters": True}
VIEW = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}
TYPES = (torch.float32, torch.bfloat16, torch.float32)
FEATURES = {
    "none": Feature(),
    "one bucket": Feature(ddp={"bucket_cap_mb": 25}),
    "gradient_as_bucket_view": Feature(ddp=VIEW),
    "zeros in place of None": Feature(ddp=VIEW, set_to_none=False),
    "no_sync": Feature(steps=accumulated),
    "no_sync, views": Feature(steps=accumulated, ddp=VIEW),
    "static_graph": Feature(ddp=STATIC),
    "static_graph, types": Feature(of_types, ddp=STATIC, types=TYPES),
    "static_graph, unused": Feature(without_second, ddp=STATIC),
    "static_graph, unused, views": Feature(without_second, ddp=STATIC | UNUSED | VIEW),
    "find_unused_parameters": Feature(branching, branches, UNUSED),
    "find_unused_parameters, views": Feature(branching, branches, UNUSED | VIEW),
    "find_unused_parameters, zeros": Feature(branching, branches, UNUSED, set_to_none=False),
    "find_unused_parameters, all used": Feature(ddp=UNUSED),
    "find_unused_parameters, no_sync": Feature(branching, branches_accumulated, UNUSED),
    "reentrant checkpoints": Feature(checkpointed(True)),
    "reentrant checkpoints, views": Feature(checkpointed(True), ddp=VIEW),
    "reentrant checkpoints, static_graph": Feature(checkpointed(True), ddp=STATIC),
    "reentrant checkpoints, no_sync": Feature(checkpointed(True), accumulated),
    "checkpoints": Feature(checkpointed(False)),
    "checkpoints, find_unused_parameters": Feature(checkpointed(False), ddp=UNUSED),
    "reused layers": Feature(reused),
    "reused layers in checkpoints": Feature(in_two_segments(False)),
    "reused layers in reentrant checkpoints, static_graph": Feature(in_two_segments(True), ddp=STATIC),
    "two forwards": Feature(steps=two_forwards),
    "types": Feature(of_types, types=TYPES),
    "join": Feature(steps=uneven),
    "join, find_unused_parameters": Feature(branching, uneven_branches, UNUSED, in_full=False),
    "torch.compile": Feature(compiled=True, ddp={"bucket_cap_mb": 25}),
    "clipping": Feature(steps=clipped, in_full=False),
}
FAST = (  # those that reach code of ours that no other case reaches
    "gradient_as_bucket_view",
    "no_sync",
    "static_graph, types",
    "static_graph, unused",
    "find_unused_parameters",
    "reentrant checkpoints",
    "reused layers in reentrant checkpoints, static_graph",
    "two forwards",
    "join, find_unused_parameters",
    "clipping",
)


NOT_OF_DDP = {
    "reused layers in reentrant checkpoints, no_sync": Feature(
        in_two_segments(True), accumulated, plain=in_two_segments(False)
    )
}
OPTIMIZED = (  # those that are not of DDP alone
    "none",
    "zeros in place of None",
    "no_sync",
    "find_unused_parameters",
    "find_unused_parameters, zeros",
    "reentrant checkpoints",
    "reentrant checkpoints, no_sync",
    "checkpoints",
    "reused layers",
    "reused layers in checkpoints",
    "reused layers in reentrant checkpoints, static_graph",
    "reused layers in reentrant checkpoints, no_sync",
    "two forwards",
    "types",
    "torch.compile",
    "clipping",
)
FAST_OPTIMIZED = (
    "reentrant checkpoints",
    "reused layers in reentrant checkpoints, static_graph",
    "reused layers in reentrant checkpoints, no_sync",
    "two forwards",
    "types",
)

Outcome = tuple[list[dict[str, Any]], dict[str, Tensor]]
"""Each step's gradients by name, and what is held back at the end."""


def with_ddp(feature: Feature, rank: int, options: dict[str, Any] | None) -> Outcome:
    """Take the steps with DDP and the hook; without ``options``, with plain DDP."""
    model = DistributedDataParallel(feature.net(), **{"bucket_cap_mb": 0.001, **feature.ddp})
    hook = None if options is None else fl.ddp.register(model, **options)
    used = torch.compile(model, backend="eager") if feature.compiled else model
    seen = []
    for _ in feature.steps(used, rank):
        seen.append(gradients(model.module))
        model.zero_grad(set_to_none=feature.set_to_none)
    state = {} if hook is None else hook.state_dict()
    if hook is not None:
        hook.close()
    return seen, residuals(state)


def with_optimizer(feature: Feature, rank: int, options: dict[str, Any]) -> Outcome:
    """Take the steps with ``DistributedOptimizer``, at a learning rate of zero."""
    net = feature.net()
    passes = 2 if feature.steps is accumulated else 1
    named = net.named_parameters()
    optimizer = fl.DistributedOptimizer(
        SGD(net.parameters(), lr=0.0), named, backward_passes_per_step=passes, **options
    )
    model = Accumulating(torch.compile(net, backend="eager") if feature.compiled else net)
    seen = []
    for _ in feature.steps(model, rank):
        seen.append(gradients(net))
        optimizer.step()
        optimizer.zero_grad(set_to_none=feature.set_to_none)
    state = optimizer.state_dict()["fusionlayer"]
    optimizer.close()
    return seen, residuals(state)


class Accumulating(nn.Module):
    """A model with DDP's ``no_sync``, for an optimizer that counts backward passes."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any) -> Any:
        return self.module(*given)

    def no_sync(self) -> Any:
        return nullcontext()


def gradients(net: nn.Module) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def residuals(state: dict[str, Any]) -> dict[str, Tensor]:
    memory = Memory()
    memory.load_state_dict(state)
    return memory.state_dict()["residuals"]


def added(seen: list[dict[str, Any]], name: str) -> Tensor | float:
    return sum((step[name].double() for step in seen if step[name] is not None), start=0.0)


def check_feature(
    name: str,
    rank: int,
    world: int,
    codecs: dict[str, dict[str, Any]],
    front: Callable[[Feature, int, dict[str, Any]], Outcome] = with_ddp,
) -> None:
    feature = (FEATURES | NOT_OF_DDP)[name]
    plain, _ = with_ddp(replace(feature, run=feature.plain or feature.run), rank, None)
    for codec, options in codecs.items():
        print(name, codec)
        seen, held = front(feature, rank, options)
        assert len(seen) == len(plain)
        for number, (ours, theirs) in enumerate(zip(seen, plain, strict=True)):
            for parameter in theirs:
                where = f"{name}, {codec}, step {number}, {parameter}"
                one, other = ours[parameter], theirs[parameter]
                assert (one is None) == (other is None), where
                if one is not None and options["codec"] == "raw":
                    bound = 2e-2 if one.dtype == torch.bfloat16 else 1e-5
                    torch.testing.assert_close(one, other, rtol=bound, atol=bound * float(other.abs().max()))
        last = seen[-1]
        for parameter in last:
            if last[parameter] is not None and feature.steps not in (uneven, uneven_branches):
                assert_same_on_all_ranks(last[parameter])
            if not feature.in_full or parameter not in held:
                continue
            owed = held[parameter].clone()
            dist.all_reduce(owed)
            # Ranks that join have seen fewer steps than the last one.
            if rank == world - 1:
                given, came = added(plain, parameter), added(seen, parameter)
                dtype = feature.types[["first", "second", "third"].index(parameter.partition(".")[0])]
                slack = 1e-5 if dtype != torch.bfloat16 else 2e-2
                slack = max(slack, 2e-2 if options.get("feedback_bits") == 8 else 0)
                bound = slack * float(torch.as_tensor(given).abs().max()) + 1e-9
                far = float((came + owed.view(last_shape(plain, parameter)) - given).abs().max())
                assert far <= bound, f"{name}, {codec}: {parameter} is off by {far}, at most {bound} expected"


def last_shape(seen: list[dict[str, Any]], parameter: str) -> torch.Size:
    shapes = [step[parameter].shape for step in seen if step[parameter] is not None]
    return shapes[0] if shapes else torch.Size([-1])


def check_features(
    rank: int, world: int, names: tuple[str, ...], codecs: dict[str, dict[str, Any]], front: Any = with_ddp
) -> None:
    for name in names:
        check_feature(name, rank, world, codecs, front)


def test_features() -> None:
    run_ranks(check_features, 2, FAST, CODECS, timeout=120)


def test_features_of_models_with_an_optimizer() -> None:
    run_ranks(check_features, 2, FAST_OPTIMIZED, CODECS, with_optimizer, timeout=120)


def check_rest(rank: int, world: int, codecs: list[dict[str, Any]]) -> None:
    """What is kept of a parameter is the same to the bit after steps in which no rank has used it."""
    for options in codecs:
        print(options)
        model = DistributedDataParallel(Net(branching), bucket_cap_mb=0.001, find_unused_parameters=True)
        hook = fl.ddp.register(model, **options)

        def kept(hook: Any = hook) -> dict[str, Any]:
            state = hook.state_dict()
            parts = {key: state[key].get("second.weight", {}) for key in ("residuals", "packed", "tensors")}
            return {key: part if isinstance(part, dict) else {"": part} for key, part in parts.items()}

        for step, used in enumerate((True, True, False, False, True, False)):
            before = kept()
            model.zero_grad()
            loss(model, rank, step, used).backward()
            after = kept()
            same = all(before[key].keys() == after[key].keys() for key in after) and all(
                torch.equal(value, after[key][name]) for key, part in before.items() for name, value in part.items()
            )
            assert same != used, f"{options}: step {step}"
        hook.close()


KEEPING = [
    {"codec": "int4"},
    {"codec": "topk", "density": 0.1},
    {"codec": "powersgd"},
    {"codec": "dgc", "density": 0.1},
    {"codec": "int4", "feedback_bits": 8},
]
KEEPING_TOO = [
    *({"codec": "int4", "algorithm": algorithm} for algorithm in ("two_shot", "ring", "butterfly")),
    {"codec": "thc", "error_feedback": True},
    {"codec": "dynamiq", "algorithm": "ring", "error_feedback": True},
    {"codec": "mxfp4", "scale": "auto", "error_feedback": True},
    {"codec": "onebit"},
    {"codec": "topk", "density": 0.1, "algorithm": "oktopk"},
    {"codec": "topk", "density": 0.1, "feedback_bits": 8},
    {"codec": "gaussiank"},
    {"codec": "redsync"},
    {"codec": "sidco"},
    {"codec": "omnireduce", "error_feedback": True},
]


def test_what_an_unused_parameter_owes_is_kept_to_the_bit() -> None:
    run_ranks(check_rest, 2, KEEPING, timeout=120)


@exhaustive(guarded_by="tests/integrations/test_features.py::test_what_an_unused_parameter_owes_is_kept_to_the_bit")
def test_what_an_unused_parameter_owes_is_kept_to_the_bit_with_every_codec() -> None:
    run_ranks(check_rest, 3, KEEPING + KEEPING_TOO, timeout=600)


@exhaustive(guarded_by="tests/integrations/test_features.py::test_features")
def test_all_features() -> None:
    run_ranks(check_features, 2, tuple(FEATURES), MORE_CODECS, timeout=600)


@exhaustive(guarded_by="tests/integrations/test_features.py::test_features_of_models_with_an_optimizer")
def test_all_features_with_an_optimizer() -> None:
    run_ranks(check_features, 2, OPTIMIZED, MORE_CODECS, with_optimizer, timeout=600)


def make_ddp() -> Any:
    return DistributedDataParallel(Net(straight), bucket_cap_mb=0.001)


def perturbed(model: Any, optimizer: Any, rank: int, *, alone: bool = False) -> None:
    """Take three steps of SAM; with ``alone`` each rank climbs by its own gradient."""
    for step in range(3):
        with model.no_sync() if alone else nullcontext():
            loss(model, rank, step).backward()
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for parameter in model.parameters():
                parameter += parameter.grad * (0.05 / norm)
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        model.load_state_dict(before)
        optimizer.step()
        optimizer.zero_grad()


def check_two_passes(rank: int, world: int, codecs: dict[str, dict[str, Any]]) -> None:
    def trained(alone: bool, options: dict[str, Any] | None) -> Tensor:
        model = make_ddp()
        if options is not None:
            fl.ddp.register(model, **options)
        perturbed(model, SGD(model.parameters(), lr=1e-3), rank, alone=alone)
        return weights(model)

    start = weights(make_ddp())
    for alone in (False, True):
        plain = trained(alone, None)
        for name, options in codecs.items():
            result = trained(alone, options | ({"check_replicas": False} if alone else {}))
            assert_same_on_all_ranks(result)
            bound = 1e-5 if name == "raw" else 1.0
            assert (result - plain).norm() < bound * (plain - start).norm(), (alone, name)
    with pytest.raises(fl.ReplicaMismatch, match="two passes such as SAM.*check_replicas=False"):
        trained(True, {"codec": "raw", "check_replicas": 1})


def check_optimizer(rank: int, world: int, codecs: dict[str, dict[str, Any]]) -> None:
    """SAM gives plain DDP's weights, and copies of the model have nothing of the optimizer."""
    model = make_ddp()
    perturbed(model, SGD(model.parameters(), lr=1e-3), rank)
    for name, options in codecs.items():
        net = Net(straight)
        optimizer = fl.DistributedOptimizer(SGD(net.parameters(), lr=1e-3), net.named_parameters(), **options)
        perturbed(net, optimizer, rank)
        assert_same_on_all_ranks(weights(net))
        bound = 1e-5 if name == "raw" else 1.0
        moved = (weights(model) - weights(Net(straight))).norm()
        assert (weights(net) - weights(model)).norm() < bound * moved, name
        average, file = AveragedModel(net), io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        copies: list[Any] = [copy.deepcopy(net), torch.load(file, weights_only=False), average.module]
        for other in copies:
            loss(other, rank, 0).backward()
            loss(other, rank, 1).backward()  # a copy with the hooks would refuse it
        loss(net, rank, 3).backward()
        optimizer.step()
        average.update_parameters(net)
        assert_same_on_all_ranks(weights(average))
        optimizer.close()


def check_copies(rank: int, world: int, codecs: dict[str, dict[str, Any]]) -> None:
    """A copy of a model with a hook is plain DDP and may get a hook of its own; the original goes on with its hook."""
    for options in codecs.values():
        model = make_ddp()
        hook = fl.ddp.register(model, **options)
        optimizer = SGD(model.parameters(), lr=1e-3)

        def go_on(model: Any = model, optimizer: SGD = optimizer) -> None:
            optimizer.zero_grad()
            loss(model, rank, 0).backward()
            optimizer.step()

        go_on()
        average = AveragedModel(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies: list[Any] = [copy.deepcopy(model), torch.load(file, weights_only=False), average.module]
        for other in copies:
            loss(other, rank, 0).backward()
            plain = torch.cat([p.grad.view(-1) for p in other.parameters()])
            assert_same_on_all_ranks(plain)
            theirs = fl.ddp.register(other, **options)
            other.zero_grad()
            loss(other, rank, 0).backward()
            assert theirs.fusion_plan is not None, "its own hook was not called"
            theirs.close()
        go_on()
        average.update_parameters(model)
        assert_same_on_all_ranks(weights(average))
        assert hook.state_dict()["step"] == 2
        hook.close()


def check_resumed_types(rank: int, world: int) -> None:
    """A hook that goes on from a saved state has the bits of one that was not interrupted, in buckets of two types."""

    def go_on(model: Any) -> list[Tensor]:
        for step in (3, 4):
            model.zero_grad()
            loss(model, rank, step).backward()
        return [p.grad for p in model.parameters()]

    models = [DistributedDataParallel(FEATURES["types"].net(), bucket_cap_mb=0.001) for _ in range(2)]
    hooks = [fl.ddp.register(model, "int4") for model in models]
    for step in range(3):
        models[0].zero_grad()
        loss(models[0], rank, step).backward()
    saved = copy.deepcopy(hooks[0].state_dict())
    whole = go_on(models[0])
    hooks[1].load_state_dict(saved)
    assert all(map(torch.equal, go_on(models[1]), whole))


def check_refusals(rank: int, world: int) -> None:
    def register(net: nn.Module, codec: str = "int4", **ddp: Any) -> None:
        fl.ddp.register(DistributedDataParallel(net, **ddp), codec)

    net: Any
    layers = nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(fl.ConfigError, match="layer '0' makes sparse gradients; give the layer sparse=False"):
        register(layers)
    layers[0].weight.requires_grad_(False)
    register(layers)
    mixed = make_ddp()
    mixed.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)  # DDP would want streams of a device
    with pytest.raises(fl.ConfigError, match=r"DistributedDataParallel\(mixed_precision=...\).*use torch.autocast"):
        fl.ddp.register(mixed, "int4")
    complex_ = nn.Linear(4, 4, dtype=torch.complex64)
    with pytest.raises(fl.ConfigError, match="parameter 'weight' is of torch.complex64; expected floats"):
        register(complex_, "raw")
    with pytest.raises(fl.ConfigError, match="topk.*cannot encode torch.float64; expected float32"):
        register(nn.Linear(4, 4, dtype=torch.float64), "topk")
    with pytest.raises(fl.ConfigError, match="delay_all_reduce_named_params=...\\) with all parameters"):
        net = nn.Sequential(nn.Linear(4, 4))
        net[0].bias.requires_grad_(False)
        delayed = [("0.weight", net[0].weight)]
        register(net, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=net[0].weight)
    for theirs in (None, BuiltinCommHookType.ALLREDUCE):
        model = DistributedDataParallel(nn.Linear(4, 4))
        if theirs is None:
            model.register_comm_hook(None, allreduce_hook)
        else:
            model._register_builtin_comm_hook(theirs)
        with pytest.raises(fl.ConfigError, match="another communication hook.*leave the other hook out"):
            fl.ddp.register(model, "int4")
    with pytest.raises(fl.ConfigError, match="skip_all_reduce_unused_params=True.*leave it out"):
        register(nn.Linear(4, 4), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    frozen = nn.Linear(4, 4)
    model = DistributedDataParallel(frozen)
    frozen.bias.requires_grad_(False)
    with pytest.raises(fl.ConfigError, match="1 parameters require gradients, 2 when it was wrapped"):
        fl.ddp.register(model, "int4")
    # Layers are reused from the second step on, so the first part is sent before the next one comes.
    net = Net(lambda net, x, again: (in_two_segments(True) if again else checkpointed(True))(net, x))
    optimizer = fl.DistributedOptimizer(SGD(net.parameters(), lr=0.1), net.named_parameters(), codec="raw")
    loss(net, rank, 0, False).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(fl.UsageError, match="'first.*computed again after it had been sent.*use_reentrant=False"):
        loss(net, rank, 1, True).backward()
    model = make_ddp()
    fl.ddp.register(model, "int4")
    with (
        pytest.raises(fl.UsageError, match="divide_by_initial_world_size=False.*leave"),
        Join([model], divide_by_initial_world_size=False),
    ):
        loss(model, rank, 0).backward()


def check_changes(rank: int, world: int) -> None:
    """A gradient may change in its own parameter's hook, and not in one that runs while it is being reduced."""

    def changed(change: Callable[[Tensor], None], view: bool, static: bool, own: bool) -> Any:
        model: Any = DistributedDataParallel(
            Net(straight), bucket_cap_mb=0.001, gradient_as_bucket_view=view, static_graph=static
        )
        hook, net, parameter = fl.ddp.register(model, codec="raw"), model.module, model.module.third.weight
        loss(model, rank, 0).backward()
        (parameter if own else net.first.weight).register_post_accumulate_grad_hook(lambda _: change(parameter))
        model.zero_grad()
        if own:
            loss(model, rank, 1).backward()
            hook.state_dict()
        else:
            told = "third.weight' was changed or replaced while.*: change gradients after backward"
            with pytest.raises(fl.UsageError, match=told):
                loss(model, rank, 1).backward()
            with pytest.raises(fl.UsageError, match=told):
                hook.state_dict()
        hook.close()
        return parameter.grad

    for view in (False, True):
        for change in CHANGES:
            changed(change, view, False, False)
        changed(lambda _: None, view, True, True)
    doubled = changed(CHANGES[0], False, False, True)
    model = make_ddp()
    loss(model, rank, 1).backward()
    torch.testing.assert_close(doubled, 2 * model.module.third.weight.grad)


@on_processes(2, timeout=120)
def test_two_passes_copies_and_refusals(rank: int, world: int) -> None:
    check_two_passes(rank, world, CODECS)
    check_copies(rank, world, CODECS)
    check_optimizer(rank, world, CODECS)
    check_resumed_types(rank, world)
    check_refusals(rank, world)
    check_changes(rank, world)
