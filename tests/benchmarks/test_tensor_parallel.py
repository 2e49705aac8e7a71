"""The benchmark of tensor-parallel steps: its variants, its ratios, its ways to sum, a small run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusionlayer as fl
from benchmarks.tensor_parallel.__main__ import columns, picture, rows
from benchmarks.tensor_parallel.model import Shape, TensorParallelGPT
from benchmarks.tensor_parallel.variants import BASELINE, Variant, parse, variants
from tests.tiers import DRAWS, long

from .labs import ROOT, needs_namespaces

SMALL = ("--width", "128", "--layers", "1", "--context", "16", "--batch", "4", "--rounds", "2", "--busy-ok")


@pytest.mark.short
def test_names_of_variants() -> None:
    every = list(variants())
    assert [parse(each.name) for each in every] == every
    assert every[0] == Variant(BASELINE) and Variant("taco", 256 << 10) in every
    for wrong in ("int5", "taco/0KiB", "taco/1MiB"):
        with pytest.raises(ValueError, match="expected|choose from"):
            parse(wrong)


@pytest.mark.short
def test_ratios_are_of_the_same_round() -> None:
    seconds = {BASELINE: (4.0, 2.0, 3.0), "bf16": (2.0, 1.0, 1.5), "bf16/64KiB": (1.0, 2.0, 3.0)}
    measured = {
        name: [{"seconds": each, "sent": 1e6, "loss": 5.0} for each in rounds] for name, rounds in seconds.items()
    }
    gloo, whole, pieces = rows("1gbit", measured)
    assert gloo["speedup"]["median"] == 1 and whole["speedup"]["median"] == 2 and whole["over_bf16"]["median"] == 1
    assert pieces["speedup"]["median"] == 1 and pieces["over_whole"]["median"] == 0.5
    assert columns(pieces)["pieces of"] == "64 KiB" and columns(whole)["pieces of"] == "whole"
    assert not DRAWS or len(picture([gloo, whole, pieces]).axes) == 2


@pytest.mark.short
def test_a_part_of_one_rank_is_the_whole_model() -> None:
    class Alone:
        def copy(self, x: torch.Tensor) -> torch.Tensor:
            return x

        reduce = copy

    shape = Shape(width=64, layers=2, context=8, batch=2)
    torch.manual_seed(0)
    model = TensorParallelGPT(shape, 1, Alone())
    tokens = torch.randint(256, (2, 9))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert 4 < loss.item() < 8 and all(each.grad is not None for each in model.parameters())
    assert shape.activation_bytes == 2 * 8 * 64 * 4


@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
@long(guarded_by="tests/benchmarks/test_tensor_parallel.py::test_a_part_of_one_rank_is_the_whole_model")
def test_a_small_run(tmp_path: Path) -> None:
    chosen = ("raw", "taco", "taco/1KiB", "tahquant")
    command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--rates", "1gbit", "--variants", ",".join(chosen)]
    options = [*SMALL, "--out", str(tmp_path), "--hardware", "test"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.glob("tensor-parallel-2x1_test_*.json")
    found = {row["variant"]: row for row in json.loads(result.read_text())["rows"]}
    assert list(found) == [BASELINE, *chosen] and found[BASELINE]["speedup"]["median"] == 1
    assert all(len(row["rounds"]) == 2 and 0 < turn["loss"] < 8 for row in found.values() for turn in row["rounds"])
    assert found["taco"]["sent"] < 0.5 * found["raw"]["sent"] and found["tahquant"]["sent"] < found["taco"]["sent"]
    assert "</svg>" in (tmp_path / "plots" / "tensor-parallel-2x1.svg").read_text()


@pytest.mark.short
def test_every_codec_of_a_full_run_is_known() -> None:
    assert {each.codec for each in variants()} - {BASELINE} <= set(fl.codecs.names())
