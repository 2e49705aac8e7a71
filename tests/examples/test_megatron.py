"""The example of Megatron-Core, under torchrun."""

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
@exhaustive(guarded_by="tests/integrations/test_megatron.py::test_buckets_over_the_backend")
def test_the_command_for_four_ranks(tmp_path: Path) -> None:
    """Those for two are run in tests/integrations."""
    (ranks, arguments), *others = of_page("megatron.md", "train_megatron.py")
    assert ranks == 4 and {ranks for ranks, _ in others} == {2}
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
    assert "Warning" not in done.stderr, done.stderr
    found = json.loads(result.read_text())
    assert found["replicas_agree"] and found["train_loss"] < found["first_loss"]
    assert found["compressed_bytes_per_step"].keys() == {"activations", "weights and gradients"}
    assert f"digest            {found['digest']} of all losses and weights" in done.stdout
