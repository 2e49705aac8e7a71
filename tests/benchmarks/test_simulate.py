"""Projections are compared with measured steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulate import compare, main
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.profile import Profile
from fusionlayer.planning.projection import Method, project
from tests.planning.profiles import write_example


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_example(tmp_path)


def cell(method: str, seconds: float, rate: str | None = "1gbit", hosts: int = 2, **more: Any) -> dict[str, Any]:
    facts = {"model": "example", "hosts": hosts, "workers": 1, "rate": rate, "method": method, "step_seconds": seconds}
    return {**facts, **more}


def run(*arguments: object) -> int:
    return main([*map(str, arguments)])


class TestValidate:
    def test_what_is_projected_is_what_the_profile_says(self, path: Path) -> None:
        profile = Profile.from_yaml(path)
        for method, workers, rate in (("ddp", 2, "100mbit"), ("int4+overlap", 2, "1gbit"), ("int4", 4, "500mbit")):
            step = project(profile, Method.named(method, profile), Scenario(rate, cores=2 / workers), workers)
            (each,), left_out = compare([cell(method, step.seconds, rate, workers)], profile)
            assert not left_out
            assert each.error == pytest.approx(0)
            assert each.projected_bytes == step.sent

    def test_command_line_updates_the_profile(
        self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        results = tmp_path / "training_x_2026-01-01.json"
        rows = [cell("ddp", 0.5, further="key"), cell("int4", 0.4, bytes_per_step=2_200_000), cell("powersgd", 1.0)]
        results.write_text(json.dumps({"title": "t", "environment": {}, "rows": rows}))
        out = ["--out", tmp_path / "out", "--hardware", "machine"]
        assert run(results, "--profile", path, *out, "--update") == 0
        captured = capsys.readouterr()
        assert captured.err.startswith("left out: powersgd: ")
        known = Profile.from_yaml(path).validation
        assert known is not None and (known.source, known.cells, known.methods) == (results.name, 2, ("ddp", "int4"))
        (written,) = (tmp_path / "out").glob("simulate-example_machine_*.json")
        found = json.loads(written.read_text())["rows"]
        assert [(row["method"], row["measured ms"]) for row in found] == [("ddp", 500.0), ("int4", 400.0)]
        assert found[1]["measured MB"] == 2.2 and 2.0 < found[1]["projected MB"] < 2.2
        mean_error = sum(abs(row["projected ms"] / row["measured ms"] - 1) for row in found) / 2
        assert known.error[0] == pytest.approx(mean_error, abs=1e-3)
        assert f"error {known.error[0]:.1%} mean" in captured.out

    def test_steps_on_nodes_of_two_ranks_are_projected_within_the_limit(self) -> None:
        """Recorded when ``two_shot`` was the default there: each value crosses the link twice as often."""
        root = Path(__file__).parents[2]
        recorded = root / "benchmarks" / "results" / "training-gpt-2x2_amd-epyc-zen-5_2026-11-22.json"
        given = (recorded, "--profile", root / "profiles" / "gpt_amd-epyc-zen-5_2026-11-21.yaml", "--limit", 15)
        assert run(*given, "--algorithm", "two_shot") == 0
        assert run(*given) == 1, "two levels send half as much"
