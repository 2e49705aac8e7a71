"""The benchmark of DeepSpeed: its tables, and a small run of each part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.deepspeed.__main__ import shown_losses, shown_steps, step_rows
from benchmarks.deepspeed.variants import BASELINE, section
from tests.tiers import long

from .labs import ROOT, needs_namespaces

SMALL = ("--width", "64", "--layers", "2", "--batch", "2", "--hardware", "test")


@pytest.mark.short
def test_ratios_are_of_the_same_round() -> None:
    def turns(*seconds: float, sent: int) -> list[dict[str, Any]]:
        return [{"seconds": [each] * 3, "sent": [sent] * 3} for each in seconds]

    measured = {("zero2", BASELINE): turns(4, 8, 6, sent=800), ("zero2", "int8"): turns(1, 4, 2, sent=200)}
    gloo, int8 = step_rows(measured)
    assert gloo["speedup"]["median"] == 1 and int8["speedup"]["median"] == 3 and int8["fewer_bytes"] == 4
    assert shown_steps([int8])[0]["fewer bytes"] == "4.00x"


@pytest.mark.short
def test_losses_are_held_against_their_limits() -> None:
    rows = [
        {"kind": "moe", "variant": name, "seed": 0, "loss": 1.0, "validation": loss, "exempt": exempt}
        for name, loss, exempt in ((BASELINE, 2.0, []), ("int8", 2.008, ["gate"]), ("int4", 2.05, ["gate"]))
    ]
    shown = shown_losses(rows)
    assert [row["within"] for row in shown] == ["", "0.5%: yes", "1.0%: NO"]
    assert shown[1][f"against {BASELINE}"] == "+0.40%" and shown[1]["routers exempt"] == "1"


@pytest.mark.short
def test_sections_of_variants() -> None:
    assert section(BASELINE, "zero2") is None and section("int8", "zero2") == {"gradients": "int8"}
    assert section("int4", "moe") == {"gradients": "int4", "activations": "int8"}
    with pytest.raises(ValueError, match="choose from"):
        section("int5", "zero2")


@long(guarded_by="tests/integrations/test_deepspeed.py::test_gradients_travel_compressed_after_the_warm_up")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_bytes_of_steps_drop_by_the_ratio_of_the_codec(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "benchmarks.deepspeed", "steps", *SMALL, "--busy-ok", "--out", str(tmp_path)]
    chosen = ("--kinds", "zero2", "--variants", f"{BASELINE},int8 all", "--rate", "1gbit", "--rounds", "1")
    done = subprocess.run([*command, *chosen, "--steps", "3"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.glob("deepspeed-steps-2x1_test_*.json")
    gloo, int8 = json.loads(result.read_text())["rows"]
    assert (gloo["variant"], int8["variant"]) == (BASELINE, "int8 all")
    assert 2.5 < int8["fewer_bytes"] < 4
