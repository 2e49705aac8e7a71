"""The program of docs/frameworks.md for Lightning, as a script that Lightning starts, where it is installed.

Last run: Lightning 2.6.6.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_guides import blocks, check_losses
from tests.tiers import engine, exhaustive, needs

from .test_start import run

pytestmark = [pytest.mark.medium, engine, needs("lightning")]

MODEL = """\
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, x, number):
        self.loss = (self.layers(x) - x).square().mean()
        return self.loss
"""
FIT = """\
model = Regression()
before = float(model.layers[0].weight[0, 0])
trainer.fit(model, DataLoader(torch.randn(256, 64, generator=torch.Generator().manual_seed(7)), batch_size=32))
weight = float(model.layers[0].weight[0, 0])
assert weight != before and fl.backend.traffic().calls["all_reduce"] == 3, fl.backend.traffic()
print(f"rank {trainer.global_rank} of 2: loss {float(model.loss)}, first weight {weight:.8f}", flush=True)
"""
SMALL = {
    **{"accelerator": "cpu", "devices": 2, "max_steps": 3, "logger": False},
    **{"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
}


@exhaustive(
    guarded_by="tests/backend/test_workloads.py::test_trainings_keep_their_bits_when_calls_pass_and_come_near_with_int8"
)
def test_a_script_that_lightning_starts(tmp_path: Path) -> None:
    (page,) = (code for code in blocks("frameworks.md", "python") if "lightning" in code)
    made, count = re.subn(r"\bTrainer\(", f"Trainer(**{SMALL}, ", page)
    assert count == 1
    (tmp_path / "train.py").write_text(MODEL + made + FIT)
    check_losses(run(["python", "train.py"], tmp_path, OMP_NUM_THREADS="1"))
