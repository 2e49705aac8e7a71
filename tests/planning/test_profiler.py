"""What is measured is what was asked for, on every rank; no test looks at how long anything takes."""

import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.plan import TensorInfo
from fusionlayer.planning.cost_model import Curve
from fusionlayer.planning.profile import Profile
from fusionlayer.planning.profiler import costs, link, training
from fusionlayer.planning.profiler.codecs import measure_codecs
from fusionlayer.planning.profiler.job import measure_profile
from fusionlayer.planning.profiler.link import measure_collectives
from fusionlayer.planning.profiler.machine import describe_machine
from fusionlayer.planning.profiler.models import load_model
from fusionlayer.planning.profiler.step import as_model, measure_step
from fusionlayer.planning.profiler.training import profile_training
from fusionlayer.planning.sizes import Sizes
from fusionlayer.scheduler.plan_controller import StepSeconds
from fusionlayer.transport import local
from tests.loops import looped
from tests.ranks import over_threads

SMALL = Sizes(elements=(256, 1024), nbytes=(1024, 4096), steps=2, repeats=2)


class Net(nn.Module):
    """Two layers, a parameter that is used outside of any module's forward, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False)
        self.second = nn.Linear(2, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(1))

    def __call__(self, x: Tensor, targets: Tensor) -> Tensor:
        return (self.scale * self.second(self.first(x)) - targets).square().mean()


def make_net() -> tuple[nn.Module, list[Tensor]]:
    return Net(), [torch.ones(4, 3), torch.zeros(4, 1)]


def make_nothing() -> None:
    return None


def test_a_step_tells_when_gradients_arrive_and_parameters_are_used() -> None:
    net, batch = make_net()
    found = measure_step(net, torch.optim.SGD(net.parameters(), lr=0.1), lambda _: batch, warm_up=1, steps=3)
    assert found["tensors"] == {
        "scale": [1, "float32", 4],
        "first.weight": [6, "float32", 4],
        "second.weight": [2, "float32", 4],
    }
    ready, used = found["ready"], found["used"]
    assert 0 < ready["second.weight"] < ready["first.weight"]
    assert 0 < used["first.weight"] < used["second.weight"]
    assert used["scale"] == 0, "it is not used by a forward of its own module"
    assert all(found[phase] > 0 for phase in ("forward", "backward", "optimizer"))
    model = as_model("net", found)
    assert [tensor.ready for tensor in model.tensors] == sorted(tensor.ready for tensor in model.tensors)


def test_a_forward_that_returns_no_loss_is_an_error() -> None:
    net = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="returned Tensor; expected the loss"):
        measure_step(net, torch.optim.SGD(net.parameters()), lambda _: [torch.ones(4, 3)], 0, 1)


@looped("name", ["int4", "raw", "bf16"])
def test_codecs_have_costs(name: str) -> None:
    codec = codecs.get(name)
    (costs,) = measure_codecs({name: codec}, (256, 1024), repeats=1).values()
    assert costs["lossless"] == codec.lossless
    assert costs["bits"] == pytest.approx({"int4": 4.25, "raw": 32, "bf16": 16}[name], abs=0.01)
    for verb in ("encode", "decode", "sum", "recode"):
        assert [size for size, _ in costs[verb]] == [256, 1024]
        assert all(seconds > 0 for _, seconds in costs[verb])


def test_sizes_end_where_they_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank stops at the same size, by the clock of rank 0; the first two are always measured."""
    sizes = (1024, 2048, 4096, 8192)
    clocks = {f"rank {rank}": count(0, 1000 * rank) for rank in range(3)}
    clock = lambda: float(next(clocks[threading.current_thread().name]))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(link, "time", SimpleNamespace(perf_counter=clock, process_time=lambda: 0.0))
        for found in over_threads(3, lambda transport: measure_collectives(transport, sizes, repeats=1, limit=1.0)):
            assert all([size for size, _ in points] == list(sizes) for points in found.values())
    for found in over_threads(3, lambda transport: measure_collectives(transport, sizes, repeats=1, limit=0.0)):
        assert all([size for size, _ in points] == [1024, 2048] for points in found.values())
    for found in over_threads(2, lambda transport: measure_collectives(transport, sizes, repeats=1, limit=1e6)):
        assert all([size for size, _ in points] == list(sizes) for points in found.values())


