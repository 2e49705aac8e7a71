"""The scoreboard: its arithmetic, its records, its command line, and a small one from end to end."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import fusionlayer as fl
from benchmarks import peers
from benchmarks.scoreboard import __main__ as command
from benchmarks.scoreboard import campaign
from benchmarks.scoreboard.campaign import SETUPS
from benchmarks.scoreboard.links import LINKS, Link
from benchmarks.scoreboard.methods import LOCAL, METHODS, check, phases
from benchmarks.scoreboard.picture import picture, shown
from benchmarks.scoreboard.records import Found, Records, read
from benchmarks.scoreboard.running import Point
from benchmarks.scoreboard.settings import Settings
from benchmarks.scoreboard.summary import checks, columns, levels, mean_curve, overview, reached, scores
from benchmarks.scoreboard.worker import evaluations
from benchmarks.training.worker import steps_of_turn
from benchmarks.variants import Variant
from fusionlayer.cli import drawing
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


@pytest.mark.short
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

    def test_minutes_are_steps_times_the_seconds_of_a_step_on_that_link(self) -> None:
        rows = scores(found(*DDP, steps("ddp", FAST, 0.6), steps("ddp", SLOW, 12.0)), SEEDS)
        assert {row["link"]: row["minutes"] for row in rows} == {
            "1gbit/1ms": pytest.approx([1.5, 3.0, 6.0]),
            "30mbit/1ms": pytest.approx([30.0, 60.0, 120.0]),
        }
        assert rows[0]["final"] == pytest.approx(2.1) and rows[0]["spread"] == pytest.approx(0.1)

    @pytest.mark.parametrize(("final", "step"), [(2.0, 450 + 150 * 0.4 / 0.5), (2.19, 600), (2.21, None)])
    def test_who_ends_within_the_spread_of_f32_reaches_its_loss_with_the_last_step(
        self, final: float, step: float | None
    ) -> None:
        mine = [losses("int4", seed, 5, 4, 3, 2.5, final) for seed in SEEDS]
        row = scores(found(*DDP, *mine, steps("int4", FAST, 1.0)), SEEDS)[-1]
        assert row["steps"][-1] == (None if step is None else pytest.approx(step))
        cell = columns(row)["to 2.100"]
        assert cell == {2.0: "9.5", 2.19: "~10", 2.21: "— (2.210)"}[final]
        assert row["above"] == pytest.approx(final / 2.1 - 1)

    @needs("matplotlib")
    def test_minutes_of_fewer_seeds_say_so(self) -> None:
        row = scores(found(*DDP, losses("int4", 2, 5, 4, 3, 2.1, 1), steps("int4", FAST, 1.0)), SEEDS)[-1]
        assert row["above"] == pytest.approx(1 / 2.2 - 1), "beside f32 of the same seed, not the mean of all"
        assert row["minutes"] == pytest.approx([2.5, 5.0, 7.5])
        assert overview([row])[0]["1 Gbit/s, 1 ms"] == "7.5 (1 of 3 seeds)"
        with drawing.style():
            (line, _) = picture([row]).axes[0].get_lines()
        assert line.get_label() == "int4, 1 of 3 seeds"

    def test_first_steps_of_another_kind_have_their_own_seconds(self) -> None:
        names = ("onebit+freeze_step=100+warmup_codec=int4", "ddp-powersgd")
        mine = [losses(name, seed, 5, 4, 3, 2.5, 2.1) for name in names for seed in SEEDS]
        times = {"int4": 3.0, "onebit+freeze_step=1": 0.6, "ddp": 6.0, "ddp-powersgd": 0.6}
        it = found(*DDP, *mine, *(steps(name, FAST, each) for name, each in times.items()))
        rows = {row["method"]: row for row in scores(it, SEEDS)}
        assert rows[names[0]]["minutes"] == pytest.approx([5 + 0.5, 5 + 2, 5 + 5])
        assert rows[names[1]]["minutes"] == pytest.approx([1 + 1.4, 1 + 2.9, 1 + 5.9])
        assert rows[names[0]]["step_seconds"] == 0.6
        assert phases(names[0] + "+overlap") == ((0, "int4+overlap"), (100, "onebit+overlap+freeze_step=1"))
        del it.steps[str(FAST), "int4"]
        assert [row["link"] for row in scores(it, SEEDS) if row["method"] == names[0]] == [None]

    def test_overlap_has_the_losses_of_the_codec_and_a_warm_density_the_steps(self) -> None:
        mine = [losses(name, seed, 5, 4, 3, 2, 1) for name in ("int4", "dgc+warmup_steps=60") for seed in SEEDS]
        timed = [steps(name, FAST, seconds) for name, seconds in (("int4", 1.0), ("int4+overlap", 0.5), ("dgc", 0.25))]
        rows = {row["method"]: row for row in scores(found(*DDP, *mine, *timed), SEEDS)}
        assert set(rows) == {"ddp", "int4", "int4+overlap", "dgc+warmup_steps=60"}
        assert rows["int4+overlap"]["minutes"] == pytest.approx([each / 2 for each in rows["int4"]["minutes"]])
        assert rows["dgc+warmup_steps=60"]["step_seconds"] == 0.25

    def test_connections_of_our_own_have_the_losses_of_the_method(self) -> None:
        warm = "onebit+freeze_step=75+warmup_codec=int4"
        mine = [losses(name, seed, 5, 4, 3, 2.5, 2.1) for name in ("int4", warm) for seed in SEEDS]
        over = {"int4+connections=16": 2.0, "onebit+connections=16+freeze_step=1": 0.5, "ddp": 6.0, "int4": 4.0}
        it = found(*DDP, *mine, *(steps(name, SLOW, each) for name, each in over.items()))
        rows = {row["method"]: row for row in scores(it, SEEDS)}
        assert {name for name, row in rows.items() if row["link"]} == {
            "ddp",
            "int4",
            "int4+connections=16",
            f"{warm}+connections=16",
        }
        assert rows["int4+connections=16"]["minutes"] == pytest.approx([each / 2 for each in rows["int4"]["minutes"]])
        assert rows[f"{warm}+connections=16"]["step_seconds"] == 0.5

    def test_a_run_that_was_timed_as_a_whole_is_compared_with_the_product(self) -> None:
        run = {**losses("int4", 0, 5, 4, 3, 2.5, 2.0), "link": "1gbit/1ms", "seconds": [[0, 0.0], [600, 660.0]]}
        it = found(*DDP, losses("int4", 0, 5, 4, 3, 2.5, 2.0), steps("int4", FAST, 1.0), run)
        (line,) = checks(it)
        assert (line["computed, min"], line["measured, min"], line["difference"]) == ("10.0", "11.0", "-9.1%")
        assert line["loss"] == line["loss here"] == "2.0000"


@pytest.mark.short
def test_local_steps_are_timed_and_looked_at_where_a_period_ends() -> None:
    assert evaluations(600, 50, 1) == {*range(50, 601, 50)}
    assert evaluations(600, 50, 8) == {*range(56, 600, 56), 600}
    assert evaluations(100, 50, 64) == {64, 100}
    assert [steps_of_turn(0.2, period) for period in (1, 2, 4, 30)] == [5, 4, 4, 30]
    assert steps_of_turn(0.01, 3) == 6


class Local:
    """Stands in for ``fusionlayer.Local``."""

    codec, codec_options = "int", {"bits": 4}

    def __init__(self, every: int, states: dict[str, int] | None = None) -> None:
        self.every, self.states = every, states

    @classmethod
    def diloco(cls, every: int = 30) -> Local:
        return cls(every)

    @classmethod
    def desloc(cls, every: int = 32) -> Local:
        return cls(every, {"exp_avg": 3, "exp_avg_sq": 6})


@pytest.mark.short
def test_local_steps_have_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fl, "Local", Local, raising=False)
    variant = Variant.parse("int8+local=diloco:every=60")
    assert (variant.codec, variant.options, variant.period, variant.cycle) == ("int8", {}, 60, 60)
    variant = Variant.parse("local=desloc")
    assert (variant.codec, variant.options, variant.period, variant.cycle) == ("int", {"bits": 4}, 32, 192)
    assert Variant.parse("int8").cycle == 1
    for wrong in ("int8+local=diloko", "int8+local=diloco:evry=3", "int8+local=__init__"):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            Variant.parse(wrong)


@pytest.mark.short
@needs("matplotlib")
class TestPicture:
    def test_shows_ddp_the_best_peer_and_the_best_of_ours(self) -> None:
        final = {"ddp-fp16": 2.1, "ddp-powersgd": 2.05, "int8": 2.1, "int4": 2.1, "topk": 2.6}
        mine = [losses(name, seed, 5, 4, 3, 2.5, end) for name, end in final.items() for seed in SEEDS]
        seconds = {"ddp": 12, "ddp-fp16": 6, "ddp-powersgd": 1, "int8": 3, "int4": 2, "topk": 0.5}
        timed = [steps(name, SLOW, each) for name, each in seconds.items()]
        timed += [steps(name, FAST, each) for name, each in {**dict.fromkeys(seconds, 0.6), "int8": 0.5}.items()]
        rows = scores(found(*DDP, *mine, *timed), SEEDS)
        assert shown(rows) == ["ddp", "ddp-powersgd", "int8", "int4"]  # topk ends too high
        with drawing.style():
            figure = picture(rows)
            (axes,) = figure.axes
            assert [text.get_text() for text in axes.get_xticklabels()] == ["1 Gbit/s", "30 Mbit/s"]
            assert [*axes.get_lines()[-1].get_ydata()] == pytest.approx([2.0, 2.0]), "computing alone"
            assert (
                figure.get_suptitle() == "f32's final loss at 30 Mbit/s: ddp-powersgd after 11.6 minutes, DDP after 120"
            )


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[tuple[str, int]]]]:
    """Call the command with arguments; runs take no time, and one of them may fail or be interrupted."""
    done: list[tuple[str, int]] = []
    trouble: dict[str, Any] = {}

    def train(method: str, seed: int, settings: Settings, *_: object) -> list[Point] | None:
        if method in trouble:
            if trouble[method] is None:
                return None
            raise trouble[method]
        done.append((method, seed))
        return [Point(0, 5.0, 0.0), Point(settings.steps, 2.0 + seed, 1.0)]

    def call(*arguments: str, **troubles: Any) -> tuple[int, list[tuple[str, int]]]:
        done.clear()
        trouble.clear()
        trouble.update(troubles)
        fixed = ["--parts", "losses", "--seeds", "0,1", "--records", str(tmp_path / "records")]
        monkeypatch.setattr(sys, "argv", ["scoreboard", *fixed, *arguments])
        return command.main(), list(done)

    monkeypatch.setattr(campaign, "train", train)
    monkeypatch.setattr(campaign, "_computing", lambda settings: 0.1)
    monkeypatch.setattr(campaign, "_fastest", lambda settings: None)
    return call


@pytest.mark.short
class TestCampaign:
    def test_goes_on_where_it_was_interrupted(self, go: Any, capsys: pytest.CaptureFixture[str]) -> None:
        methods = ["--methods", "ddp,int8,int4+overlap,int4"]
        status, done = go(*methods, int4=KeyboardInterrupt())
        assert (status, done) == (1, [("ddp", 0), ("int8", 0)])
        with pytest.raises(SystemExit):
            go(*methods)
        assert "go on with --resume" in capsys.readouterr().err
        status, done = go(*methods, "--resume", int8=None)
        assert (status, done) == (1, [("int4", 0), ("ddp", 1), ("int4", 1)])
        assert "not all went well: int8, seed 1" in capsys.readouterr().err
        assert go(*methods, "--resume") == (0, [("int8", 1)])

    def test_parts_are_merged_into_one_result(self, go: Any, tmp_path: Path) -> None:
        go("--methods", "ddp")
        (tmp_path / "records").rename(tmp_path / "theirs")
        theirs = tmp_path / "theirs/scoreboard-gpt-2x1-adamw"
        assert len([*theirs.iterdir()]) == 2, "no lock stays"
        out = ["--out", str(tmp_path / "out")]
        status, done = go("--methods", "ddp,int8", "--merge", str(theirs), *out)
        assert (status, done) == (0, [("int8", 0), ("int8", 1)])
        (result,) = (tmp_path / "out").glob("scoreboard-gpt-2x1-adamw_*.json")
        again = Found(SETTINGS)
        read([result], again)
        assert set(again.losses) == {("ddp", 0), ("ddp", 1), ("int8", 0), ("int8", 1)}
        assert {row["kind"] for row in json.loads(result.read_text())["rows"]} == {"score", "losses"}
        assert "final loss" in result.with_suffix(".md").read_text()

    def test_a_run_is_one_process_s(self, tmp_path: Path) -> None:
        one, other = (Records(tmp_path, "a training", _environment()) for _ in range(2))
        with one.claim("losses", "dgc+density=0.1", 0) as mine:
            assert mine is not None
            with other.claim("losses", "dgc+density=0.1", 0) as theirs:
                assert theirs is None
            one.write(mine, [])
        with other.claim("losses", "dgc+density=0.1", 0) as theirs:
            assert theirs is None, "it is there"

    def test_losses_are_taken_without_the_machine_s_times(self, tmp_path: Path) -> None:
        rows = [{"kind": "losses", **DDP[0]}, {"kind": "steps", **steps("ddp", FAST, 1.0)}]
        file = tmp_path / "r.json"
        file.write_text(json.dumps({"title": "x", "environment": {"hardware": "Old"}, "rows": rows}))
        it = found(steps("ddp", FAST, 2.0))
        read([file], it, losses_alone=True)
        assert list(it.losses) == [("ddp", 0)] and it.machines() == {"Abacus"}
        everything = found()
        read([file], everything)
        assert everything.machines() == {"Old"}

    def test_what_is_of_another_training_is_passed_over(self, tmp_path: Path) -> None:
        longer = {**losses("ddp", 0, 5, 4, 3, 2, 1), "training": "another"}
        assert not found(longer, steps("ddp", FAST, 1.0, hosts=4)).rows()
        path = tmp_path / "result.json"
        path.write_text(json.dumps({"title": "another", "environment": {}, "rows": [longer]}))
        with pytest.raises(ValueError, match="has nothing of this training"):
            read([path], Found(SETTINGS))
        path.write_text("[]")
        with pytest.raises(ValueError, match="is no result file"):
            read([path], Found(SETTINGS))

    def test_times_of_two_machines_do_not_mix(
        self, go: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for hardware, link in (("Abacus", FAST), ("Slide rule", SLOW)):
            data = {"title": "", "environment": {"hardware": hardware}, "rows": [steps("ddp", link, 1.0)]}
            (tmp_path / f"{hardware}.json").write_text(json.dumps(data))
        with pytest.raises(SystemExit):
            go("--methods", "ddp", "--merge", *map(str, tmp_path.glob("*.json")))
        assert "steps were timed on Abacus and Slide rule" in capsys.readouterr().err

    @looped(
        "arguments, complaint",
        [
            (["--networks", "fast/1ms"], "expected RATE/RTT, such as 100mbit/50ms"),
            (["--networks", "1gbit"], "expected RATE/RTT, such as 100mbit/50ms"),
            (["--methods", "int9"], "int9"),
            (["--methods", "demo"], "without a licence"),
            (["--hosts", "1x2"], "expected hosts and workers on each"),
            (["--measure", "int4"], "expected METHOD@RATE/RTT"),
            (["--merge", "nothing.json"], "nothing.json is no result file"),
        ],
    )
    def test_mistakes_are_told(
        self, go: Any, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            go(*arguments)
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err


def _environment() -> Any:
    from benchmarks.report import Environment

    return Environment("Abacus", 1, 0.0, "", "", "", "", "", "2001-02-03")


@pytest.mark.short
def test_every_method_of_the_tables_exists_and_half_of_a_round_trip_is_each_way() -> None:
    assert [check(name) for names in METHODS.values() for name in names if name not in LOCAL]
    assert set(peers.PEERS) <= {*METHODS["AdamW"], "ddp-bf16"}
    assert [link.network(2).delay_seconds for link in LINKS] == [0.0005] * 3 + [0.025] * 3
    assert str(Link.parse("30mbit/1ms")) == "30mbit/1ms"


@long(guarded_by="tests/benchmarks/test_scoreboard.py::TestCampaign::test_parts_are_merged_into_one_result")
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
