"""Planning by what the first steps took."""

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError, PlanMismatch
from fusionlayer.base.plan import FusionPlan
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.codec_rules import CodecRule, CodecRules
from fusionlayer.planning.online import OnlinePlanner
from fusionlayer.planning.plans import make_plan
from fusionlayer.planning.profile import Profile
from fusionlayer.scheduler import StepSeconds, planners
from fusionlayer.scheduler.fusing import fuse
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.scheduler.engines import MODEL, exact_sum, gradients, make_engine, run_step

from .measured import costs_measured

SHORT: Any = {"warm_up": 1, "measured": 2}
RAW, START = codecs.get("raw"), planners.get("single")


def make_planner(transport: Transport, name: str = "cupcake", codec: Any = RAW, **options: Any) -> OnlinePlanner:
    options = SHORT | options
    kind = {"partition": "optimal"} if name == "cupcake" else {}
    return OnlinePlanner(MODEL, planners.get(name, **kind), codec, transport.rank, transport.node_sizes, **options)


def step_of(backward: float = 0.01, communication: float = 0.004, waiting: float = 0.002) -> StepSeconds:
    """Return a step in which each tensor takes as long."""
    ready = {tensor.name: backward * i / (len(MODEL) - 1) for i, tensor in enumerate(MODEL)}
    return StepSeconds(2 * backward + waiting, backward, 0.0, waiting, ready, {0: communication})


def drive(
    planner: OnlinePlanner,
    transport: Transport,
    steps: Iterable[StepSeconds | None],
    first: FusionPlan | None = None,
    begin: int = 0,
) -> list[FusionPlan]:
    """Do for these steps what an engine does that begins with ``first``, or one bucket; return the plans it gets."""
    plans = [first or fuse(MODEL, START, RAW, transport.node_sizes)]
    for number, seconds in enumerate(steps, begin):
        planner.note_step(plans[-1], number, seconds)
        if planner.due(number):
            plan = planner.next_plan(transport)
            plans += [] if plan is None else [plan]
    return plans[1:]


# ---- the first plan -------------------------------------------------------------------------------------------------


@looped("name", [name for name in planners.names() if planners.get(name).needs_costs])
@looped("codec", ["raw", "int8", "topk"])
def test_engines_get_one_plan_though_ranks_are_not_alike(name: str, codec: str) -> None:
    world, steps = 3, 6

    def body(transport: Transport) -> tuple[Profile, bytes]:
        planner = make_planner(transport, name, codecs.get(codec))
        engine = make_engine(transport, codec=codecs.get(codec), planner=START, plan_controller=planner)
        with torch.no_grad():
            for step in range(steps):
                values = gradients(transport.rank, step)
                for tensor, value in values.items():
                    time.sleep(0.001 * transport.rank)
                    engine.submit(tensor, value)
                engine.synchronize()
                if codec == "raw":
                    for tensor, exact in exact_sum(world, step).items():
                        torch.testing.assert_close(values[tensor], exact.float())
        engine.close()
        assert engine.plan is not None and planner.profile is not None
        # Each rank notes its machine's load itself, and that changes from one moment to the next.
        return replace(planner.profile, environment={}), engine.plan.digest()

    with costs_measured(latency=0.0, per_byte=1e-6) as network:
        found = over_threads(world, body)
    assert sorted(network.ranks) == [0, 1, 2], "once on every rank"
    profile = found[0][0]
    assert all(one == found[0] for one in found)
    assert profile.model.backward > 0.005, "the mean of ranks that take 0, 5 and 10 ms and more"
    assert profile.collectives["dense"]["3"](1e6) == pytest.approx(1.1), "the mean of 1.0, 1.1 and 1.2 s"
    assert [tensor.name for tensor in profile.model.tensors] == [tensor.name for tensor in MODEL]


def test_the_plan_is_what_the_planner_makes_of_the_profile() -> None:
    def body(transport: Transport) -> tuple[list[FusionPlan], FusionPlan]:
        planner = make_planner(transport)
        plans = drive(planner, transport, [step_of() for _ in range(5)])
        assert planner.profile is not None
        rate = Scenario(planner.profile.fastest_rate)
        offline = planners.get("cupcake", partition="optimal")
        return plans, make_plan(planner.profile, offline, RAW, rate, 2, measured=True)

    with costs_measured(latency=0.0, per_byte=1e-6):
        found = over_threads(2, body)
    for plans, offline in found:
        assert plans == [offline] and len(offline.buckets) > 1


def test_a_plan_that_is_the_present_one_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fusionlayer")
    with costs_measured(latency=1.0, per_byte=0.0):
        found = over_threads(2, lambda t: drive(make_planner(t), t, [step_of() for _ in range(5)]))
    assert found == [[], []]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("planner cupcake keeps the plan: 1 bucket, predicted to wait ")


