"""Profiles are measured, and projections compared with measured steps."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from benchmarks.report import Environment
from benchmarks.simulate.__main__ import main
from benchmarks.simulate.links import predicted_calls, read_calls
from benchmarks.simulate.measure import measure
from benchmarks.simulate.sums import predicted_sums
from benchmarks.simulate.validate import compare, read_cells, summarize
from benchmarks.simulate.worker import Job
from benchmarks.unequal import BY_SHARES, EQUAL
from fusionlayer.errors import ConfigError
from fusionlayer.planning.cluster import Cluster, Scenario
from fusionlayer.planning.collective_phases import exchange_phases
from fusionlayer.planning.cost_model import Curve
from fusionlayer.planning.profile import Profile
from fusionlayer.planning.projection import Method, project
from tests.examples.places import needs_namespaces
from tests.loops import looped
from tests.planning.profiles import write_example
from tests.tiers import DRAWS, long


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_example(tmp_path)


def cell(method: str, seconds: float, rate: str | None = "1gbit", hosts: int = 2, **more: Any) -> dict[str, Any]:
    facts = {"model": "example", "hosts": hosts, "workers": 1, "rate": rate, "method": method, "step_seconds": seconds}
    return {**facts, **more}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["simulate", *map(str, arguments)])
    return main()


def call(operation: str, codec: str = "raw", **more: Any) -> dict[str, Any]:
    link = {"rate": "100mbit", "delay": "25ms", "loss": 0.0005, "congestion": "reno", "world": 2}
    return {"operation": operation, "codec": codec, "size": 1 << 20, "seconds": [1.0], **link, **more}


@pytest.mark.short
class TestLinks:
    def predicted(self, path: Path, *rows: dict[str, Any]) -> list[float]:
        return [row["predicted ms"] / 1e3 for row in predicted_calls(rows, Profile.from_yaml(path))]

    def test_a_call_is_an_agreement_and_its_messages(self, path: Path) -> None:
        profile = Profile.from_yaml(path)
        over_gloo, over_two = (
            Scenario("100mbit", rtt=0.05, loss=0.0005, connections=count).cluster(profile, 2) for count in (None, 2)
        )

        def seconds(cluster: Cluster) -> float:
            assert cluster.connections is not None
            after_a_pause = replace(cluster, connections=replace(cluster.connections, rested=True))
            return sum(phase.seconds for size in (24, 1 << 19) for phase in exchange_phases(after_a_pause, size))

        gather, alltoall = self.predicted(path, call("all_gather over gloo"), call("all_to_all over 2 connections"))
        assert gather == pytest.approx(seconds(over_gloo), rel=0.02)
        assert alltoall == pytest.approx(seconds(over_two), rel=0.02)

    def test_bbr_does_not_slow_down_for_a_loss_and_codes_are_shorter(self, path: Path) -> None:
        reno, bbr, int4 = self.predicted(
            path,
            call("all_reduce over gloo"),
            call("all_reduce over gloo", congestion="bbr"),
            call("all_reduce over gloo", "int4"),
        )
        assert bbr < reno and int4 < reno / 2

    def test_other_results_are_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "r.json"
        file.write_text(json.dumps({"rows": [call("gloo all_gather")]}))
        with pytest.raises(ConfigError, match="expected results of benchmarks.collective --links"):
            read_calls(file)
        file.write_text(json.dumps({"rows": [call("gloo all_gather"), call("all_gather over gloo")]}))
        assert [row["operation"] for row in read_calls(file)] == ["all_gather over gloo"]

    def test_the_command_prints_what_is_predicted_beside_what_was_measured(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "r.json"
        file.write_text(json.dumps({"rows": [call("all_gather over 4 connections", "int4")]}))
        assert run(monkeypatch, "links", file, "--profile", path) == 0
        assert "4 connections" in capsys.readouterr().out


@pytest.mark.short
class TestSums:
    ROW: ClassVar[dict[str, Any]] = {
        **{"operation": BY_SHARES, "codec": "raw", "rates": ["1gbit", "1gbit", "1gbit", "500mbit"], "seconds": [1.0]},
        **{"buckets": 2, "numel": 1 << 22, "rtt": None},
    }

    def test_shares_take_what_the_rates_allow(self, path: Path) -> None:
        rows = [self.ROW, {**self.ROW, "operation": EQUAL}, {**self.ROW, "rtt": "200ms"}]
        shares, equal, far = (row["predicted ms"] for row in predicted_sums(rows, Profile.from_yaml(path)))
        assert shares == pytest.approx(2 / 3 * equal, rel=0.05)
        assert far == pytest.approx(shares + 2 * 200, abs=1)

    def test_the_command_prints_errors_and_refuses_other_results(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "r.json"
        file.write_text(json.dumps({"rows": [self.ROW]}))
        assert run(monkeypatch, "sums", file, "--profile", path) == 0
        assert "% in the median" in capsys.readouterr().out
        file.write_text(json.dumps({"rows": [{"operation": EQUAL}]}))
        assert run(monkeypatch, "sums", file, "--profile", path) == 1
        assert "expected results of benchmarks.unequal" in capsys.readouterr().err


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
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
        assert run(monkeypatch, "validate", file, "--profile", path, "--out", tmp_path, "--theme", "simulate-far") == 0
        assert (tmp_path / "plots" / "simulate-far.svg").exists() == DRAWS
        with pytest.raises(SystemExit, match="these steps are of long ways"):
            run(monkeypatch, "validate", file, "--profile", path, "--update")

    def test_command_line_updates_the_profile(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        results = tmp_path / "training_x_2026-01-01.json"
        rows = [cell("ddp", 0.5, further="key"), cell("int4", 0.4, bytes_per_step=2_200_000), cell("powersgd", 1.0)]
        results.write_text(json.dumps({"title": "t", "environment": {}, "rows": rows}))
        out = ["--out", tmp_path / "out", "--hardware", "machine"]
        assert run(monkeypatch, "validate", results, "--profile", path, *out, "--update") == 0
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
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "r.json").write_text(json.dumps({"rows": [cell("powersgd", 1.0)]}))
        with pytest.raises(SystemExit, match="no step in it can be projected"):
            run(monkeypatch, "validate", tmp_path / "r.json", "--profile", path)
        assert run(monkeypatch, "validate", tmp_path / "none.json", "--profile", path) == 1
        assert "none.json is no result file" in capsys.readouterr().err


@long(guarded_by="tests/planning/test_profiler.py::test_codecs_have_costs")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_a_profile_from_the_lab_can_be_projected(tmp_path: Path) -> None:
    job = Job(model=None, elements=(1024, 4096), nbytes=(65536, 262144), steps=2, repeats=2)
    measured = measure("gpt-small", ["50mbit"], job, Environment.here(torch.device("cpu"), "machine"))
    path = tmp_path / "profile.yaml"
    measured.to_yaml(path)
    profile = Profile.from_yaml(path)
    assert profile.machine.workers == 2 and profile.model.name == "gpt-small"
    assert sum(tensor.numel for tensor in profile.model.tensors) == 834_304
    arrivals = [tensor.ready for tensor in profile.model.tensors]
    assert arrivals == sorted(arrivals)
    link = profile.links["50mbit"]
    for costs in (link.exchange, link.all_reduce):
        assert isinstance(costs, Curve)
        assert costs(262144) > 0.7 * 262144 * 8 / 50e6, "what is beyond a burst cannot be faster"
    assert profile.inside is not None and profile.inside.overhead == link.overhead
    ddp, int4 = (
        project(profile, Method.named(name, profile), Scenario("50mbit"), 2).seconds for name in ("ddp", "int4")
    )
    assert math.isfinite(ddp) and math.isfinite(int4)  # which is faster depends on what else the machine does


@long(guarded_by="tests/planning/test_profiler.py::test_a_profile_of_more_ranks_is_the_same_on_all")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_steps_on_a_long_way_are_measured_and_can_be_compared(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo and over connections of our own, with the same bits on both ranks."""
    way = ["--link", "100mbit/10ms/0.001/reno", "--methods", "int4,int4+connections=2", "--model", "gpt-small"]
    assert run(monkeypatch, "steps", *way, "--rounds", "2", "--busy-ok", "--out", tmp_path) == 0
    (file,) = tmp_path.glob("steps_*.json")
    rows = read_cells(file)
    assert [row["method"] for row in rows] == ["int4", "int4+connections=2"]
    assert all(row["identical"] and row["step_seconds"] > 0.01 and len(row["rounds"]) == 2 for row in rows)
    assert (rows[0]["delay"], rows[0]["frame_loss"], rows[0]["congestion"]) == ("5ms", 0.001, "reno")
    profile = Profile.from_yaml(path)
    compared, _ = compare(rows, replace(profile, model=replace(profile.model, name="gpt-small")))
    assert len(compared) == 2 and all(each.row()["rtt, ms"] == "10" for each in compared)
