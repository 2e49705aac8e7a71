"""The example of Megatron-Core, as its page starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import exhaustive, needs

from .places import EXAMPLES
from .test_examples import of_page

SMALL = ("--width", "64", "--layers", "1", "--context", "32", "--batch-size", "8", "--steps", "4")


@needs("megatron")
@pytest.mark.medium
@pytest.mark.timeout(240)
@exhaustive(guarded_by="tests/integrations/test_megatron.py::test_lossless_codecs_change_no_bit")
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    commands = of_page("megatron.md", "train_megatron.py")
    assert len(commands) == 3
    for ranks, arguments in commands:
        result = tmp_path / "result.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
                *(str(EXAMPLES / "train_megatron.py"), *arguments, *SMALL, "--json", str(result)),
            ],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(result.read_text())
        assert found["replicas_agree"] and found["train_loss"] < found["first_loss"]
        expected = {"weights and gradients"}
        expected |= {"activations"} if "--tensor-parallel" in arguments else set()
        expected |= {"tokens"} if "--experts" in arguments else set()
        assert set(found["compressed_bytes_per_step"]) == expected