def test_a_profile_of_the_training_that_runs() -> None:
    tensors = {name: TensorInfo(name, numel, "float32", 4) for name, numel in (("a", 300), ("b", 2000))}
    before = torch.get_rng_state()

    def body(transport: local.LocalTransport) -> Profile:
        later = 0.5 * transport.rank
        steps = [
            StepSeconds(8.0, 2.0 + later, 1.0, 0.5, {"b": 0.0, "a": 2.0 + later}, {}),
            StepSeconds(8.0, 2.0 + later, 1.0, 0.5, {"b": 0.0, "a": 2.0 + later}, {}),
            StepSeconds(99.0, 9.0, 1.0, 0.5, {"b": 0.0, "a": 9.0}, {}),
        ]
        return profile_training(steps, tensors, {"int8": codecs.get("int8")}, transport)

    first, second = over_threads(2, body)  # type: ignore[arg-type]
    assert first == second
    assert [(tensor.name, tensor.ready) for tensor in first.model.tensors] == [("b", 0.0), ("a", 2.25)]
    assert (first.model.backward, first.model.forward) == (2.25, 4.25)
    assert set(first.codecs) == {"int8"} and set(first.collectives) == {"dense", "one_shot", "two_shot"}
    assert first.transfer("gather", 2) is not None and len(first.links) == 1
    assert torch.equal(torch.get_rng_state(), before), "training goes on with the numbers that it would have drawn"


def test_a_model_of_the_users_is_loaded() -> None:
    model, batch = load_model(f"{__name__}:make_net")
    assert isinstance(model, Net) and len(batch) == 2


@looped(
    "name, message",
    [
        ("gpt5", "expected one of gpt, resnet, or module:function"),
        ("nowhere.to.be.found:model", "cannot be loaded: No module"),
        (f"{__name__}:nothing", "cannot be loaded: module .* has no attribute 'nothing'"),
        (f"{__name__}:make_nothing", "returned NoneType; expected a model"),
    ],
)
def test_what_is_no_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(name)


def test_a_profile_of_one_rank_has_no_links(tmp_path: Path) -> None:
    environment = describe_machine("machine")
    found = measure_profile(
        f"{__name__}:make_net", {"int4": codecs.get("int4")}, local.alone(), sizes=SMALL, environment=environment
    )
    found.to_yaml(tmp_path / "p.yaml")
    profile = Profile.from_yaml(tmp_path / "p.yaml")
    assert profile.model.name == "make_net" and not profile.links and not profile.collectives
    assert set(profile.environment) == {"hardware", "load", "command", "torch", "python", "date"}
    with pytest.raises(ConfigError, match="profile has no links; measure one with two ranks or more"):
        profile.link("1gbit")
    with pytest.raises(ConfigError, match="profile has no links"):
        _ = profile.fastest_rate


@looped("world", [2, 3])
def test_a_profile_of_more_ranks_is_the_same_on_all(world: int) -> None:
    def body(transport: local.LocalTransport) -> Profile:
        return measure_profile(
            f"{__name__}:make_net",
            {},
            transport,
            pair=transport if world == 2 else None,
            rate="1gbit",
            sizes=SMALL,
            environment={"hardware": "machine"},
        )

    first, *others = over_threads(world, body)  # type: ignore[arg-type]
    assert all(other == first for other in others)
    assert first.machine.workers == world
    assert set(first.links) == {"1gbit"} and set(first.collectives) == {"dense", "one_shot", "two_shot"}
    assert all(set(by_world) == {str(world)} for by_world in first.collectives.values())


def test_links_inside_and_between_nodes_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By bytes that a rank sends inside its node, and by bytes that all ranks of a node send to others."""
    monkeypatch.setattr(training, "_NBYTES", SMALL.nbytes)
    monkeypatch.setattr(costs, "measure_disturbance", lambda transport, repeats, clock: 0.0)
    tensors = {"a": TensorInfo("a", 300, "bfloat16", 2)}
    steps = [StepSeconds(8.0, 2.0, 1.0, 0.5, {"a": 2.0}, {})]

    def body(transport: local.LocalTransport) -> tuple[Profile, Profile]:
        online = profile_training(steps, tensors, {"raw": codecs.get("raw")}, transport)
        model, environment = f"{__name__}:make_net", {"hardware": "machine"}
        offline = measure_profile(model, {}, transport, rate="1gbit", sizes=SMALL, environment=environment)
        return online, offline

    found = over_threads(4, body, ranks_per_node=2)  # type: ignore[arg-type]
    for profile in found[0]:
        (between,) = profile.links.values()
        assert profile.inside is not None and profile.machine.per_host == 2
        assert isinstance(between.exchange, Curve) and isinstance(profile.inside.exchange, Curve)
        sizes = [size for size, _ in profile.inside.exchange.points]
        assert [size for size, _ in between.exchange.points] == [2 * size for size in sizes], (
            "both ranks of a node send"
        )
        assert set(profile.collectives) == {"dense", "one_shot", "two_shot"}
    assert found[0][0].codecs["raw"].bits == 16, "values of the model's type"
    assert over_threads(6, link.levels_of, ranks_per_node=2)[:3] == [  # type: ignore[arg-type]
        {"inside": (1,), "between": (2, 4)},
        {"inside": (0,), "between": (3, 5)},
        {"inside": (3,), "between": (0, 4)},
    ]
    for world, nodes in ((4, 4), (4, 1), (5, 2)):
        assert over_threads(world, link.levels_of, ranks_per_node=nodes) == [{}] * world  # type: ignore[arg-type]
