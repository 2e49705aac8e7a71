"""The benchmark of sharded steps: what it counts, its ratios, a small run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.sharded.__main__ import columns, picture, rows
from benchmarks.sharded.variants import BASELINE, VARIANTS, Part, counted, parts_of
from examples.gpt import GPT, Config
from fusionlayer import codecs
from tests.loops import looped
from tests.tiers import DRAWS, long

from .labs import ROOT, needs_namespaces

TINY = Config(width=64, layers=2, heads=2, context=16, tied=False)


@pytest.mark.short
def test_parts_are_those_that_fsdp_makes() -> None:
    blocks, rest = parts_of(TINY, 4)[:-1], parts_of(TINY, 4)[-1]
    with torch.device("meta"):
        model = GPT(TINY)
    elements = sum(p.numel() for p in model.parameters())
    assert 4 * sum(part.shard for part in (*blocks, rest)) == elements
    assert [part.gathers for part in (*blocks, rest)] == [2, 2, 1]


@pytest.mark.short
@looped("nodes, per_node", [(2, 2), (3, 4)])
def test_two_levels_send_a_node_s_message_once(nodes: int, per_node: int) -> None:
    """Between two nodes of two ranks: once the model's message, flat twice; gathered twice, half of it more."""
    size, parts = nodes * per_node, [Part(1 << 20, 2), Part(1 << 18, 2)]
    share = 2 * (nodes - 1) / nodes
    expected = {"sdp4bit": 1.0, "optimizer: sdp4bit": 1.0, "qwd + int4, flat": per_node, "optimizer: raw": per_node}
    for name, times in {**expected, "int4, flat": 1.5 * per_node, "raw": 1.5 * per_node}.items():
        leaving, whole = counted(VARIANTS[name], parts, nodes, per_node)
        assert leaving / whole == pytest.approx(share * times, rel=1e-3)
    ulq, qwz = codecs.get("ulq").bare, codecs.get("int8", group_size=2048).bare
    leaving, _ = counted(VARIANTS["zero++"], parts, nodes, per_node)
    bits = [8 * codec.wire(1 << 20).capacity / (1 << 20) for codec in (qwz, ulq)]
    elements = size * sum(part.shard for part in parts)
    assert leaving == pytest.approx((nodes - 1) / nodes * elements * (2 * bits[0] + bits[1]) / 8, rel=1e-3)


@pytest.mark.short
def test_ratios_are_of_the_same_round() -> None:
    seconds = {BASELINE: (4.0, 2.0, 3.0), "int4, flat": (2.0, 1.0, 1.5), "sdp4bit": (1.0, 0.5, 0.5)}
    measured = {
        name: [{"seconds": each, "sent": 1e6, "payload": 2e6, "loss": 5.0} for each in rounds]
        for name, rounds in seconds.items()
    }
    torch_s, flat, ours = rows(measured, TINY, 2, 2)
    assert torch_s["speedup"]["median"] == 1 and "counted" not in torch_s and columns(torch_s)["MB counted"] == ""
    assert flat["speedup"]["median"] == 2 and ours["speedup"]["median"] == 4 and ours["over_flat"]["median"] == 2
    assert columns(ours)["of the message, counted"] == "1.00" and columns(flat)["of the message, counted"] != "1.00"
    assert not DRAWS or len(picture([torch_s, flat, ours]).axes) == 2


@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
@long(guarded_by="tests/benchmarks/test_collective.py::test_workers_count_the_bytes_of_each_operation")
def test_a_small_run(tmp_path: Path) -> None:
    chosen = ("qwd + int4, flat", "sdp4bit", "optimizer: sdp4bit")
    command = [sys.executable, "-m", "benchmarks.sharded", "--rate", "1gbit", "--rounds", "1", "--busy-ok"]
    small = ("--width", "128", "--layers", "1", "--heads", "2", "--context", "16", "--batch", "1")
    options = [*small, "--variants", *chosen, "--out", str(tmp_path), "--hardware", "test"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.glob("sharded-2x2_test_*.json")
    found = {row["variant"]: row for row in json.loads(result.read_text())["rows"]}
    assert list(found) == [BASELINE, *chosen] and found[BASELINE]["speedup"]["median"] == 1
    for name in chosen:
        row = found[name]
        assert row["counted"] < row["sent"] < 1.25 * row["counted"], "frames and their headers"
        assert row["counted"] / row["message"] == pytest.approx(2.0 if "flat" in name else 1.0, rel=0.01)
        assert row["rounds"][0]["loss"] == pytest.approx(found[BASELINE]["rounds"][0]["loss"], abs=0.1)
    assert "</svg>" in (tmp_path / "plots" / "sharded-2x2.svg").read_text()
