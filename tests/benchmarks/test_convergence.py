"""The convergence benchmark: its table, its result file, and runs that differ by the method alone."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

import fusionlayer as fl
from benchmarks.convergence import BASELINE, Settings, methods, summarize
from benchmarks.convergence import __main__ as command
from benchmarks.convergence.running import train
from benchmarks.report import Environment
from benchmarks.variants import codec_presets
from tests.examples.places import needs_namespaces
from tests.tiers import long


def row(method: str, seed: int, final: float) -> dict[str, Any]:
    return {"method": method, "seed": seed, "final": final}


@pytest.mark.short
class TestSummary:
    def test_differences_are_to_the_baseline_of_the_same_seed(self) -> None:
        rows = [row(BASELINE, 0, 2.0), row("int8", 0, 2.25), row(BASELINE, 1, 3.0), row("int8", 1, 3.75)]
        _, int8 = summarize(rows)
        assert int8["final loss"].startswith("3.0000 ± 1.06")
        assert int8["difference to ddp"] == "+0.5000"
        assert int8["min..max"] == "+0.2500..+0.7500"

    @pytest.mark.parametrize(
        ("differences", "verdict"),
        [
            ((0.5, 0.75), "no"),
            ((0.75, 0.75), "yes, worse"),
            ((-0.75, -0.75), "yes, better"),
            ((-0.8, 0.8), "no"),
            ((math.nan, 0.0), "yes, worse"),
        ],
    )
    def test_small_is_what_another_seed_would_do_too(self, differences: tuple[float, float], verdict: str) -> None:
        rows = [row(BASELINE, 0, 2.0), row(BASELINE, 1, 3.0)]  # their standard deviation is 0.7071
        rows += [row("int4", seed, 2.0 + seed + difference) for seed, difference in enumerate(differences)]
        assert summarize(rows)[1]["outside the spread"] == verdict

    def test_what_cannot_be_compared_is_left_blank(self) -> None:
        alone = summarize([row("int4", 0, 2.0)])
        assert alone[0]["difference to ddp"] == alone[0]["outside the spread"] == ""
        one_seed = summarize([row(BASELINE, 0, 2.0), row("int4", 0, 2.5)])
        assert one_seed[1]["difference to ddp"] == "+0.5000"
        assert one_seed[1]["outside the spread"] == ""


@pytest.mark.short
def test_every_codec_that_is_one_by_itself_takes_part() -> None:
    assert set(fl.codecs.names()) - set(codec_presets()) == {"int"}
    assert set(methods()) == {"ddp", "ddp-powersgd", *codec_presets()}


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call the command with arguments, told which run is to fail or to be interrupted; runs take no time."""
    failing = interrupting = ""
    done: list[tuple[str, int]] = []

    def fake_run(method: str, seed: int, settings: Settings, label: str) -> list[list[float]] | None:
        done.append((method, seed))
        if method == failing:
            return None
        if method == interrupting:
            raise KeyboardInterrupt
        return [[0, 5.0], [settings.steps, 2.0 + seed]]

    def call(*arguments: str, fail: str = "", interrupt: str = "") -> tuple[int, list[tuple[str, int]]]:
        nonlocal failing, interrupting
        failing, interrupting = fail, interrupt
        done.clear()
        monkeypatch.setattr(sys, "argv", ["convergence", *arguments])
        return command.main(), list(done)

    monkeypatch.setattr(command, "run", fake_run)
    return call


def only(folder: Path) -> Path:
    """Return the one JSON file of ``folder``."""
    (path,) = folder.glob("*.json")
    return path


