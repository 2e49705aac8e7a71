"""The stages of `make gpu` where there is no GPU: what they say, how they end, and that their tests work at all."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import stages, test_codec_gpu, trainers
from tests.gpu.conftest import LOG
from tests.gpu.stages import LACKS, SELECTIONS, STAGES, Run, Stage
from tests.harness import run_ranks
from tests.loops import looped
from tests.tiers import long


@looped("name", [*STAGES, *SELECTIONS])
def test_without_a_gpu_a_stage_says_what_it_lacks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(stages, "_run", lambda *_: pytest.fail("something was run"))
    assert stages.main([name, "--out", str(tmp_path)]) == LACKS
    _, about, *lacks = capsys.readouterr().out.splitlines()  # after the name of the case
    assert about == f"gpu-{name}: {(STAGES | SELECTIONS)[name].about}"
    assert f"gpu-{name}: not run: it lacks a CUDA device, which torch does not see" in lacks
    assert all(line.startswith(f"gpu-{name}: not run: it lacks ") for line in lacks)


SCRIPT = """
import json, os, sys, time
with open(os.environ["GPU_TESTS_LOG"], "a") as log:
    for outcome in sys.argv[3:]:
        trace = {"trace": "what went wrong"} if outcome == "failed" else {}
        log.write(json.dumps({"test": "t", "outcome": outcome, "seconds": 0.1, **trace}) + "\\n")
time.sleep(60 * (sys.argv[2] == "hangs"))
sys.exit({"fails": 1, "crashes": 9}.get(sys.argv[2], 0))
"""


class Overdue(subprocess.Popen[bytes]):
    """A program whose time is over as soon as it has written down a test."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None or self.log is None:
            return super().wait(timeout)
        deadline = time.monotonic() + 180
        while not (self.log.exists() and self.log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(self.args, timeout)

    def __init__(self, words: list[str], **how: Any) -> None:
        log = (how.get("env") or {}).get(LOG)
        self.log = None if log is None else Path(log)
        super().__init__(words, **how)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("how", "outcomes", "status", "told"),
    [
        ("ends", ("passed", "skipped"), 0, "passed"),
        ("fails", ("passed", "failed"), 1, "failed, status 1"),
        ("hangs", ("passed",), 1, "failed: ended after 265 s"),
        ("ends", ("passed", "not run"), LACKS, "not run: some tests, for which no time was left"),
        ("ends", (), 1, "failed: no test has run"),
    ],
)
def test_a_stage_leaves_a_result_however_its_programs_end(
    how: str, outcomes: tuple[str, ...], status: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of tests that had run before the stage's time was over."""
    run = Run("some tests", ("python", "-c", SCRIPT, "pytest", how, *outcomes))
    monkeypatch.setitem(stages.STAGES, "bytes", Stage("a try", (), (run, run)))
    if how == "hangs":
        monkeypatch.setattr(stages.subprocess, "Popen", Overdue)
    here = stages.Environment.here
    monkeypatch.setattr(stages.Environment, "here", lambda device, hardware: here(torch.device("cpu"), hardware))
    assert stages.main(["bytes", "--out", str(tmp_path)]) == status
    (result,) = tmp_path.glob("gpu-bytes_*.json")
    first = json.loads(result.read_text())["rows"][0]
    assert first["status"] == told and len(first["tests"]) == len(outcomes)
    assert all(first[outcome] == outcomes.count(outcome) for outcome in ("passed", "failed", "skipped", "not run"))


def test_the_short_tier_has_every_option_of_every_kernel_with_every_type() -> None:
    """But for the widths of groups, blocks and chunks, of which it has each with f32."""
    (cases,) = (mark.args[1] for mark in test_codec_gpu.test_ragged_lengths.pytestmark if mark.name == "parametrize")
    fast = {case.values for case in cases if not case.marks}

    def options(codec: test_codec_gpu.Codec, dtype: torch.dtype) -> set[tuple[object, ...]]:
        return {(codec.name, *option, dtype) for option in codec.options.items()}

    every = set().union(*(options(*case.values) for case in cases))
    have = set().union(*(options(*case) for case in fast))
    assert {missing[1] for missing in every - have} <= {"group_size", "block_size", "chunk"}
    assert not [missing for missing in every - have if missing[-1] is torch.float32]
    assert {*test_codec_gpu.FEW} < {*test_codec_gpu.PLAIN} <= {*test_codec_gpu.TYPICAL} and len(fast) < 430


@pytest.mark.medium
def test_a_trainer_that_nccl_is_compared_by() -> None:
    first, second = run_ranks(trainers.optimizer, 2, "cpu", {"codec": "int8", "planner": "wfbp"})
    assert first == second != trainers.numbers(trainers.model_on(torch.device("cpu")).parameters())


FIRST = "test_probe or (test_nccl and not lean_on and not raw) or sums_of_codes or one_rank_alone or two_levels"
REST = "trainers_have and not (raw or int8 or zip or sharded or horovod)"


@pytest.mark.medium
@pytest.mark.timeout(600)
@long(guarded_by="tests/packaging/test_gpu_stages.py::test_a_trainer_that_nccl_is_compared_by")
@pytest.mark.parametrize(("name", "words", "status"), [("first", FIRST, 0), ("second", REST, LACKS)])
def test_a_rehearsal_on_the_cpu(name: str, words: str, status: int, tmp_path: Path) -> None:
    """All bodies of the tests over NCCL run over gloo, and kernels of the CPU are compared with themselves."""
    assert stages.main([name, "--rehearse", "--out", str(tmp_path), "-k", words, "--seconds", "560"]) == status
    (result,) = tmp_path.glob(f"gpu-{name}_*.json")
    told = json.loads(result.read_text())
    assert "rehearsed on the CPU" in told["title"]
    for row, run in zip(told["rows"], SELECTIONS[name].runs, strict=True):
        assert row["status"] == ("passed" if run.has_rehearsal else "not run: it needs a device or its tools"), row
    assert os.environ.get("GPU_TESTS_ON") is None
