"""One model of a step: what planners search with, what is printed of plans, and what is projected."""

import math
from dataclasses import astuple
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionlayer import codecs
from fusionlayer.planning.bucket_costs import BucketCosts
from fusionlayer.planning.cluster import Cluster, Scenario
from fusionlayer.planning.collective_phases import ALGORITHMS
from fusionlayer.planning.cost_model import AlphaBeta, CodecCost, LinkCost
from fusionlayer.planning.plans import make_plan
from fusionlayer.planning.prediction import PlannedBucket, backward_seconds, predict, predict_plan
from fusionlayer.planning.profile import Gradient, Model, Profile
from fusionlayer.planning.projection import Method, project
from fusionlayer.scheduler import planners
from fusionlayer.scheduler.planners._costs import Pipeline
from tests.loops import looped

from .profiles import write_example

seconds = st.sampled_from([0.0, 1e-6, 1e-4, 1e-3])
lines = st.builds(AlphaBeta, seconds, st.sampled_from([0.0, 1e-10, 1e-9, 1e-8]))


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return Profile.from_yaml(write_example(tmp_path_factory.mktemp("profile")))


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw a model of few or many gradients; backward may go on after the last of them."""
    sizes = draw(st.lists(st.sampled_from([1, 100, 10_000, 300_000]), min_size=1, max_size=12))
    ready = accumulate(draw(seconds) for _ in sizes)
    tensors = tuple(Gradient(f"t{i}", n, at, draw(seconds)) for i, (n, at) in enumerate(zip(sizes, ready, strict=True)))
    return Model("made up", draw(seconds), tensors[-1].ready + draw(seconds), draw(seconds), tensors)


@st.composite
def bucket_costs(draw: st.DrawFn, algorithm: str) -> BucketCosts:
    """Draw the costs of buckets that are sent by a collective, whose transfers may have been measured as a whole."""
    latency = draw(seconds)
    link = LinkCost(latency, draw(seconds), 1e-10, AlphaBeta(latency, 1e-8), AlphaBeta(2 * latency, 1e-8))
    codec = CodecCost(draw(st.sampled_from([4.25, 16.0, 32.0])), *(draw(lines) for _ in range(4)), draw(st.booleans()))
    workers = draw(st.sampled_from([2, 3, 8]))
    transfer = draw(st.none() | lines)
    return BucketCosts(codec, algorithm, Cluster(workers, link), draw(lines), draw(seconds), transfer)


def runs(model: Model, data: st.DataObject) -> list[int]:
    """Return the ends of consecutive runs of the model's gradients."""
    whole = len(model.tensors)
    return sorted(data.draw(st.sets(st.integers(1, whole))) | {whole})


@looped("algorithm", ALGORITHMS)
@settings(max_examples=12)
@given(models(), st.data())
def test_planners_search_with_the_model_that_predicts(algorithm: str, model: Model, data: st.DataObject) -> None:
    """With one lane and a core for each thread the simulation is the recurrence of ``Pipeline``."""
    costs, ends = data.draw(bucket_costs(algorithm)), runs(model, data)
    names = [tensor.name for tensor in model.tensors]
    buckets = [PlannedBucket(names[i:j], costs) for i, j in pairwise([0, *ends])]
    found = predict(model, buckets, whole=False)
    infos = [tensor.info for tensor in model.tensors]
    pipeline = Pipeline(infos, costs.for_planner(backward_seconds(model.tensors)))
    assert pipeline.score(ends) == (pytest.approx(found.score[0], abs=2e-9), pytest.approx(found.score[1], abs=1e-12))
    assert pipeline.ready(len(names)) == pytest.approx(found.alone)
    assert found.waiting >= -1e-12


@looped("planner", planners.names())
@looped("codec", ["raw", "int4"])
@looped("rate", ["100mbit", "1gbit"])
def test_a_plan_and_its_projection_agree(profile: Profile, planner: str, codec: str, rate: str) -> None:
    """``explain`` and ``simulate`` give one answer where they are asked one question."""
    scenario = Scenario(rate, cores=math.inf)
    plan = make_plan(profile, planners.get(planner), codecs.get(codec), scenario, 4)
    method = Method.named(codec, profile, planner=planner)
    one_lane = Method(method.name, method.codec, method.algorithm, method.fuse, lanes=1)
    explained, simulated = predict_plan(profile, plan, scenario), project(profile, one_lane, scenario, 4)
    for one, other in zip(explained.spans, simulated.spans, strict=True):
        assert astuple(one) == pytest.approx(astuple(other))
    model = profile.model
    assert simulated.seconds == pytest.approx(explained.seconds + model.optimizer + model.forward)
