"""The benchmark of changes of weights: its entropy, its messages, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import changes
from tests.codecs.test_delta import moved
from tests.synthetic import gradient


@pytest.mark.short
def test_a_message_is_about_as_long_as_the_entropy() -> None:
    base = gradient(1 << 18, 1, torch.bfloat16)
    assert changes.entropy(base, base) == 0 and changes.message(base, base) == 16 + 2 * 16
    half = base.clone()
    half.view(torch.int16)[::2] += 1
    assert changes.entropy(half, base) == pytest.approx(1.5, abs=0.001), (
        "a step up of the bits is one down where they are negative"
    )
    x = moved(base, 0.15, 1.3)
    assert changes.entropy(x, base) * 0.95 < 8 * changes.message(x, base) / x.numel() < changes.entropy(x, base) * 1.1


@pytest.mark.medium
def test_the_command_writes_a_table(tmp_path: Path) -> None:
    small = ["--models", next(iter(changes.MODELS)), "--lrs", "1e-3,1e-5", "--warmup", "1", "--steps", "1"]
    assert changes.main([*small, "--out", str(tmp_path), "--hardware", "test"]) == 0
    (result,) = tmp_path.glob("changes_test_*.json")
    fast, slow = json.loads(result.read_text())["rows"]
    assert (fast["lr"], slow["lr"]) == (1e-3, 1e-5) and fast["changed"] > slow["changed"] > 0
    assert fast["bits"] > slow["bits"] > 0
