from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionlayer as fl
from fusionlayer.cli import main
from fusionlayer.cli.breakdown import break_down
from fusionlayer.errors import ConfigError
from tests.integrations.training import make_model, train
from tests.packaging.project_tree import ROOT
from tests.tiers import exhaustive


def span(name: str, ts: float, dur: float, tid: str = "MainThread", **details: int) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 3, "tid": tid, "args": details}


def step_spans(step: int, begin: float) -> list[dict[str, Any]]:
    """Return a step of 1000 us: two buckets, one on each lane, the second waited for."""
    return [
        span("FORWARD", begin, 200, step=step),
        span("BACKWARD", begin + 200, 400, step=step),
        span("ENCODE", begin + 300, 30, step=step),
        span("ENCODE", begin + 400, 20, step=step),
        span("ALLREDUCE", begin + 350, 200, tid="lane", step=step, bucket=0),
        span("MEMCPY_IN_FUSION_BUFFER", begin + 360, 40, tid="lane"),
        span("ALLREDUCE", begin + 500, 300, tid="lane 1", step=step, bucket=1),
        span("ONE_SHOT", begin + 510, 250, tid="lane 1"),
        span("WAIT", begin + 610, 0, step=step, bucket=0),
        span("WAIT", begin + 610, 190, step=step, bucket=1),
        span("UPDATE", begin + 800, 100, step=step),
    ]


@pytest.mark.short
def test_phases_add_up_to_the_step() -> None:
    spans = [event for step in range(5) for event in step_spans(step, 1000.0 * step)]
    found = break_down(spans[::-1], 1, "t")
    assert (found.rank, found.steps) == (3, 3), "the last step has no end"
    assert found.step == pytest.approx(1e-3)
    assert {name: round(1e6 * seconds) for name, seconds in found.phases.items()} == {
        "forward": 200,
        "backward": 350,
        "compression": 50,
        "exposed communication": 190,
        "update": 100,
        "other": 110,
    }
    assert found.communication == pytest.approx(450e-6), "while both lanes are busy time passes once"
    first, second = found.buckets
    assert [round(1e6 * value) for value in (first.start, first.end, first.waited)] == [150, 350, 0]
    assert [round(1e6 * value) for value in (second.start, second.end, second.waited)] == [300, 600, 190]
    assert {name: round(1e6 * value) for name, value in first.phases.items()} == {
        "MEMCPY_IN_FUSION_BUFFER": 40,
        "other": 160,
    }


@pytest.mark.short
def test_waiting_within_the_next_forward_is_no_forward() -> None:
    spans = []
    for step in range(3):
        spans += [
            span("FORWARD", 1000.0 * step, 500, step=step),
            span("WAIT", 1000.0 * step + 100, 200, step=step - 1, bucket=0),
            span("UPDATE", 1000.0 * step + 300, 50, step=step - 1),
            span("BACKWARD", 1000.0 * step + 500, 400, step=step),
        ]
    phases = break_down(spans, 0, "t").phases
    assert round(1e6 * phases["forward"]) == 250
    assert round(1e6 * phases["exposed communication"]) == 200 and round(1e6 * phases["update"]) == 50


@pytest.mark.short
def test_a_span_that_begins_where_one_ends_does_not_lie_in_it() -> None:
    begin = 81234567890.123
    spans = []
    for step in range(300):
        start = begin + 1000.1 * step
        spans.append(span("FORWARD", start, 300.7, step=step))
        spans.append(span("BACKWARD", start + 300.7 - 2e-5, 600.3, step=step))
    phases = break_down(spans, 0, "t").phases
    assert phases["forward"] == pytest.approx(300.7e-6, rel=1e-3)
    assert phases["backward"] == pytest.approx(600.3e-6, rel=1e-3)


@pytest.mark.short
def test_too_few_steps_are_an_error() -> None:
    with pytest.raises(ConfigError, match="t has 2 steps of a DistributedOptimizer, 1 of them after the first 1"):
        break_down(step_spans(0, 0.0) + step_spans(1, 1000.0), 1, "t")
    with pytest.raises(ConfigError, match="0 steps"):
        break_down([span("ALLREDUCE", 0, 1, step=0, bucket=0)], 0, "t")


@pytest.mark.short
@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_with_a_timeline_is_broken_down(
    overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSIONLAYER_TIMELINE", str(tmp_path / "trace"))

    def body(rank: int) -> None:
        model = make_model()
        optimizer: Any = fl.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model.named_parameters(),
            codec="int8",
            planner="wfbp",
            overlap_forward=model if overlap else None,
        )
        train(model, optimizer, rank, range(8))
        with torch.no_grad():
            model(torch.zeros(1, 24))
        optimizer.close()

    fl.transport.local.run(body, 2)
    assert main(["trace", str(tmp_path / "trace"), "--skip", "2", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["steps"] == 5, "the forward without gradients is none"
        assert [bucket["index"] for bucket in rank["buckets"]] == [0, 1, 2, 3]
        assert all(rank["phases"][name] > 0 for name in ("forward", "backward", "exposed communication", "update"))
        assert sum(rank["phases"].values()) == pytest.approx(rank["step"])
        assert "ONE_SHOT" in rank["buckets"][0]["phases"]
    assert main(["trace", str(tmp_path / "trace.1")]) == 0
    printed = capsys.readouterr().out
    assert "exposed communication" in printed and "Buckets of rank 1" in printed


@pytest.mark.short
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "no timeline .*x and none of a rank, .*x.0; run with FUSIONLAYER_TIMELINE"),
        ("[\n{}", "is not complete"),
        ("{}", "0 steps"),
        ("[1]", "is no timeline"),
        ('[{"ph": "X", "name": "A"}]', "is no timeline"),
    ],
)
def test_what_is_no_timeline_is_told(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "x").write_text(text)
    assert main(["trace", str(tmp_path / "x")]) == 1

    assert re.search(told, capsys.readouterr().err)


@pytest.mark.medium
@pytest.mark.timeout(120)
@exhaustive(guarded_by="tests/cli/test_trace.py::test_a_run_with_a_timeline_is_broken_down")
def test_the_commands_of_the_documentation_run(tmp_path: Path) -> None:
    text = (ROOT / "docs/timeline.md").read_text()
    found = re.search(r"^FUSIONLAYER_TIMELINE=(\S+) torchrun (.*)\nfusionlayer (.*)$", text, re.MULTILINE)
    assert found is not None
    file, run, trace = found[1], found[2].split(), found[3].split()
    script = [str(ROOT / part) if part.startswith("examples/") else part for part in run]
    small = ["--steps", "6", "--width", "32", "--layers", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *script, *small]
    variables = {**os.environ, "FUSIONLAYER_TIMELINE": file}
    subprocess.run(command, cwd=tmp_path, env=variables, check=True, capture_output=True, timeout=55)
    main_of_cli = "import sys; from fusionlayer.cli import main; sys.exit(main())"
    told = subprocess.run(
        [sys.executable, "-c", main_of_cli, *trace], cwd=tmp_path, capture_output=True, text=True, timeout=55
    )
    assert told.returncode == 0 and told.stdout.count("Buckets of rank") == 2, told