@pytest.mark.short
class TestResultFile:
    def test_has_every_run_and_the_table(self, main: Any, tmp_path: Path) -> None:
        status, done = main("--presets", "ddp,int8", "--seeds", "2", "--out", str(tmp_path))
        assert status == 0
        assert done == [("ddp", 0), ("int8", 0), ("ddp", 1), ("int8", 1)]
        found = json.loads(only(tmp_path).read_text())
        assert found["title"] == Settings().title
        assert Environment(**found["environment"])
        assert [(r["method"], r["seed"], r["final"]) for r in found["rows"]] == [(*run, 2.0 + run[1]) for run in done]
        assert found["rows"][0]["losses"] == [[0, 5.0], [600, 2.0]]
        assert "difference to ddp" in only(tmp_path).with_suffix(".md").read_text()

    def test_of_an_interrupted_command_is_completed(self, main: Any, tmp_path: Path) -> None:
        arguments = ["--presets", "ddp,int8,int4", "--seeds", "1"]
        status, _ = main(*arguments, "--out", str(tmp_path), interrupt="int4")
        assert status == 1
        path = only(tmp_path)
        path = path.rename(path.with_name(path.name.replace(path.stem[-10:], "2001-02-03")))
        text = json.loads(path.read_text())
        text["environment"]["date"] = "2001-02-03"
        path.write_text(json.dumps(text))
        status, done = main(*arguments, "--resume", str(path))
        assert (status, done) == (0, [("int4", 0)])
        assert only(tmp_path) == path
        assert [r["method"] for r in json.loads(path.read_text())["rows"]] == ["ddp", "int8", "int4"]

    def test_of_other_settings_is_not_continued(
        self, main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main("--presets", "ddp", "--seeds", "1", "--out", str(tmp_path))
        with pytest.raises(SystemExit):
            main("--presets", "ddp", "--steps", "7", "--resume", str(only(tmp_path)))
        assert "asked for is" in capsys.readouterr().err

    def test_of_another_machine_is_not_continued(
        self, main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main("--presets", "ddp", "--seeds", "1", "--out", str(tmp_path), "--hardware", "Abacus")
        with pytest.raises(SystemExit):
            main("--presets", "ddp", "--hardware", "Slide rule", "--resume", str(only(tmp_path)))
        assert "hardware was 'Abacus' and is 'Slide rule'" in capsys.readouterr().err

    def test_is_never_overwritten(self, main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main("--presets", "ddp", "--seeds", "1", "--out", str(tmp_path))
        before = only(tmp_path).read_text()
        with pytest.raises(SystemExit):
            main("--presets", "int8", "--seeds", "1", "--out", str(tmp_path))
        assert "--resume" in capsys.readouterr().err
        assert only(tmp_path).read_text() == before

    def test_is_asked_for_by_a_name_that_is_there(
        self, main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "other.json").write_text('{"title": 1}')
        for name in ("none.json", "other.json"):
            with pytest.raises(SystemExit):
                main("--resume", str(tmp_path / name))
            assert "no result file of this benchmark" in capsys.readouterr().err

    def test_lacks_what_failed_and_has_the_rest(
        self, main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, _ = main("--presets", "ddp,int8,int4", "--seeds", "1", "--out", str(tmp_path), fail="int8")
        assert status == 1
        assert "int8, seed 0" in capsys.readouterr().err
        assert [r["method"] for r in json.loads(only(tmp_path).read_text())["rows"]] == ["ddp", "int4"]


@pytest.mark.medium
class TestRuns:
    @long(guarded_by="tests/integrations/test_ddp.py::test_training")
    def test_differ_by_the_method_alone(self) -> None:
        """With two workers the f32 sum is one addition: fusionlayer without compression must repeat DDP's bits."""
        settings = Settings(model="small", steps=13, every=12)
        found = {method: command.run(method, 3, settings, method) for method in ("ddp", "raw", "int4", "ddp-powersgd")}
        ddp = found["ddp"]
        assert ddp is not None
        assert [step for step, _ in ddp] == [0, 12, 13]
        assert ddp[-1][1] < ddp[0][1]
        assert found["raw"] == ddp
        for method in ("int4", "ddp-powersgd"):
            losses = found[method]
            assert losses is not None
            assert losses[0] == ddp[0]
            assert 0 < abs(losses[-1][1] - ddp[-1][1]) < 0.5, method

    @long(guarded_by="tests/integrations/test_local_processes.py::test_the_backend_s_users_take_local_steps")
    @needs_namespaces
    def test_sgd_in_hosts_and_then_over_hosts_is_sgd(self) -> None:
        """Where hosts sync after each step, what DDP has averaged in each is averaged over them."""
        settings = Settings("small", 4, steps=13, every=12, optimizer="SGD", learning_rate=0.1, hosts=2)
        ddp, nodes = (train(method, 3, settings, method) for method in ("ddp", "raw+local=averaging:every=1+nodes"))
        assert ddp is not None
        assert nodes is not None
        assert ddp[-1].loss < ddp[0].loss
        assert [point.loss for point in nodes] == pytest.approx([point.loss for point in ddp], rel=1e-5)

    @long(guarded_by="tests/benchmarks/test_collective.py::test_workers_that_fail_are_told_of")
    def test_that_fail_are_told_of(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert command.run("no such codec", 0, Settings(model="small", steps=1), "broken") is None
        assert "unknown codec 'no such codec'" in capfd.readouterr().err
