"""Costs and plans from profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.planning.bucket_costs import BucketCosts
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.collective_phases import ALGORITHMS, message_phases
from fusionlayer.planning.cost_model import AlphaBeta
from fusionlayer.planning.plans import make_plan
from fusionlayer.planning.prediction import plan_costs, predict_plan
from fusionlayer.planning.profile import Gradient, Profile
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


@pytest.mark.parametrize(("ahead", "algorithm"), [(True, "two_shot"), (False, "gather")])
def test_a_collective_that_does_not_go_with_it_is_refused(profile: Profile, ahead: bool, algorithm: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm '{algorithm}' .* ahead={not ahead}"):
        make_plan(profile, planners.get("single"), codecs.get("int4"), SCENARIO, 4, algorithm=algorithm, ahead=ahead)
    plan = make_plan(profile, planners.get("single"), codecs.get("int4"), SCENARIO, 4)
    wrong = replace(plan, buckets=tuple(replace(b, ahead=ahead, algorithm=algorithm) for b in plan.buckets))
    with pytest.raises(ConfigError, match=f"a bucket with ahead={ahead} is sent by '{algorithm}'"):
        plan_costs(profile, wrong, SCENARIO)


def test_a_plan_for_another_model_is_refused(profile: Profile) -> None:
    plan = make_plan(profile, planners.get("single"), codecs.get("int4"), SCENARIO, 4)
    other = replace(profile, model=replace(profile.model, tensors=profile.model.tensors[:2]))
    with pytest.raises(ConfigError, match="plan does not fit the model: 1 tensors differ, the first is 'tail'"):
        plan_costs(other, plan, SCENARIO)


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
