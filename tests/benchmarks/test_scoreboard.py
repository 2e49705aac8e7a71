"""The scoreboard: its arithmetic, its records, its command line, and a small one from end to end."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scoreboard.campaign import SETUPS
from benchmarks.scoreboard.links import Link
from benchmarks.scoreboard.records import Found
from benchmarks.scoreboard.summary import columns, levels, mean_curve, reached, scores
from tests.examples.places import ROOT, needs_namespaces
from tests.loops import looped
from tests.tiers import long, needs

SETTINGS = SETUPS["gpt"].settings("gpt", 2, 1, None)
FAST, SLOW = Link("1gbit", "1ms"), Link("30mbit", "1ms")
SEEDS = (0, 1, 2)


def losses(method: str, seed: int, *values: float) -> dict[str, Any]:
    """Return a run whose losses are those after 0, 150, 300, 450 and 600 steps."""
    curve = [[step, value] for step, value in zip((0, 150, 300, 450, 600), values, strict=True)]
    return {"method": method, "seed": seed, "training": SETTINGS.title, "final": values[-1], "losses": curve}


def steps(method: str, link: Link, seconds: float, hosts: int = 2) -> dict[str, Any]:
    return {
        **{"model": "gpt", "hosts": hosts, "workers": 1, "rate": link.rate, "rtt": link.rtt, "method": method},
        **{"step_seconds": seconds, "bytes_per_step": 1e6 * seconds, "bound_seconds": 0.2, "compute_seconds": 0.2},
        **{"speedup": {"median": 4 / seconds}, "rounds": []},
    }


def found(*rows: dict[str, Any], hardware: str = "Abacus") -> Found:
    it = Found(SETTINGS)
    it.take("another training", {"hardware": hardware, "commit": "abc", "torch": "2"}, rows)
    return it


DDP = [losses("ddp", seed, 5, 4, 3, 2.5, 2.0 + 0.1 * seed) for seed in SEEDS]  # 2.1 in the mean, 0.1 apart


class TestArithmetic:
    def test_levels_are_those_of_f32_after_a_fourth_a_half_and_all_of_its_steps(self) -> None:
        assert levels(mean_curve(DDP)) == pytest.approx((4.0, 3.0, 2.1))
        assert levels([(0, 5.0), (200, 3.0), (400, 2.0), (600, 1.0)]) == pytest.approx((3.5, 2.5, 1.0))

    @looped(
        "values, level, step",
        [
            ((5, 4, 3, 2.5, 2), 3.0, 300),
            ((5, 4, 3, 2.5, 2), 2.75, 375),  # linear between two looks
            ((5, 2.9, 3.1, 2.5, 2), 3.0, 325),  # a dip is not yet arrival
            ((5, 4, 3, 2.5, 3.5), 3.0, None),
            ((5, 4, 3, 2.5, math.nan), 3.0, None),
            ((5, math.nan, 3, 2.5, 2), 3.5, 300),
            ((2, 2, 2, 2, 2), 3.0, 0),
        ],
    )
    def test_a_level_is_reached_when_the_mean_stays_below_it(
        self, values: Sequence[float], level: float, step: float | None
    ) -> None:
        assert reached(mean_curve([losses("int4", 0, *values)]), level) == step

    @looped("final, step", [(2.0, 450 + 150 * 0.4 / 0.5), (2.19, 600), (2.21, None)])
    def test_who_ends_within_the_spread_of_f32_reaches_its_loss_with_the_last_step(
        self, final: float, step: float | None
    ) -> None:
        mine = [losses("int4", seed, 5, 4, 3, 2.5, final) for seed in SEEDS]
        row = scores(found(*DDP, *mine, steps("int4", FAST, 1.0)), SEEDS)[-1]
        assert row["steps"][-1] == (None if step is None else pytest.approx(step))
        cell = columns(row)["to 2.100"]
        assert cell == {2.0: "9.5", 2.19: "~10", 2.21: "— (2.210)"}[final]
        assert row["above"] == pytest.approx(final / 2.1 - 1)


@long(
    guarded_by="tests/benchmarks/test_scoreboard.py::TestArithmetic::test_a_level_is_reached_when_the_mean_stays_below_it"
)
@needs("accelerate")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_a_small_scoreboard_from_end_to_end(tmp_path: Path) -> None:
    arguments = ["--quick", "--methods", "ddp,int4,accelerate-local", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scoreboard", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "demo is left out: " in done.stderr
    (result,) = tmp_path.glob("scoreboard-gpt-small-2x1-adamw_*.json")
    rows = {row["method"]: row for row in json.loads(result.read_text())["rows"] if row["kind"] == "score"}
    assert set(rows) == {"ddp", "int4", "accelerate-local"}
    assert rows["ddp"]["minutes"][-1] == pytest.approx(12 * rows["ddp"]["step_seconds"] / 60)
    assert 6 < rows["ddp"]["bytes_per_step"] / rows["accelerate-local"]["bytes_per_step"] < 10, "one of eight steps"
    assert (tmp_path / "plots/scoreboard-gpt-small-2x1-adamw.svg").exists()