def test_groups_of_the_users_stay() -> None:
    tensors = [replace(tensor, group=0 if tensor.name in ("w1", "w4") else None) for tensor in MODEL]

    def body(transport: Transport) -> list[FusionPlan]:
        planner = OnlinePlanner(tensors, planners.get("mg_wfbp"), RAW, transport.rank, transport.node_sizes, **SHORT)
        return drive(planner, transport, [step_of() for _ in range(5)])

    with costs_measured(latency=0.0, per_byte=1e-6):
        ((plan,), _) = over_threads(2, body)
    assert ("w1", "w4") in [bucket.names for bucket in plan.buckets]


USUAL = [step_of() for _ in range(60)]


def test_costs_are_measured_once() -> None:
    slow = [*USUAL, *[step_of(0.03, communication=0.012, waiting=0.02)] * 300]
    with costs_measured(latency=0.0, per_byte=1e-6) as network:
        first, second = over_threads(2, lambda transport: drive(make_planner(transport), transport, slow))
    assert first == second and len(first) == 1
    assert network.ranks.count(0) == network.ranks.count(1) == 1


# ---- a given profile, policies, errors ------------------------------------------------------------------------------


def measured_profile(transport: Transport) -> Profile:
    planner = make_planner(transport)
    drive(planner, transport, USUAL[:5])
    assert planner.profile is not None
    return planner.profile


def test_a_given_profile_is_not_measured_again() -> None:
    with costs_measured(latency=0.0, per_byte=1e-6):
        profile, _ = over_threads(2, measured_profile)

    def body(transport: Transport) -> FusionPlan:
        planner = make_planner(transport)
        plan = planner.plan_by(profile)
        assert planner.profile is profile
        assert drive(planner, transport, USUAL) == []
        return plan

    with costs_measured(latency=0.0, per_byte=1e-6) as network:
        first, second = over_threads(2, body)
    assert first == second and len(first.buckets) > 1 and not network.ranks


def test_a_profile_of_another_model_is_refused() -> None:
    with costs_measured(latency=0.0, per_byte=1e-6):
        profile, _ = over_threads(2, measured_profile)
    planner = OnlinePlanner(MODEL[:4], planners.get("mg_wfbp"), RAW, 0, (2,))
    with pytest.raises(ConfigError, match="is of another model: 2 tensors differ, the first is 'w4': profile has"):
        planner.plan_by(profile)


def test_a_collective_of_unknown_costs_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cupcake' plans by costs, and those of the collective 'other'"):
        OnlinePlanner(MODEL, planners.get("cupcake"), RAW, 0, (2,), algorithm="other")


def test_auto_begins_raw_and_says_why_it_chose_what(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fusionlayer")
    policy = CodecRules((CodecRule("raw", match="w1"), CodecRule("auto")), "aggressive")

    def body(transport: Transport) -> list[FusionPlan]:
        planner = make_planner(transport, "single", policy)
        plans = drive(planner, transport, USUAL)
        assert planner.profile is not None and {"raw", "int", "int4", "dgc"} <= planner.profile.codecs.keys()
        return plans

    with costs_measured(latency=1e-6, per_byte=1e-5):
        ((plan,), other) = over_threads(2, body)
    assert other == [plan]
    by_name = {name: bucket.codec for bucket in plan.buckets for name in bucket.names}
    assert by_name["w1"] == "raw" and "raw" not in {by_name["w0"], by_name["w3"], by_name["w5"]}
    table = caplog.records[0].getMessage().splitlines()
    assert table[0].startswith("codecs by policy; predicted step: the fastest codec for each tensor alone ")
    assert [line.split()[0] for line in table[1:]] == [tensor.name for tensor in MODEL]
    assert table[2].split()[1:] == ["5", "raw", "rules[0]:", "match", "'w1'"]
    assert all("rules[1]: auto, aggressive: " in line for line in (table[1], *table[3:]))
    assert caplog.records[1].getMessage().startswith("planner single switches to ")


@looped("inside, expected", [(0.01, {"two_level"}), (100.0, {"one_shot", "two_shot"})])
def test_auto_chooses_the_collective_by_the_links_inside_and_between_nodes(inside: float, expected: set[str]) -> None:
    """Two nodes of two ranks: where messages inside a node cost most, each is sent to all ranks at once."""
    policy = CodecRules((CodecRule("auto"),), "near_lossless")

    def body(transport: Transport) -> list[FusionPlan]:
        planner = make_planner(transport, "single", policy)
        plans = drive(planner, transport, USUAL)
        assert planner.profile is not None and planner.profile.machine.per_host == 2
        return plans

    with costs_measured(latency=1e-6, per_byte=1e-5) as network:
        network.inside = inside
        (plan,), *others = over_threads(4, body, ranks_per_node=2)
    assert others == [[plan]] * 3
    assert {bucket.algorithm for bucket in plan.buckets if bucket.codec != "raw"} == expected


@on_threads(2)
def test_ranks_that_plan_otherwise_are_refused(transport: Transport) -> None:
    planner = make_planner(transport, "cupcake" if transport.rank else "mg_wfbp")
    engine = make_engine(transport, codec=RAW, plan_controller=planner)
    with pytest.raises(PlanMismatch, match="codec, options"):
        run_step(engine, gradients(transport.rank, 0))
