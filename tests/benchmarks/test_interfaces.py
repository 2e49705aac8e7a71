"""The benchmark of interfaces that go down: its arithmetic, and a run of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import interfaces
from benchmarks.lab import Flap, Network
from tests.examples.places import needs_namespaces
from tests.tiers import DRAWS, long

NETWORK = Network(2, interfaces=("8mbit", "16mbit"))


@pytest.mark.short
def test_each_phase_is_held_to_the_rates_of_what_is_up() -> None:
    """eth0 sends 1 MB/s, eth1 2 MB/s but for three seconds."""
    sent = [[second, 1e6 * second, 2e6 * (min(second, 3) + max(0, second - 6))] for second in range(10)]
    calls = [[0.0, 1.0], [1.0, 4.5], [4.5, 5.0], [7.0, 8.0]]
    found = {"samples": sent, "calls": calls, "equal": True}
    before, down, after = interfaces.phases(found, NETWORK, Flap(1, "eth1", 3.0, 6.0), 9.0)
    assert [row["eth1, Mbit/s"] for row in (before, down, after)] == [16.0, 0.0, 16.0]
    assert [row["of the rates"] for row in (before, down, after)] == ["100.0%"] * 3
    assert [row["longest call, s"] for row in (before, down, after)] == [3.5, 0.5, 1.0]
    assert [row["calls"] for row in (before, down, after)] == [2, 1, 1]


@pytest.mark.short
def test_an_interface_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["interfaces", "--down", "eth2"])
    with pytest.raises(SystemExit):
        interfaces.main()
    assert "these hosts have eth0, eth1" in capsys.readouterr().err


@long(guarded_by="tests/transport/test_sockets.py::test_what_was_sent_before_a_cut_is_sent_again_between_calls")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_results_stay_equal_while_an_interface_is_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["interfaces", "--smoke", "--out", str(tmp_path)])
    assert interfaces.main() == 0
    (path,) = tmp_path.glob("interfaces_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["phase"] for row in rows] == ["both up", "eth1 down", "both up again"]
    assert all(row["bits equal"] for row in rows)
    assert any(row["calls"] for row in rows)  # which phase they fall into depends on how busy the machine is
    assert (tmp_path / "plots" / "interfaces.svg").exists() == DRAWS
    assert "node1: eth1 is down" in capfd.readouterr().err


@long(guarded_by="tests/transport/test_sockets.py::test_what_was_sent_before_a_cut_is_sent_again_between_calls")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_a_call_that_is_under_way_when_an_interface_goes_down_ends_before_it_is_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the kernel has sent nothing by it since: then it counts no retransmission, only probes."""
    long = ["--phase", "8", "--megabytes", "8", "--busy-ok", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["interfaces", *long])
    assert interfaces.main() == 0
    (path,) = tmp_path.glob("interfaces_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert all(row["bits equal"] for row in rows)
    assert rows[1]["calls"] > 1  # two have begun while it was down, so one has ended meanwhile
