from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import ratios
from fusionlayer.codecs.zip import Zip


@pytest.mark.short
def test_a_gaussian_is_covered_as_published() -> None:
    found = ratios.coverage(ratios.gaussian(1 << 21).bfloat16())
    assert max(abs(a - b) for a, b in zip(found, ratios.PUBLISHED, strict=True)) < 0.15
    assert ratios.coverage(torch.zeros(100, dtype=torch.float16)) == [100.0] * 7


@pytest.mark.short
def test_ratios_lie_between_one_and_the_bound() -> None:
    x = ratios.gaussian(1 << 20).bfloat16()
    assert ratios.bound(x) == pytest.approx(16 / (8 + 2.545), rel=0.01)
    assert 1.42 < ratios.ratio(Zip(), x) < ratios.bound(x)
    assert ratios.bound(torch.zeros(64, dtype=torch.float32)) == pytest.approx(32 / 24)
    for name, tensor in ratios.synthetic(1 << 17):
        for make in ratios.CODECS.values():
            assert ratios.ratio(make(), tensor) >= tensor.nbytes / (tensor.nbytes + 16), name


@pytest.mark.medium
def test_the_command_writes_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ratios.main(["--numel", "65536", "--steps", "1", "--out", str(tmp_path), "--hardware", "test"]) == 0
    printed = capsys.readouterr().out
    (result,) = tmp_path.glob("ratios_test_*.json")
    rows = json.loads(result.read_text())["rows"]
    names = [row["tensor"] for row in rows]
    assert {"ReLU of a Gaussian", "GPT, weights", "GPT, gradients", "GPT, activations after GELU"} <= set(names)
    assert all(float(row[codec]) > 0.99 for row in rows for codec in ratios.CODECS)
    for title in ("## Exponents of N(0, 1) in bf16", "## Windows of seven exponents"):
        assert title in printed and title in result.with_suffix(".md").read_text()
