"""What the command line says of profiles and timelines of a device, on a machine that has none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusionlayer.cli import main
from fusionlayer.planning.cost_model import AlphaBeta
from fusionlayer.planning.profile import Machine, Profile
from tests.cli.test_trace import whole_steps
from tests.planning.profiles import write_example


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The example as if a GPU had computed, and gloo had sent its messages."""
    path = write_example(tmp_path)
    profile = Profile.from_yaml(path)
    staged = replace(profile, machine=Machine(16, 1, device="cuda"), staging=AlphaBeta(1e-5, 4e-11))
    staged.to_yaml(path)
    assert Profile.from_yaml(path) == staged
    return path


def test_a_gpu_that_is_not_there_is_told_of_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["profile", "--device", "cuda"]) == 2
    assert (
        capsys.readouterr().err == "fusionlayer profile: --device cuda, and torch sees no CUDA device; leave it out\n"
    )


def test_simulate_has_a_device_in_place_of_cores(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", str(path), "--workers", "2", "--rate", "1gbit", "--codec", "int4"]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert told.startswith("example: 1gbit, latency 200 us, a device\n") and "one communicates." in told
    assert main([*arguments, "--cores", "2"]) == 2
    assert capsys.readouterr().err == "fusionlayer simulate: --cores 2 with a profile of cuda; leave it out\n"
    assert main([*arguments, "--json"]) == 0
    staged = json.loads(capsys.readouterr().out)["steps"][-1]
    replace(Profile.from_yaml(path), staging=None).to_yaml(path)
    assert main([*arguments, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["steps"][-1]
    assert staged["communication_seconds"] > plain["communication_seconds"], "copies to the host and back"
    assert staged["bytes_per_step"] == plain["bytes_per_step"]


def test_trace_says_whose_times_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
        {"name": "device", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "cuda:0"}},
        {"name": "clock", "ph": "M", "pid": 0, "tid": 0, "args": {"offset_us": 0.0, "error_us": 0.0, "ranks": 2}},
    ]
    (tmp_path / "trace.0").write_text(json.dumps([*about, *whole_steps(6)]))
    assert main(["trace", str(tmp_path / "trace")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Times are those of cuda:0, and not of the host, which runs ahead." in told
