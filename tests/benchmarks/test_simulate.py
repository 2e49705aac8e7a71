"""Projections are compared with measured steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulate import compare, main, read_cells, summarize
from fusionlayer.base.errors import ConfigError
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.profile import Profile
from fusionlayer.planning.projection import Method, project
from tests.loops import looped
from tests.planning.profiles import write_example


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_example(tmp_path)


def cell(method: str, seconds: float, rate: str | None = "1gbit", hosts: int = 2, **more: Any) -> dict[str, Any]:
    facts = {"model": "example", "hosts": hosts, "workers": 1, "rate": rate, "method": method, "step_seconds": seconds}
    return {**facts, **more}


def run(*arguments: object) -> int:
    return main([*map(str, arguments)])


@pytest.mark.short
class TestValidate:
    def test_what_is_projected_is_what_the_profile_says(self, path: Path) -> None:
        profile = Profile.from_yaml(path)
        for method, workers, rate in (("ddp", 2, "100mbit"), ("int4+overlap", 2, "1gbit"), ("int4", 4, "500mbit")):
            step = project(profile, Method.named(method, profile), Scenario(rate, cores=2 / workers), workers)
            (each,), left_out = compare([cell(method, step.seconds, rate, workers)], profile)
            assert not left_out
            assert each.error == pytest.approx(0)
            assert each.projected_bytes == step.sent

    def test_errors_are_summarized(self, path: Path) -> None:
        profile = Profile.from_yaml(path)
        cells = [cell("ddp", 1.0, "100mbit"), cell("ddp-again", 1.0), cell("int4", 1.0, hosts=4), cell("raw", 1.0)]
        exact, _ = compare(cells, profile)
        factors = (0.8, 1.0, 1.25, 2.0)
        cells = [
            {**each.cell, "step_seconds": each.projected * factor} for each, factor in zip(exact, factors, strict=True)
        ]
        compared, _ = compare(cells, profile)
        known = summarize(compared, "r.json")
        assert (known.cells, known.workers, known.rates) == (4, (2, 4), ("100mbit", "1gbit"))
        assert known.methods == ("ddp", "int4", "raw")
        assert known.error == (pytest.approx((0.25 + 0 + 0.2 + 0.5) / 4), pytest.approx(0.225), pytest.approx(0.5))
        assert (known.low, known.median, known.high) == (
            pytest.approx(0.8),
            pytest.approx(1.125),
            pytest.approx(2.0),
        )

    def test_what_cannot_be_projected_is_left_out_and_named(self, path: Path) -> None:
        cells = [
            cell("alone", 1.0),
            cell("powersgd", 1.0),
            cell("ddp", 1.0, None),
            cell("ddp", 1.0, model="other"),
            cell("ddp", 1.0, workers=2),
        ]
        compared, left_out = compare(cells, Profile.from_yaml(path))
        assert not compared
        alone, powersgd, unlimited, crowded, other = left_out
        assert alone == "alone: a step of 2 workers took 1000 ms, by the profile 320 ms"
        assert powersgd.startswith("powersgd: profile has no costs of codec 'powersgd'")
        assert unlimited == "ddp: a step on a link without limit; its rate is not known"
        assert crowded.startswith("ddp: 2 workers on a host, and the profile has no costs of a link inside")
        assert other == "other: the profile is of the model example"

    @looped(
        "content, told",
        [
            ("{", "JSONDecodeError"),
            ("[]", "TypeError"),
            ("{}", "KeyError"),
            ('{"rows": [{"model": "gpt"}]}', "KeyError('hosts')"),
            (json.dumps({"rows": [cell("ddp", -1.0)]}), "step_seconds=-1.0"),
            (json.dumps({"rows": [cell("ddp", 1.0, hosts="two")]}), "hosts='two'"),  # type: ignore[arg-type]
        ],
    )
    def test_what_is_no_result_file_is_refused(self, tmp_path: Path, content: str, told: str) -> None:
        (tmp_path / "r.json").write_text(content)
        with pytest.raises(ConfigError, match="r.json is no result file of the training benchmark") as caught:
            read_cells(tmp_path / "r.json")
        assert told in str(caught.value)

    def test_a_long_way_and_connections_are_those_of_the_measured_step(
        self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        profile = Profile.from_yaml(path)
        far = {"delay": "25ms", "frame_loss": 0.0005, "congestion": "reno"}
        given: dict[str, Any] = {"rtt": 0.05, "loss": 0.0005, "cores": 1.0}
        for method, connections in (("int4", None), ("int4+connections=16", 16)):
            seconds = project(
                profile, Method.named("int4", profile), Scenario("1gbit", connections=connections, **given), 2
            ).seconds
            (each,), _ = compare([cell(method, seconds, **far)], profile)
            assert each.error == pytest.approx(0) and each.row()["rtt, ms"] == "50"
        file = tmp_path / "r.json"
        file.write_text(json.dumps({"rows": [cell("int4", 1.0, **far)]}))
        assert run(file, "--profile", path, "--out", tmp_path, "--theme", "simulate-far") == 0
        with pytest.raises(SystemExit, match="these steps are of long links"):
            run(file, "--profile", path, "--update")

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

    def test_nothing_to_compare_is_an_error(
        self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "r.json").write_text(json.dumps({"rows": [cell("powersgd", 1.0)]}))
        with pytest.raises(SystemExit, match="no step in it can be projected"):
            run(tmp_path / "r.json", "--profile", path)
        assert run(tmp_path / "none.json", "--profile", path) == 1
        assert "none.json is no result file" in capsys.readouterr().err
