"""Costs and plans from profiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs.base import registry
from fusionlayer.codecs.quantized.cast import BF16
from fusionlayer.planning.bucket_costs import BucketCosts, codec_cost, short_name
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.codec_rules import CodecRule, CodecRules
from fusionlayer.planning.collective_phases import ALGORITHMS, message_phases
from fusionlayer.planning.cost_model import AlphaBeta, CodecCost, Curve
from fusionlayer.planning.plans import make_plan
from fusionlayer.planning.prediction import backward_seconds, plan_costs, predict_plan
from fusionlayer.planning.profile import Gradient, Profile
from fusionlayer.planning.projection import Method, project
from fusionlayer.planning.selection import choose_codecs
from fusionlayer.scheduler import planners
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import over_threads
from tests.scheduler.engines import MODEL, exact_sum, gradients, make_engine, run_step

from .profiles import write_example

pytestmark = pytest.mark.short

SCENARIO = Scenario("1gbit")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return Profile.from_yaml(write_example(tmp_path_factory.mktemp("profile")))


@looped("algorithm", ALGORITHMS)
@looped("workers", [1, 2, 8])
def test_costs_of_a_bucket_are_those_of_the_simulation(profile: Profile, algorithm: str, workers: int) -> None:
    cluster = SCENARIO.cluster(profile, workers)
    codec = profile.codec("int4")
    costs = BucketCosts.of(profile, codec, algorithm, cluster)
    copy = AlphaBeta(0, 0) if costs.ahead else profile.copy
    assert costs.ahead == algorithm.startswith("gather")
    for elements in (1, 1000, 3_000_000):
        whole = sum(phase.seconds for phase in message_phases(algorithm, elements, codec, cluster, copy))
        parts = costs.encode(elements) + costs.communicate(elements) + costs.decode(elements)
        assert parts == pytest.approx(whole, rel=1e-9)
        elsewhere = costs.encode(elements) if costs.ahead else 0.0  # by the thread that computes
        assert sum(phase.seconds for phase in costs.phases([elements])) == pytest.approx(whole - elsewhere, rel=1e-9)
        assert costs.alone(elements) == pytest.approx(whole, rel=1e-9)
    assert costs.for_planner({}).startup <= costs.communicate(1000)


def test_backward_of_a_tensor_is_since_the_one_before(profile: Profile) -> None:
    assert backward_seconds(profile.model.tensors) == pytest.approx({"head": 0.05, "body": 0.1, "tail": 0.05})


def test_a_measured_collective_takes_the_place_of_the_link(profile: Profile) -> None:
    curve = Curve(((1e3, 0.5), (1e9, 0.7)))
    known = replace(profile, collectives={"one_shot": {"4": curve}})
    assert known.transfer("one_shot", 4) is known.transfer("gather", 4) is curve
    assert known.transfer("one_shot", 8) is None and known.transfer("dense", 4) is None
    costs = BucketCosts.of(known, known.codec("int4"), "gather", SCENARIO.cluster(known, 4), curve)
    assert costs.communicate(8e6) == curve(4.25e6)
    assert [phase.seconds for phase in costs.phases([8_000_000])] == [curve(4.25e6), costs.decode(8e6)]


def test_bits_are_those_of_the_options_that_are_used(profile: Profile) -> None:
    assert short_name(codecs.get("int4")) == "int4"
    assert short_name(codecs.get("int4", group_size=32)).startswith("int(bits=4, group_size=32")
    assert codec_cost(profile, codecs.get("int4")).bits == pytest.approx(4.25)
    other = replace(profile.codec("int4"), bits=8.25, decode=AlphaBeta(0, 0))
    both = replace(profile, codecs={"int8": other, **profile.codecs})
    finer = codec_cost(both, codecs.get("int4", group_size=32))
    assert finer.bits == pytest.approx(5) and finer.decode == profile.codec("int4").decode
    assert codec_cost(both, codecs.get("int", bits=8, group_size=32)).decode == other.decode
    with pytest.raises(ConfigError, match="profile has no costs of codec 'bf16'"):
        codec_cost(profile, codecs.get("bf16"))


def test_a_plan_has_what_the_planner_cut(profile: Profile) -> None:
    planner = planners.get("wfbp")
    plan = make_plan(profile, planner, codecs.get("int4"), SCENARIO, 4)
    assert [bucket.names for bucket in plan.buckets] == [("head",), ("body",), ("tail",)]
    assert {(bucket.codec, bucket.algorithm, bucket.ahead) for bucket in plan.buckets} == {("int", "two_shot", False)}
    found = predict_plan(profile, plan, SCENARIO)
    assert found.alone == pytest.approx(0.2)
    assert [span.ready for span in found.spans] == pytest.approx([0.05, 0.15, 0.2])


@pytest.mark.parametrize(
    ("name", "algorithm", "ahead", "expected"),
    [
        ("raw", None, None, ("dense", False)),
        ("int4", None, True, ("gather", True)),
        ("int4", "gather", None, ("gather", True)),
        ("int4", "one_shot", None, ("one_shot", False)),
    ],
)
def test_ahead_and_the_collective_follow_from_each_other(
    profile: Profile, name: str, algorithm: str | None, ahead: bool | None, expected: tuple[str, bool]
) -> None:
    plan = make_plan(profile, planners.get("single"), codecs.get(name), SCENARIO, 4, algorithm=algorithm, ahead=ahead)
    (bucket,) = plan.buckets
    assert (bucket.algorithm, bucket.ahead) == expected
    assert len(plan_costs(profile, plan, SCENARIO)) == 1


def test_buckets_that_disturb_computing_are_fewer(profile: Profile) -> None:
    """Each message of a bucket makes what is computed after it later; ``two_shot`` has two."""
    disturbed = replace(profile, disturbance=1.0)
    plans = [make_plan(p, planners.get("safusion"), codecs.get("int4"), SCENARIO, 4) for p in (profile, disturbed)]
    assert len(plans[0].buckets) > len(plans[1].buckets)
    apart = make_plan(disturbed, planners.get("wfbp"), codecs.get("int4"), SCENARIO, 4)
    costs = plan_costs(disturbed, apart, SCENARIO)
    assert {bucket.algorithm for bucket in apart.buckets} == {"two_shot"} and costs[0].disturbance == 2.0
    before, after = (predict_plan(p, apart, SCENARIO) for p in (profile, disturbed))
    last = len(apart.buckets) - 1
    assert after.spans[last].ready == pytest.approx(before.spans[last].ready + last * 2.0)
    assert after.alone == before.alone


@pytest.fixture(scope="module")
def sparse(profile: Profile) -> Iterator[Profile]:
    @dataclass(frozen=True)
    class Halves(BF16, name="halves"):
        """A codec that goes ahead by default."""

        ahead = True

    line = AlphaBeta(1e-4, 1e-9)
    yield replace(profile, codecs={**profile.codecs, "halves": CodecCost(16, line, line, line, line, ahead=True)})
    registry.remove("halves")


def test_codecs_that_go_ahead_by_default_do(sparse: Profile) -> None:
    plan = make_plan(sparse, planners.get("safusion"), codecs.get("halves"), SCENARIO, 4)
    assert {(bucket.algorithm, bucket.ahead) for bucket in plan.buckets} == {("gather", True)}
    plan = make_plan(sparse, planners.get("safusion"), codecs.get("halves"), SCENARIO, 4, ahead=False)
    assert {(bucket.algorithm, bucket.ahead) for bucket in plan.buckets} == {("two_shot", False)}


def test_what_is_encoded_ahead_is_encoded_by_the_thread_that_computes(sparse: Profile) -> None:
    codec = sparse.codec("halves")
    encoding = sum(codec.encode(tensor.numel) for tensor in sparse.model.tensors)
    free = replace(sparse, codecs={"halves": replace(codec, encode=AlphaBeta(0, 0))})
    alone, slowed = (
        project(which, Method.named("halves", which, planner="single"), Scenario("1gbit", cores=8), 4)
        for which in (free, sparse)
    )
    assert slowed.seconds - alone.seconds == pytest.approx(encoding)
    assert slowed.communication == pytest.approx(alone.communication)


@pytest.mark.parametrize(("ahead", "algorithm"), [(True, "two_shot"), (False, "gather")])
def test_a_collective_that_does_not_go_with_it_is_refused(profile: Profile, ahead: bool, algorithm: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm '{algorithm}' .* ahead={not ahead}"):
        make_plan(profile, planners.get("single"), codecs.get("int4"), SCENARIO, 4, algorithm=algorithm, ahead=ahead)
    plan = make_plan(profile, planners.get("single"), codecs.get("int4"), SCENARIO, 4)
    wrong = replace(plan, buckets=tuple(replace(b, ahead=ahead, algorithm=algorithm) for b in plan.buckets))
    with pytest.raises(ConfigError, match=f"a bucket with ahead={ahead} travels by '{algorithm}'"):
        plan_costs(profile, wrong, SCENARIO)


def test_a_plan_for_another_model_is_refused(profile: Profile) -> None:
    plan = make_plan(profile, planners.get("single"), codecs.get("int4"), SCENARIO, 4)
    other = replace(profile, model=replace(profile.model, tensors=profile.model.tensors[:2]))
    with pytest.raises(ConfigError, match="plan does not fit the model: 1 tensors differ, the first is 'tail'"):
        plan_costs(other, plan, SCENARIO)


@pytest.mark.parametrize("planner", ["safusion", "mg_wfbp", "omgs", "cupcake"])
def test_planners_by_cost_can_be_projected(profile: Profile, planner: str) -> None:
    slow, fast = (
        project(profile, Method.named("int4", profile, planner=planner), Scenario(rate), 4).seconds
        for rate in ("100mbit", "1gbit")
    )
    assert fast < slow


def test_gradients_of_different_codecs_never_share_a_bucket(profile: Profile) -> None:
    mixed = {"head": codecs.get("raw"), "body": codecs.get("int4"), "tail": codecs.get("raw")}
    plan = make_plan(profile, planners.get("single"), mixed, SCENARIO, 4)
    assert [(bucket.codec, bucket.algorithm, bucket.names) for bucket in plan.buckets] == [
        ("int", "two_shot", ("body",)),
        ("raw", "dense", ("head", "tail")),
    ]
    assert [span.ready for span in predict_plan(profile, plan, SCENARIO).spans] == pytest.approx([0.15, 0.2])


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_runs_what_was_planned(profile: Profile, ahead: bool) -> None:
    model = replace(
        profile.model, tensors=tuple(Gradient(t.name, t.numel, 0.01 * i) for i, t in enumerate(reversed(MODEL)))
    )
    mixed = {tensor.name: codecs.get("int4" if tensor.numel > 200 else "raw") for tensor in MODEL}
    plan = make_plan(replace(profile, model=model), planners.get("safusion"), mixed, SCENARIO, 2, ahead=ahead or None)
    assert {bucket.codec for bucket in plan.buckets} == {"raw", "int"}

    def body(transport: Transport) -> dict[str, torch.Tensor]:
        engine = make_engine(transport, plan=plan)
        summed = run_step(engine, gradients(transport.rank, 0))
        engine.close()
        return summed

    first, second = over_threads(2, body)
    for name, exact in exact_sum(2, 0).items():
        assert torch.equal(first[name], second[name])
        lossy = mixed[name].name == "int"
        torch.testing.assert_close(first[name].double(), exact, rtol=1e-6, atol=0.3 if lossy else 1e-6)


def test_auto_takes_what_is_fastest_on_the_network(profile: Profile) -> None:
    policy = CodecRules((CodecRule("auto"),), "aggressive")
    for rate, expected in (("100mbit", "int4"), ("1gbit", "int4")):
        found = choose_codecs(profile, policy, Scenario(rate), 4)
        assert {short_name(choice.codec) for choice in found.values()} == {expected}
    reason = found["head"].reason
    assert reason.startswith("rules[0]: auto, aggressive: int4 takes ") and ", raw " in reason
    found = choose_codecs(profile, CodecRules((CodecRule("auto"),), "lossless"), SCENARIO, 4)
    assert {choice.codec for choice in found.values()} == {codecs.get("raw")}
    costly = replace(profile.codec("int4"), encode=AlphaBeta(1.0, 0.0))
    slow = replace(profile, codecs={**profile.codecs, "int4": costly})
    found = choose_codecs(slow, policy, SCENARIO, 4)
    assert {choice.codec for choice in found.values()} == {codecs.get("raw")}, "a codec that costs more than it saves"
