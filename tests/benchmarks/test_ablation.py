"""The ablation of planners: what is compared with what, and the whole of it in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionlayer as fl
from benchmarks import ablation
from benchmarks.training.replicas import Waiting
from fusionlayer.planning.profile import Profile
from fusionlayer.transport import local
from tests.examples.places import ROOT, needs_namespaces
from tests.integrations.training import loss_of, make_model
from tests.planning.profiles import write_example
from tests.tiers import long


def example_plans(folder: Path) -> list[ablation.Planned]:
    return ablation.make_plans(Profile.from_yaml(write_example(folder)), "int4", "1gbit", 2)


@pytest.mark.short
def test_equal_plans_are_trained_once(tmp_path: Path) -> None:
    planned = example_plans(tmp_path)
    assert sorted(name for one in planned for name in one.planners) == fl.planners.names()
    digests = [one.plan.digest() for one in planned]
    assert len(set(digests)) == len(digests) < len(fl.planners.names())


@pytest.mark.short
def test_what_backward_waits_is_waiting() -> None:
    def rank_main(rank: int) -> bool:
        model = make_model()
        optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        workload: Any = None
        replica = Waiting(workload, model, optimizer)
        loss_of(model, rank, 0).backward()
        return bool(replica._waited)

    assert all(local.run(rank_main, 2))


@pytest.mark.short
def test_waiting_is_compared_round_by_round(tmp_path: Path) -> None:
    planned = example_plans(tmp_path)
    ours = next(one.planners[0] for one in planned if "safusion" in one.planners)
    measured = {
        one.planners[0]: {
            "rounds": [
                {"seconds": 0.2 + w, "sent": 1e6, "waiting": w + (0.0 if one.planners[0] == ours else 0.01)}
                for w in (0.01, 0.03, 0.02)
            ]
        }
        for one in planned
    }
    first, *others = ablation.rows("1gbit", planned, measured)
    assert "safusion" in first["planners"] and first["waiting"] == 0.02
    assert ablation.columns(first)["more than safusion"] == ""
    for row in others:
        assert row["more_than_ours"] == pytest.approx(0.01)
        assert ablation.columns(row)["more than safusion"] == "+10.0 [+10.0..+10.0]"


@needs_namespaces
@long(guarded_by="tests/benchmarks/test_ablation.py::test_waiting_is_compared_round_by_round")
def test_all_of_it_in_small(tmp_path: Path) -> None:
    small = ["--model", "gpt-small", "--rates", "1gbit", "--rounds", "1", "--repeats", "1", "--busy-ok"]
    command = [sys.executable, "-m", "benchmarks.ablation", *small, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "predicted waiting, ms" in done.stdout
    (path,) = tmp_path.glob("ablation-gpt-small-2x1_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert sorted(name for row in rows for name in row["planners"]) == fl.planners.names()
    assert all(row["waiting"] > 0 and row["bytes_per_step"] > 0 for row in rows)
    assert (tmp_path / "plots" / "ablation-gpt-small-2x1.svg").stat().st_size > 5000
