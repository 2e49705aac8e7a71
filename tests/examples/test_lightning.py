"""The program of docs/frameworks.md for Lightning, as a script that Lightning starts, where it is installed."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fusionlayer as fl
from tests.harness import run_ranks
from tests.integrations.training import make_batch, make_model, weights
from tests.pages import blocks
from tests.test_guides import check_losses
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
before = float(model.layers[0].weight[0, 0])
trainer.fit(model, DataLoader(torch.randn(256, 64, generator=torch.Generator().manual_seed(7)), batch_size=32))
weight = float(getattr(model.layers[0].weight, "full_tensor", lambda: model.layers[0].weight)()[0, 0])
assert weight != before and {check}
print(f"rank {{trainer.global_rank}} of 2: loss {{float(model.loss)}}, first weight {{weight:.8f}}", flush=True)
"""
SHARDED = """\
from torch.distributed.fsdp import fully_shard

class Sharded(Regression):
    def configure_model(self):
        if self.layers[0].weight.__class__ is torch.nn.Parameter:
            for part in (self.layers[0], self.layers[2], self.layers):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

model = Sharded()
"""
FITS = (
    "model = Regression()\n" + FIT.format(check='fl.backend.traffic().calls["all_reduce"] == 3'),
    SHARDED + FIT.format(check="trainer.strategy.compression.bytes_sent > 10_000"),
)
SMALL = {
    **{"accelerator": "cpu", "devices": 2, "max_steps": 3, "logger": False},
    **{"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
}


@exhaustive(
    guarded_by="tests/backend/test_differential.py::test_trainings_keep_their_bits_when_calls_pass_and_come_near_with_int8"
)
def test_a_script_that_lightning_starts(tmp_path: Path) -> None:
    for page, fit in zip(
        (code for code in blocks("frameworks.md", "python") if "lightning" in code), FITS, strict=True
    ):
        made, count = re.subn(r"\bTrainer\(", f"Trainer(**{SMALL}, ", page)
        assert count == 1
        (tmp_path / "train.py").write_text(MODEL + made + fit)
        check_losses(run(["python", "train.py"], tmp_path, OMP_NUM_THREADS="1"))


QUIET = {**SMALL, "devices": 1, "max_steps": -1}


def trained(rank: int, epochs: int, states: Path | None = None, resume: Path | None = None) -> tuple[Any, Any]:
    """Train with an optimizer of ours, which goes on from what ``fl.checkpoint.save_ranks`` has left in ``states``."""
    from lightning.pytorch import LightningModule, Trainer

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers: nn.Module = make_model()

        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            optimizer = fl.DistributedOptimizer(sgd, self, codec="int4", error_feedback=True)
            if states is not None:
                fl.checkpoint.load_ranks(states, optimizer=optimizer)
            return optimizer

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            x, y = batch
            return (self.layers(x) - y).square().mean()

    model, trainer = Regression(), Trainer(**QUIET, max_epochs=epochs)
    data: Any = [make_batch(rank, step) for step in range(3)]
    trainer.fit(model, DataLoader(data, batch_size=None), ckpt_path=resume)
    return model, trainer


def resume(rank: int, world: int, folder: Path) -> Tensor:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    fl.init()
    whole, trainer = trained(rank, 4)
    trainer.optimizers[0].close()
    _, trainer = trained(rank, 2)
    fl.checkpoint.save_ranks(folder / "ranks", optimizer=trainer.optimizers[0])
    if rank == 0:
        trainer.save_checkpoint(folder / "last.ckpt")
    trainer.optimizers[0].close()
    dist.barrier()
    again, trainer = trained(rank, 4, folder / "ranks", folder / "last.ckpt")
    trainer.optimizers[0].close()
    assert torch.equal(weights(whole), weights(again))
    if rank == 0:
        trained(rank, 2, resume=folder / "last.ckpt")
    else:
        with pytest.raises(fl.ConfigError, match="rank 0 of 2.*load_ranks"):
            trained(rank, 2, resume=folder / "last.ckpt")
    return weights(again)


@exhaustive(guarded_by="tests/integrations/test_resume.py::test_resumed_training_equals_uninterrupted_training")
def test_resumed_training_equals_training_that_did_not_stop(tmp_path: Path) -> None:
    """Rank 0's checkpoint of Lightning, and each rank's own error feedback; without the latter it is refused."""
    first, second = run_ranks(resume, 2, tmp_path)
    assert torch.equal(first, second)
