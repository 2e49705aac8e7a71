"""The example of DeepSpeed, under both launchers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import engine, long, needs

from .places import EXAMPLES
from .test_examples import of_page

pytestmark = [pytest.mark.medium, engine, needs("deepspeed")]

SMALL = ("--width", "64", "--layers", "2")


def run(*command: str) -> str:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@long(guarded_by="tests/integrations/test_deepspeed.py::test_gradients_travel_compressed_after_the_warm_up")
def test_torchrun(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    assert of_page("deepspeed.md", "train_deepspeed.py") == [(2, [])]
    output = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(EXAMPLES / "train_deepspeed.py"), "--steps", "3", "--json", str(result), *SMALL),
    )
    assert re.findall(r"^step (\d)/3 ", output, re.MULTILINE) == ["1", "2", "3"]
    found = json.loads(result.read_text())
    assert (found["zero_stage"], found["workers"], found["steps"]) == (2, 2, 3)
    assert 3 < found["validation_loss"] < 6
    assert found["bytes_per_step"] > found["parameters"] / 2, "gradients alone take more"
