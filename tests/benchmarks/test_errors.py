from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import errors
from tests.tiers import exhaustive

pytestmark = pytest.mark.short


def test_data_is_what_it_says() -> None:
    assert errors.gaussian(1 << 16).std().item() == pytest.approx(0.02, rel=0.02)
    concentrated = errors.tensor_parallel(1 << 18)
    assert 0.3 < (concentrated.abs() < 1e-3).float().mean().item() < 0.6
    assert concentrated.abs().max() > 50 * concentrated.square().mean().sqrt()
    energy = errors.skewed(1 << 18).view(-1, 256).square().sum(1)
    assert energy.max() > 1e3 * energy.median() / 10


@exhaustive(guarded_by="tests/benchmarks/test_errors.py::test_data_is_what_it_says")
def test_the_command_prints_and_writes_a_row_for_each_codec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.main(["--numel", "8192", "--steps", "1", "--out", str(tmp_path), "--hardware", "test"]) == 0
    (written,) = tmp_path.glob("errors_test_*.md")
    printed = capsys.readouterr().out
    for name, _ in errors.CODECS:
        assert f"| {name}" in printed and f"| {name}" in written.read_text()
    assert "gpt activations" in printed and "a GPT after 1 steps" in printed


def test_recorded_tensors_are_the_same_again() -> None:
    found = errors.recorded(1, batch=2)
    again = errors.recorded(1, batch=2)
    assert all(torch.equal(found[name], again[name]) for name in found)
    config = errors.Config()
    assert found["gpt activations"].numel() == 2 * config.layers * 2 * config.context * config.width
    assert found["gpt input gradients"].numel() == found["gpt activations"].numel()
    assert all(x.isfinite().all() and x.abs().max() > 0 for x in found.values())
