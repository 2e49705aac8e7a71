from dataclasses import replace

import pytest

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.planning.bucket_costs import short_name
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.codec_rules import CodecRule, CodecRules
from fusionlayer.planning.cost_model import FREE, AlphaBeta, CodecCost, LinkCost
from fusionlayer.planning.plans import make_plan
from fusionlayer.planning.prediction import predict_plan
from fusionlayer.planning.profile import Gradient, Machine, Model, Profile
from fusionlayer.planning.selection import choose_codecs, select
from fusionlayer.scheduler import planners
from tests.loops import looped

AUTO = CodecRules((CodecRule("auto"),), "aggressive")
SCENARIO = Scenario("100mbit")


def profile_of(sizes: list[int], startup: float, encode: AlphaBeta) -> Profile:
    """Return a model of tensors t0, t1, ... on a link of 100 Mbit/s with raw and int4, whose encoding is dear."""
    line = AlphaBeta(startup, 8e-8)
    tensors = tuple(Gradient(f"t{i}", n, 1e-4 * (i + 1)) for i, n in enumerate(sizes))
    return Profile(
        version=1,
        title="made up",
        machine=Machine(8, 1),
        model=Model("made up", 0.01, 1e-4 * len(sizes), 0.0, tensors),
        copy=FREE,
        codecs={
            "raw": CodecCost(32, FREE, FREE, FREE, FREE, lossless=True),
            "int4": CodecCost(4.25, encode, FREE, FREE, FREE),
        },
        links={"100mbit": LinkCost(startup, 0.0, 0.0, line, line)},
    )


def step_of(profile: Profile, planner: str, codec: object) -> float:
    plan = make_plan(profile, planners.get(planner), codec, SCENARIO, 2)  # type: ignore[arg-type]
    return predict_plan(profile, plan, SCENARIO).seconds


# Alone a tensor of 100 elements is faster raw, one of 10^6 in 4 bits. Together they need two buckets then, so two
# startups.
MIXED = profile_of([100, 1_000_000, 100, 1_000_000, 100], startup=5e-3, encode=AlphaBeta(6e-3, 0.0))


def test_one_codec_for_all_where_many_would_be_slower() -> None:
    alone = {name: short_name(choice.codec) for name, choice in choose_codecs(MIXED, AUTO, SCENARIO, 2).items()}
    assert alone == {"t0": "raw", "t1": "int4", "t2": "raw", "t3": "int4", "t4": "raw"}
    found = select(MIXED, AUTO, planners.get("single"), SCENARIO, 2)
    assert {bucket.codec for bucket in found.plan.buckets} == {"int"} and len(found.plan.buckets) == 1
    assert {short_name(choice.codec) for choice in found.choices.values()} == {"int4"}
    assert found.choices["t0"].reason == (
        "rules[0]: auto, aggressive: int4 by one_shot for all is predicted to be fastest"
    )
    assert "the fastest codec for each tensor alone" in found.verdict and "raw by dense for all" in found.verdict
    mixed = {name: codecs.get(codec) for name, codec in alone.items()}
    assert found.prediction.seconds == step_of(MIXED, "single", codecs.get("int4")) < step_of(MIXED, "single", mixed)


def test_many_codecs_where_they_are_faster() -> None:
    """What is computed last is small: raw it need not wait for the encoder."""
    profile = profile_of([1_000_000, 100], startup=1e-6, encode=AlphaBeta(5e-2, 0.0))
    found = select(profile, AUTO, planners.get("wfbp"), SCENARIO, 2)
    assert {name: short_name(choice.codec) for name, choice in found.choices.items()} == {"t0": "int4", "t1": "raw"}
    assert "alone" in found.choices["t1"].reason


@looped("planner", ["single", "wfbp", "tapered", "safusion", "mg_wfbp", "cupcake", "omgs"])
@looped("startup", [1e-6, 1e-3])
@looped("encode", [AlphaBeta(1e-4, 0.0), AlphaBeta(0.0, 2e-7), AlphaBeta(1e-2, 1e-9)])
def test_never_slower_than_one_codec(planner: str, startup: float, encode: AlphaBeta) -> None:
    profile = profile_of([100, 300_000, 7, 50_000, 2000], startup, encode)
    found = select(profile, AUTO, planners.get(planner), SCENARIO, 2)
    assert found.prediction.seconds <= min(step_of(profile, planner, codecs.get(name)) for name in ("raw", "int4"))


def test_rules_stay_what_they_are() -> None:
    policy = replace(AUTO, rules=(CodecRule("raw", match="t1"), *AUTO.rules))
    found = select(MIXED, policy, planners.get("single"), SCENARIO, 2)
    assert found.choices["t1"] == replace(found.choices["t1"], codec=codecs.get("raw"), reason="rules[0]: match 't1'")
    assert found.choices["t3"].auto and not found.choices["t1"].auto
    fixed = select(MIXED, CodecRules((CodecRule("raw"),)), planners.get("single"), SCENARIO, 2)
    assert fixed.verdict == "" and {bucket.codec for bucket in fixed.plan.buckets} == {"raw"}


def test_fidelity_bounds_every_way() -> None:
    found = select(MIXED, CodecRules((CodecRule("auto"),), "near_lossless"), planners.get("single"), SCENARIO, 2)
    assert {bucket.codec for bucket in found.plan.buckets} == {"raw"} and "int4" not in found.verdict
    lossy = replace(MIXED, codecs={"int4": MIXED.codecs["int4"]})
    with pytest.raises(ConfigError, match="only lossless codecs"):
        select(lossy, CodecRules((CodecRule("auto"),), "lossless"), planners.get("single"), SCENARIO, 2)
