from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fusionlayer as fl
from benchmarks import hops
from tests.tiers import DRAWS

pytestmark = pytest.mark.short


def test_skewed_gradients_have_cold_runs_tails_and_a_common_part() -> None:
    first, second = hops.skewed(2, 1 << 17)
    norms = first.view(-1, hops.RUN).norm(dim=1)
    assert 0.15 < (norms < norms.median() / 10).float().mean().item() < 0.4
    shuffled = first[torch.randperm(first.numel(), generator=torch.Generator().manual_seed(0))]
    assert (shuffled.view(-1, hops.RUN).norm(dim=1) > norms.median() / 10).all(), "it lies in runs"
    assert 0.4 < float(first @ second / (first.norm() * second.norm())) < 0.6
    assert first.double().pow(4).mean() > 20 * first.double().square().mean() ** 2
    assert torch.equal(first, hops.skewed(1, 1 << 17)[0]), "more workers change nothing of the first"


def test_errors_grow_with_hops() -> None:
    inputs = hops.gaussian(16, 1 << 14)
    int8 = fl.codecs.get("int8")
    ring, butterfly, two_shot = (hops.error(name, int8, inputs) for name in ("ring", "butterfly", "two_shot"))
    assert ring > 1.5 * butterfly > 1.5 * two_shot
    assert ring > 3 * hops.error("ring", int8, inputs[:2])
    assert hops.error("ring", fl.codecs.get("raw"), inputs) < 1e-12


def test_the_command_writes_rows_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--numel", "4096", "--worlds", "2,3", "--out", str(tmp_path), "--hardware", "test"]
    assert hops.main(options) == 0
    printed = capsys.readouterr().out
    (result,) = tmp_path.glob("hops_test_*.json")
    rows = json.loads(result.read_text())["rows"]
    fixed = sum(method.algorithm is not None for method in hops.METHODS.values())
    lines = len(hops.ALGORITHMS) * (len(hops.METHODS) - fixed) + fixed
    assert len(rows) == len(hops.DATA) * lines * 2
    assert all(0 < row["vNMSE"] < 0.6 for row in rows)
    assert all(name in printed for name in (*hops.METHODS, *hops.ALGORITHMS, *hops.DATA))
    assert not DRAWS or "</svg>" in (tmp_path / "plots" / "hops.svg").read_text()
