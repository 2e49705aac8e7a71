"""Training that plans by what its own first steps take: the same on every rank, and the same results."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusionlayer as fl
from fusionlayer import context
from fusionlayer.base.config import Config
from fusionlayer.base.errors import ConfigError
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.prediction import plan_costs
from fusionlayer.planning.profile import Profile
from fusionlayer.process.clock import DeviceClock
from fusionlayer.training import construction
from fusionlayer.training.construction import GradientOptions, make_planning
from fusionlayer.transport import local
from tests.fake_device import FakeDevice
from tests.integrations.test_optimizer_results import assert_same_bits, sgd, trained
from tests.integrations.training import assert_same_on_all_ranks, make_model, reference, train, weights
from tests.loops import looped
from tests.planning.measured import costs_measured
from tests.ranks import on_processes, on_ranks
from tests.scheduler.engines import MODEL

STEPS = 10  # the switch comes after the eighth
BY_COSTS = [name for name in fl.planners.names() if fl.planners.get(name).needs_costs]


def deep(rank: int, steps: int = STEPS, **options: Any) -> tuple[torch.Tensor, Any]:
    """Return weights and optimizer of a model with some more tensors, trained."""
    model = nn.Sequential(make_model()[0], *[nn.Linear(40, 40) for _ in range(3)], make_model()[2])
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-0.1, 0.1 + 0.01 * i, parameter.numel()).view(parameter.shape))
    optimizer: Any = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)
    train(model, optimizer, rank, range(steps))
    return weights(model), optimizer


# ---- ranks that are threads -----------------------------------------------------------------------------------------


@looped("planner", BY_COSTS)
def test_results_are_those_of_one_process(planner: str) -> None:
    with costs_measured(latency=0.0, per_byte=1e-6) as network:
        assert torch.equal(assert_same_bits(trained(3, STEPS, planner=planner)), reference(3, STEPS, sgd))
    assert sorted(network.ranks) == [0, 1, 2]


@looped("overlap", [False, True])
def test_the_switch_changes_no_bit_of_sparse_training(overlap: bool) -> None:
    """Ahead of fusion each tensor is selected by itself, so whatever it travels with the sums are the same."""

    def rank_main(rank: int, **options: Any) -> torch.Tensor:
        model = make_model()
        optimizer: Any = fl.DistributedOptimizer(
            sgd(model.parameters()),
            model.named_parameters(),
            codec="dgc",
            density=0.05,
            overlap_forward=model if overlap else None,
            **options,
        )
        train(model, optimizer, rank, range(STEPS))
        optimizer.synchronize()
        counts.append(len(optimizer.fusion_plan.buckets))
        optimizer.close()
        return weights(model)

    counts: list[int] = []
    expected = assert_same_bits(local.run(lambda rank: rank_main(rank), 2))
    with costs_measured(latency=0.0, per_byte=1e-6):
        cupcake = fl.planners.get("cupcake", partition="optimal")
        assert torch.equal(assert_same_bits(local.run(lambda rank: rank_main(rank, planner=cupcake), 2)), expected)
    assert counts[:2] == [1, 1] and counts[2] == counts[3] > 1


def test_what_was_measured_serves_the_next_run_and_explain(tmp_path: Path) -> None:
    def first(rank: int) -> None:
        _, optimizer = deep(rank, codec="int8", planner="mg_wfbp")
        if rank == 0:
            optimizer.fusion_plan.to_yaml(tmp_path / "plan.yaml")
            optimizer.cost_profile.to_yaml(tmp_path / "profile.yaml")
        optimizer.close()

    def second(rank: int) -> fl.FusionPlan:
        _, optimizer = deep(rank, 1, codec="int8", planner="mg_wfbp", profile=tmp_path / "profile.yaml")
        plan = optimizer.fusion_plan
        optimizer.close()
        assert isinstance(plan, fl.FusionPlan)
        return plan

    with costs_measured(latency=1e-4, per_byte=1e-7) as network:
        local.run(first, 2)
        assert len(network.ranks) == 2
        plans = local.run(second, 2)
        assert len(network.ranks) == 2, "nothing is measured again"
    profile, plan = Profile.from_yaml(tmp_path / "profile.yaml"), fl.FusionPlan.from_yaml(tmp_path / "plan.yaml")
    assert plans == [plan, plan]
    assert len(plan_costs(profile, plan, Scenario(profile.fastest_rate), measured=True)) == len(plan.buckets)


@pytest.mark.parametrize("fidelity", ["lossless", "near_lossless", "aggressive"])
def test_auto_chooses_and_says_why(fidelity: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fusionlayer")

    def rank_main(rank: int) -> tuple[torch.Tensor, set[str]]:
        trained_weights, optimizer = deep(rank, codec="auto", fidelity=fidelity)
        used = {bucket.codec for bucket in optimizer.fusion_plan.buckets}
        optimizer.close()
        return trained_weights, used

    with costs_measured(latency=1e-6, per_byte=1e-5):
        found = local.run(rank_main, 2)
    assert_same_bits([mine for mine, _ in found])
    sparse = {"topk", "chunked_topk", "dgc"}
    expected = {"lossless": {"raw"}, "near_lossless": {"int"}, "aggressive": {"int", *sparse}}[fidelity]
    assert found[0][1] == found[1][1] <= expected
    tables = [text for text in (record.getMessage() for record in caplog.records) if text.startswith("codecs by")]
    assert len(tables) == 1, "rank 0 alone"
    assert f"rules[0]: auto, {fidelity}: " in tables[0]


def test_rules_hold_from_the_first_step(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("rules: [{match: '*bias', codec: raw}, {codec: int, options: {bits: 8}}]")

    def rank_main(rank: int) -> dict[str, str]:
        _, optimizer = deep(rank, 1, policy=policy)
        by_name = {name: bucket.codec for bucket in optimizer.fusion_plan.buckets for name in bucket.names}
        assert optimizer.cost_profile is None, "rules that leave nothing open need no costs"
        optimizer.close()
        return by_name

    with costs_measured(latency=1e-6, per_byte=1e-5) as network:
        first, second = local.run(rank_main, 2)
    assert first == second and len(first) == 10 and not network.ranks
    assert all((codec == "raw") == name.endswith("bias") for name, codec in first.items())


@looped(
    "options, message",
    [
        ({"codec": "auto", "density": 0.1}, "codec 'auto' takes no options, got {'density': 0.1}"),
        ({"codec": "auto", "fidelity": "none"}, "known: lossless, near_lossless, aggressive"),
        ({"codec": "auto", "algorithm": "gather"}, "algorithm='gather' and ahead=None with codec 'auto'"),
        ({"codec": "int8", "fidelity": "lossless"}, "fidelity='lossless' is for codec='auto'"),
        ({"codec": "int8", "policy": "policy.yaml"}, "got a codec and a policy"),
        ({"policy": "policy.yaml", "fidelity": "lossless"}, "stand in the policy's file"),
        ({"policy": "no_such.yaml"}, "policy no_such.yaml cannot be read"),
        ({"planner": "safusion", "profile": "no_such.yaml"}, "profile no_such.yaml cannot be read"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_is_refused(rank: int, options: dict[str, Any], message: str) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=message):
        fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)


@pytest.mark.parametrize("options", [{"planning": fl.Planning(planner="safusion")}, {"codec": "auto"}], ids=str)
def test_a_gpu_is_planned_for_by_its_own_clock(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of a GPU until there is an engine, so this needs none."""
    monkeypatch.setattr(context, "settings", Config)
    monkeypatch.setattr(context, "local_size", lambda: 1)
    device = torch.device("cuda", 3)
    planning = make_planning(GradientOptions(**options), MODEL, 0, (2,), device, False)
    clock = planning.plan_controller._clock  # type: ignore[union-attr]
    assert isinstance(clock, DeviceClock) and clock.device == device


