"""What environment variables set for a script that says nothing of it, and how their mistakes are told."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError


def plan_of(ranks: int = 2, **arguments: Any) -> fl.FusionPlan:
    """Return the plan of a step of an optimizer that a script makes with these arguments."""

    def train(rank: int) -> fl.FusionPlan:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fl.DistributedOptimizer(optimizer, model, **arguments)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        plan = optimizer.fusion_plan
        assert plan
        optimizer.close()
        return plan

    first, *others = fl.transport.local.run(train, ranks)
    assert others == [first] * (ranks - 1)
    return first


def test_an_argument_wins_over_a_variable_and_a_variable_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSIONLAYER_CODEC", "int8")
    monkeypatch.setenv("FUSIONLAYER_CODEC_OPTIONS", "{group_size: 64}")
    monkeypatch.setenv("FUSIONLAYER_PLANNER", "wfbp")
    plan = plan_of()
    assert [(bucket.codec, bucket.options["group_size"]) for bucket in plan.buckets] == [("int", 64)] * 4
    fused = plan_of(codec="fp16", planner="single")
    assert [bucket.codec for bucket in fused.buckets] == ["fp16"]
    fused.to_yaml(tmp_path / "plan.yaml")
    monkeypatch.setenv("FUSIONLAYER_PLAN", str(tmp_path / "plan.yaml"))
    assert plan_of(codec="int8") == fused, "a plan names its own codecs"
    assert plan_of(plan=plan) == plan

    monkeypatch.delenv("FUSIONLAYER_CODEC_OPTIONS")
    monkeypatch.setenv("FUSIONLAYER_CODEC", "auto")
    monkeypatch.setenv("FUSIONLAYER_ALGORITHM", "")
    ones = torch.ones(3)
    fl.transport.local.run(lambda rank: fl.all_reduce(ones.clone()), 2)


def test_shares_follow_the_rates_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSIONLAYER_RATES", "100mbit,50mbit,100mbit,100mbit")
    shares = [bucket.shares for bucket in plan_of(4, codec="int8", planner="wfbp").buckets]
    assert shares == [(333, 0, 333, 333)] * 4
    assert not caplog.records
    assert [bucket.shares for bucket in plan_of(4, codec="raw", planner="single").buckets] == [()]
    assert "shares count for two_shot alone and gradients are sent by dense" in caplog.text
    plan = plan_of(4, codec="raw", algorithm="two_shot", planner="single")
    assert [bucket.shares for bucket in plan.buckets] == [(333, 0, 333, 333)]
    monkeypatch.setenv("FUSIONLAYER_RATES", "measured")
    assert plan_of(3, codec="int8", planner="single").buckets[0].shares == (), "one host has equal shares"


@pytest.mark.parametrize(
    "variable, value, message",
    [
        ("RATES", "100mbit", "rates=['100mbit'] for 2 ranks; expected the rate of each rank's link, such as 100mbit"),
        ("RATES", "1gbit,fast", "rate 'fast'; expected a number above 0 with bit, kbit, mbit or gbit"),
        ("CODEC", "int44", "unknown codec 'int44'; did you mean 'int4'?"),
        ("CODEC_OPTIONS", "{bits: 4}", "codec 'raw' cannot take the options {'bits': 4}"),
        ("PLANNER", "best", "unknown planner 'best'"),
        ("ALGORITHM", "magic", "unknown collective 'magic'"),
        ("PLAN", "none.yaml", "plan file none.yaml cannot be read: No such file or directory"),
        ("POLICY", "none.yaml", "policy none.yaml cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_value_is_told_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"FUSIONLAYER_{variable}", value)
    with pytest.raises(ConfigError, match=r"^rank \d: " + re.escape(f"FUSIONLAYER_{variable}={value}: {message}")):
        plan_of()
