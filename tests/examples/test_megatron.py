"""The example of Megatron-Core, under torchrun."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import fusionlayer as fl
from tests.loops import looped
from tests.tiers import engine, long, needs

from .places import EXAMPLES
from .test_examples import of_page

SMALL = ("--width", "64", "--layers", "1", "--context", "32", "--batch-size", "8", "--steps", "4")


@looped(
    "given, complaint",
    [
        ({}, "Megatron-Core is missing .*; pip install 'fusionlayer\\[megatron\\]'"),
        ({"tensor_parallel": 3}, "--tensor-parallel 3 does not divide 2 processes and 4 heads"),
        ({"experts": 3}, "2 ranks do not share --experts 3, or --tensor-parallel is above 1"),
    ],
)
def test_mistakes_are_told(given: dict[str, int], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "megatron", None)
    import train_megatron

    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    with pytest.raises(fl.ConfigError, match=complaint):
        train_megatron.start(
            Namespace(**{"tensor_parallel": 1, "heads": 4, "experts": None, "expert_parallel": None, **given})
        )


@needs("megatron")
@engine
@pytest.mark.medium
@long(guarded_by="tests/integrations/test_megatron.py::test_buckets_over_the_backend")
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
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    found = json.loads(result.read_text())
    assert found["replicas_agree"] and found["train_loss"] < found["first_loss"]
    assert found["compressed_bytes_per_step"].keys() == {"activations", "weights and gradients"}
    assert f"digest            {found['digest']} of all losses and weights" in done.stdout