@pytest.mark.parametrize(("per_element", "chosen"), [(1e-9, "int"), (1e-4, "raw")])
def test_auto_follows_what_a_device_tells(per_element: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes no time for a step, the device 9 s and more: the choice is made by what codecs cost there."""
    devices = [FakeDevice(), FakeDevice()]
    here = threading.local()
    monkeypatch.setattr(construction, "clock_of", lambda device: devices[here.rank])

    def rank_main(rank: int) -> tuple[set[str], Profile, int]:
        here.rank, device = rank, devices[rank]
        model = make_model()
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.register_hook(lambda _: device.work(1.0 + 2.0 * rank))
        optimizer: Any = fl.DistributedOptimizer(sgd(parameters), model.named_parameters(), codec="auto")
        for step in range(STEPS + 3):
            train(model, optimizer, rank, [step])
            device.work(5.0)
            device.now = device.stamp().at - 1.0  # the device is behind by a second
        used = {bucket.codec for bucket in optimizer.fusion_plan.buckets}
        profile = optimizer.cost_profile
        optimizer.close()
        return used, profile, device.waits

    with costs_measured(latency=1e-6, per_byte=1e-4, per_element=per_element):
        (used, profile, waits), other = local.run(rank_main, 2)
    assert used == other[0] == {chosen} and waits == 0
    tensors = profile.model.tensors
    assert [tensor.ready for tensor in tensors] == [2.0 * i for i in range(len(tensors))], "the mean of 1 s and 3 s"
    assert profile.model.forward == 7.0, "5 s of update and forward, and the first gradient"


# ---- ranks that are processes ---------------------------------------------------------------------------------------


@pytest.mark.medium
@on_processes(2)
def test_training(rank: int, world: int) -> None:
    """With costs that are measured in earnest."""
    dense, plain = deep(rank, codec="raw")
    plain.close()
    for options in ({"codec": "raw", "planner": "safusion"}, {"codec": "auto", "planner": "cupcake"}):
        mine, optimizer = deep(rank, **options)
        assert_same_on_all_ranks(mine)
        assert optimizer.cost_profile is not None and optimizer.fusion_plan is not None
        assert optimizer.cost_profile.model.tensors[0].ready == 0
        optimizer.close()
        assert options["codec"] != "raw" or torch.equal(mine, dense)
