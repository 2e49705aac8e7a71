"""The training benchmark: its arithmetic, its names, what it trains, and its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionlayer as fl
from benchmarks.training import __main__ as command
from benchmarks.training import methods
from benchmarks.training.cell import Cell, Measured, Round
from benchmarks.training.methods import all_methods, select
from benchmarks.training.replicas import Waiting, make_replica
from benchmarks.training.sharded_replica import Sharding
from benchmarks.training.summary import columns, interval, readings, rows
from benchmarks.training.timed_codec import Clock, timed
from benchmarks.training.worker import steps_of_turn
from benchmarks.training.workloads import make_workload
from fusionlayer.codecs import Codec, TensorState
from fusionlayer.codecs.base import registry
from fusionlayer.transport import local
from tests.examples.places import ROOT
from tests.harness import run_ranks
from tests.integrations.training import loss_of, make_model
from tests.loops import looped
from tests.tiers import exhaustive, needs

DIGITS = needs("sklearn")
CELL = Cell("gpt", 2, 1, "100mbit", ("alone", "ddp", "ddp-again", "int8"), 5)
QUIET = {"before": {"load": 0.1}, "after": {"load": 2.0}}


def did(
    seconds: list[float], sent: float, losses: int = 8, codec: float | None = None, identical: bool = True
) -> Measured:
    turns = tuple(Round(s, sent, 0.5, None, codec, codec) for s in seconds)
    return Measured(1, turns, tuple(float(10 - step) for step in range(losses)), identical)


def cell_rows(**others: Measured) -> dict[str, dict[str, Any]]:
    """Return the rows of ``CELL`` by method, ``others`` in place of its own."""
    measured = {
        "alone": did([0.25] * 5, 100),
        "ddp": did([4.0, 4.4, 4.2, 4.2, 4.2], 45e6),
        "ddp-again": did([4.0, 4.0, 4.2, 4.2, 4.2], 45e6),
        "int8": did([1.0, 1.1, 1.4, 1.05, 1.2], 10e6, losses=12, codec=0.03),
    }
    return {row["method"]: row for row in rows(CELL, {**measured, **others}, QUIET)}


@pytest.mark.short
class TestArithmetic:
    def test_interval_of_equal_values_is_their_value(self) -> None:
        assert interval([2.0, 2.0, 2.0]) == (2.0, 2.0)

    def test_interval_leaves_out_what_is_rare(self) -> None:
        low, high = interval([1.0] * 9 + [5.0])
        assert (low, high) == (1.0, 1.0)
        low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
        assert 1.0 < low < 5.0 < high < 9.0
        assert (low, high) == interval([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0][::-1])

    def test_ratios_are_of_equal_rounds(self) -> None:
        row = cell_rows()["int8"]
        assert row["step_seconds"] == 1.1
        assert row["speedup"]["median"] == pytest.approx(4.0)
        assert (row["speedup"]["min"], row["speedup"]["max"]) == (pytest.approx(3.0), pytest.approx(4.0))
        assert cell_rows()["ddp"]["speedup"]["median"] == 1.0

    def test_limit_is_the_longer_of_computing_and_sending(self) -> None:
        found = cell_rows(int8=did([0.5] * 5, 1e6))
        assert found["ddp"]["bound_seconds"] == pytest.approx(45e6 * 8 / 100e6)
        assert found["ddp"]["bound_share"] == pytest.approx(3.6 / 4.2)
        assert found["int8"]["bound_seconds"] == 0.25
        assert found["int8"]["bound_share"] == 0.5

    def test_claim_needs_an_interval_above_one_and_above_the_null_row(self) -> None:
        assert cell_rows()["int8"]["faster"] is True
        assert cell_rows()["ddp-again"]["faster"] is False
        assert cell_rows()["alone"]["faster"] is False
        few = {
            name: did([one] * 4, 1e6) for name, one in {"alone": 0.2, "ddp": 4.0, "ddp-again": 4.0, "int8": 1.0}.items()
        }
        assert cell_rows(**few)["int8"]["faster"] is False
        assert cell_rows(int8=did([3.9, 4.5, 4.1, 4.3, 4.2], 10e6))["int8"]["faster"] is False
        shaky = did([2.0, 2.2, 2.1, 2.1, 2.1], 45e6)
        assert cell_rows(int8=did([3.0, 3.3, 3.0, 3.1, 3.0], 10e6), **{"ddp-again": shaky})["int8"]["faster"] is False

    def test_losses_are_compared_at_the_step_that_all_have_done(self) -> None:
        found = cell_rows()
        assert {row["loss_step"] for row in found.values()} == {8}
        assert {row["loss"] for row in found.values()} == {5.0}  # steps 4 to 8: 7, 6, 5, 4, 3

    def test_rows_are_plain_data_for_other_programs(self) -> None:
        row = json.loads(json.dumps(cell_rows()["int8"]))
        plain = {"model": "gpt", "hosts": 2, "workers": 1, "rate": "100mbit", "method": "int8", "bytes_per_step": 10e6}
        assert plain.items() <= row.items()
        assert len(row["rounds"]) == 5
        assert row["rounds"][0]["seconds"] == 1.0

    def test_table_for_people(self) -> None:
        found = cell_rows()
        shown = columns(found["int8"])
        assert (shown["method"], shown["step, ms"], shown["faster"], shown["MB sent"]) == (
            "int8",
            "1100.0",
            "yes",
            "10.000",
        )
        assert (shown["codec, ms"], columns(found["ddp"])["codec, ms"]) == ("30.0", "")
        text = "\n".join(readings(list(found.values())))
        assert "ddp-again is ddp once more: 1.00..1.10" in text
        assert "0.1 before, 2 after" in text
        assert "DIFFER" not in text

    def test_workers_that_parted_are_named(self) -> None:
        found = cell_rows(int8=did([1.0] * 5, 10e6, identical=False), alone=did([0.2] * 5, 0, identical=False))
        assert [line for line in readings(list(found.values())) if "DIFFER" in line] == [
            "int8: PARAMETERS DIFFER between workers, so its figures mean nothing"
        ]

    def test_overlap_that_computes_something_else_is_named(self) -> None:
        same, other = did([0.9] * 5, 10e6, losses=9), did([0.9] * 5, 10e6)
        assert not [line for line in readings(list(cell_rows(**{"int8+overlap": same}).values())) if "DIFFER" in line]
        other = Measured(1, other.rounds, (10.0, 9.5), True)
        assert [line for line in readings(list(cell_rows(**{"int8+overlap": other}).values())) if "DIFFER" in line] == [
            "int8+overlap: LOSSES DIFFER from those of int8, which computes the same"
        ]

    @pytest.mark.parametrize(("seconds", "steps"), [(4.0, 1), (0.3, 3), (0.01, 8)])
    def test_turns_take_about_a_second(self, seconds: float, steps: int) -> None:
        assert steps_of_turn(seconds) == steps


@pytest.fixture
def another_codec() -> Iterator[str]:
    registry.add_preset("wide", "int", bits=8, group_size=1024)
    yield "wide"
    registry.remove("wide")


@pytest.mark.short
class TestMethods:
    def test_codecs_come_from_the_registry(self, another_codec: str) -> None:
        names = set(all_methods())
        assert {another_codec, f"{another_codec}+overlap", "raw", "int8", "int4"} <= names
        assert "int" not in names, "it is there to have presets made of it"

    def test_what_is_compared_with_is_always_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(methods, "missing", dict)
        assert select(["int4+overlap", "int4"]) == (["alone", "ddp", "ddp-again", "int4", "int4+overlap"], {})
        assert select(None)[0] == list(all_methods())
        assert select(["peers"])[0] == list(methods.PEERS)
        assert select(["codecs"])[0][3:] == [name for name in all_methods() if name in fl.codecs.names()]

    def test_what_cannot_run_is_left_out_with_its_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        chosen, absent = select(["horovod", "int8"])
        assert chosen == ["alone", "ddp", "ddp-again", "int8"]
        assert absent == {"horovod": "Horovod is not installed"}

    def test_unknown_name(self) -> None:
        with pytest.raises(ValueError, match=r"unknown method 'int9'; did you mean 'int8'\?"):
            select(["int9"])


@pytest.mark.short
class TestSharded:
    def test_names_have_words(self) -> None:
        assert Sharding.parse("fsdp:delta/zip+bf16") == Sharding("fsdp", "delta", "zip", bf16=True)
        assert Sharding.parse("zero:sdp4bit").about == "fl.ShardedOptimizer, weights sdp4bit"
        for name in ("fsdp:int9", "fsdp+bf8", "zero:", "fsdp:zip/int9"):
            with pytest.raises(ValueError, match="fsdp"):
                select([name])

    def test_ratios_are_over_the_baseline(self) -> None:
        cell = replace(CELL, methods=(*CELL.methods, "fsdp"), baseline="fsdp")
        measured = {name: did([seconds] * 5, 1e6) for name, seconds in zip(cell.methods, (1, 4, 4, 1, 2), strict=True)}
        found = {row["method"]: row for row in rows(cell, measured, QUIET)}
        assert found["int8"]["speedup"]["median"] == 2.0 and columns(found["int8"])["over fsdp"] == "2.00"


def sharded(rank: int, world: int) -> tuple[str, str, tuple[float, ...]]:
    fl.init()
    workload = make_workload("gpt-small", 0, rank)
    digests, losses = [], []
    for name in ("fsdp:sdp4bit", "zero:zip/zip"):
        replica = make_replica(name, workload)
        replica.prepare(0, 2)
        losses += replica.run().losses
        digests.append(replica.digest())
    return digests[0], digests[1], tuple(losses)


@pytest.mark.medium
def test_sharded_replicas_train_to_equal_bits() -> None:
    one, other = run_ranks(sharded, 2)
    assert one[:2] == other[:2] and one[0] != one[1]
    assert all(5.0 < loss < 8.0 for loss in one[2])


@pytest.mark.short
@looped("name", ["raw", "int8", "int4", "dgc"])
def test_timed_codec_makes_the_same_bytes_and_counts(name: str) -> None:
    clock = Clock()
    plain: Codec = fl.codecs.get(name)
    codec = timed(plain, f"{name} for this test", clock)
    try:
        x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
        assert torch.equal(codec.bare.compress(x), plain.bare.compress(x))
        assert 0 < clock.cpu <= clock.seconds * 1.5 + 1e-3
        after_encoding = clock.seconds
        message = plain.bare.compress(x)
        assert torch.equal(codec.bare.decompress(message, 1000), plain.bare.decompress(message, 1000))
        assert clock.seconds > after_encoding
        again = fl.codecs.get(codec.name, **codec.options)  # as an engine does it
        before = clock.seconds
        again.compress(x)
        assert clock.seconds > before
        before = clock.seconds
        again.bare.encode_tensor(x, message, TensorState(torch.zeros(1000)))
        assert clock.seconds > before, "ahead of fusion"
    finally:
        registry.remove(f"{name} for this test")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.short
class TestWorkloads:
    @pytest.mark.parametrize(
        ("model", "parameters"),
        [("gpt", 10_893_312), ("gpt-small", 834_304), pytest.param("resnet", 1_226_442, marks=DIGITS)],
    )
    def test_sizes(self, model: str, parameters: int) -> None:
        assert sum(parameter.numel() for parameter in make_workload(model, 0, 0).model().parameters()) == parameters

    @pytest.mark.parametrize("model", ["gpt-small", pytest.param("resnet", marks=DIGITS)])
    def test_weights_and_data_are_the_same_for_every_method(self, model: str) -> None:
        one, other, elsewhere = make_workload(model, 3, 0), make_workload(model, 3, 0), make_workload(model, 3, 1)
        weights = [
            torch.cat([p.flatten() for p in workload.model().parameters()]) for workload in (one, other, elsewhere)
        ]
        assert torch.equal(weights[0], weights[1])
        assert torch.equal(weights[0], weights[2])
        assert torch.equal(one.batch(5)[0], other.batch(5)[0])
        assert not torch.equal(one.batch(5)[0], one.batch(6)[0])
        assert not torch.equal(one.batch(5)[0], elsewhere.batch(5)[0])

    @DIGITS
    @pytest.mark.usefixtures("one_thread")
    def test_resnet_learns_digits(self) -> None:
        workload = make_workload("resnet", 0, 0)
        model = workload.model()
        optimizer = workload.optimizer(model)
        losses = []
        for step in range(10):
            loss = model(*workload.batch(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] > 2.0
        assert sum(losses[-3:]) / 3 < 1.0


@pytest.mark.short
class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--rates", "fast"], "rate='fast'; expected a number with kbit, mbit or gbit, such as 100mbit"),
            (["--methods", "int9"], "unknown method 'int9'; did you mean 'int8'?"),
            (["--rounds", "0"], "'0'; expected a whole number of at least 1"),
            (["--model", "bert"], "invalid choice: 'bert'"),
        ],
    )
    def test_wrong_options_are_refused(
        self, arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["training", *arguments])
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err

    @pytest.mark.parametrize("busy_ok", [False, True])
    def test_busy_machine_is_refused_before_anything_runs(self, busy_ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[bool, int]] = []

        def refuse(ok: bool, ranks: int) -> None:
            asked.append((ok, ranks))
            raise SystemExit("the machine is busy")

        monkeypatch.setattr(command, "refuse_if_busy", refuse)
        monkeypatch.setattr(command, "why_not", lambda network: None)
        monkeypatch.setattr(command, "run_cell", lambda *_: pytest.fail("it measured"))
        arguments = ["--hosts", "2", "--workers", "3", "--methods", "int8", *(["--busy-ok"] if busy_ok else [])]
        monkeypatch.setattr(sys, "argv", ["training", *arguments])
        with pytest.raises(SystemExit, match="busy"):
            command.main()
        assert asked == [(busy_ok, 6)]


@pytest.mark.medium
@exhaustive(guarded_by="tests/test_documents.py::test_the_commands_of_the_readme_run")
def test_without_namespaces_it_runs_on_loopback_and_says_so(tmp_path: Path) -> None:
    arguments = ["--model", "gpt-small", "--methods", "int8", "--rounds", "1", "--busy-ok", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", *arguments],
        env={**os.environ, "PATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no network namespaces here (the program unshare is missing (install util-linux))" in done.stderr
    result = json.loads(next(tmp_path.glob("training-gpt-small-1x2_*.json")).read_text())
    assert [row["method"] for row in result["rows"]] == ["alone", "ddp", "ddp-again", "int8"]
    assert {(row["hosts"], row["workers"], row["rate"]) for row in result["rows"]} == {(1, 2, None)}
    assert [row["identical"] for row in result["rows"]] == [False, True, True, True]
    losses = {row["method"]: row["training_losses"] for row in result["rows"]}
    common = min(len(losses["ddp"]), len(losses["ddp-again"]))
    assert losses["ddp"][:common] == losses["ddp-again"][:common]


@pytest.mark.short
def test_what_backward_waits_is_waiting() -> None:
    def rank_main(rank: int) -> bool:
        model = make_model()
        optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        workload: Any = None
        replica = Waiting(workload, model, optimizer)
        loss_of(model, rank, 0).backward()
        return bool(replica._waited)

    assert all(local.run(rank_main, 2))
