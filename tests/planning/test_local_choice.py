"""Codec, number of local steps and overlap are chosen together: by predicted steps, within what losses allow."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionlayer.base.errors import ConfigError
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.codec_rules import AUTO, FIDELITIES, LOCAL, CodecRule, CodecRules
from fusionlayer.planning.local_choice import LocalChoice, choose_local
from fusionlayer.planning.losses import LossCost, LossCosts
from fusionlayer.planning.profile import Profile
from fusionlayer.scheduler import planners
from tests.loops import looped

from .profiles import write_example


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """``raw`` and ``int4``, and a step that computes for 0.32 seconds."""
    return Profile.from_yaml(write_example(tmp_path_factory.mktemp("profile")))


def choose(profile: Profile, costs: Sequence[LossCost] = (), rate: str = "100mbit", **options: Any) -> LocalChoice:
    policy = CodecRules((CodecRule(AUTO),), options.pop("fidelity", LOCAL))
    losses = LossCosts(tuple(costs))
    return choose_local(profile, policy, planners.get("wfbp"), Scenario(rate), 4, losses=losses, **options)


def averaging(every: int, percent: float, codec: str = "int4") -> LossCost:
    return LossCost(codec, percent, "a test", 3, f"averaging(every={every})", every)


EACH_STEP = LossCost("int4", 0.1, "a test")
STREAMING = LossCost("int4", 1.0, "a test", 1, "streaming()", 30, 3, 5)


@looped(
    "costs, options, codec, sync, said",
    [
        ([], {}, "int4", "overlapped(every=2)", "What it costs in loss was not measured"),
        ([EACH_STEP], {}, "int4", "overlapped(every=2)", "each step [0-9.]+ ms"),
        ([averaging(32, 1.5)], {}, "int4", "averaging(every=32)", r"was \+1.5 % of that of f32 \(a test, 3 seeds\)"),
        ([averaging(32, 1.5), STREAMING], {}, "int4", "streaming()", r"\+1.0 % .* \(a test, 1 seed\)"),
        ([averaging(32, 2.5)], {}, "int4", "overlapped(every=2)", "not measured"),
        ([averaging(2, 2.5)], {}, "int4", None, "is a bottleneck still"),
        ([averaging(2, 0.5), replace(averaging(2, 9.0), workers=4)], {}, "int4", None, "is a bottleneck still"),
        ([averaging(32, 2.5)], {"budget": 3.0}, "int4", "averaging(every=32)", r"\+2.5 %"),
        ([averaging(32, 2.5), EACH_STEP], {"budget": 2.0}, "int4", None, "is a bottleneck still"),
        ([averaging(32, 2.5), EACH_STEP], {"budget": 0.0}, "raw", None, "changes no bit"),
        ([], {"budget": 2.0}, "raw", None, "Faster, but its loss was not measured: int4, overlapped, every 2 steps"),
        ([averaging(512, 0.0)], {"budget": 2.0}, "raw", None, "changes no bit"),
    ],
)
def test_codec_period_and_overlap_are_chosen_together(
    profile: Profile, costs: list[LossCost], options: dict[str, Any], codec: str, sync: str | None, said: str
) -> None:
    found = choose(profile, costs, **options)
    assert (found.way.codec, found.way.sync) == (codec, sync)
    assert {bucket.codec for bucket in found.selection.plan.buckets} == {codec.rstrip("4")}
    assert not found.selection.plan.skips, "the trainer makes local steps of the plan"
    assert found.others[0] == (found.way, "chosen")
    assert sorted(way.codec for way, _ in found.others) == ["int4", "raw"]
    assert re.search(said, found.reason), found.reason


@looped("fidelity", [fidelity for fidelity in FIDELITIES if fidelity != LOCAL])
def test_no_other_fidelity_may_skip_a_step(profile: Profile, fidelity: str) -> None:
    with pytest.raises(ConfigError, match=f"fidelity='{fidelity}'; only 'local' may skip steps"):
        choose(profile, fidelity=fidelity)


LOSSES = st.tuples(st.sampled_from([1, 2, 4, 8, 32]), st.floats(-1, 9), st.sampled_from(["int4", "raw"]))


@settings(max_examples=8)
@given(st.lists(LOSSES, max_size=5), st.sampled_from([0.0, 1.0, 4.0]))
def test_a_budget_is_kept(profile: Profile, measured: list[tuple[int, float, str]], budget: float) -> None:
    """By what was measured, of which the last word counts."""
    costs = [averaging(e, p, c) if e > 1 else LossCost(c, p, "a test") for e, p, c in measured]
    found = choose(profile, costs, budget=budget)
    loss = found.way.loss
    assert loss is not None and loss.percent <= budget
    again = LossCosts(tuple(costs)).of(found.way.codec, found.way.sync)
    assert loss == again or loss.source == "it changes no bit"


def test_local_steps_of_fewer_workers_tell_nothing_of_more() -> None:
    two, four, eight = (replace(averaging(4, percent), workers=n) for n, percent in ((2, 1.0), (4, 5.0), (8, 9.0)))
    table = LossCosts((EACH_STEP, eight, four, two))
    assert [table.at(workers).of("int4", two.sync) for workers in (2, 3, 4, 5, 8)] == [two, four, four, eight, eight]
    assert table.at(64).local("int4") == [eight], "the most that was measured stands for more"
    assert table.at(64).of("int4") == EACH_STEP
    assert LossCosts((two,)).at(4).local("int4") == [two]


def test_losses_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "losses.yaml"
    path.write_text("- {codec: int4, percent: 1, source: mine, sync: averaging(every=4), every: 4}\n")
    assert LossCosts.from_yaml(path).local("int4") == [LossCost("int4", 1.0, "mine", 1, "averaging(every=4)", 4)]
    assert LossCosts((LossCost("int8", 1.0, "mine"),)).of("int") is not None, "another name of the same codec"
    for text, told in (
        ("- {codec: int4, percent: 1, source: mine, every: 4}\n", "every=4 without sync; give it too"),
        ("- {codec: int4, percent: 1, source: mine, sync: s, every: 4, delay: 4}\n", "a delay below every"),
        ("- {codec: int4, source: mine}\n", "lacks 'percent'"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            LossCosts.from_yaml(path)
