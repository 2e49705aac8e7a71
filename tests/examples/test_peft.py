"""The program of docs/frameworks.md for PEFT, as a script of two processes, where it is installed. Last run: 0.21.2."""

from pathlib import Path

import pytest

from tests.pages import blocks
from tests.test_guides import check_losses
from tests.tiers import engine, long, needs

from .test_start import run

pytestmark = [pytest.mark.medium, engine, needs("peft")]

MODEL = """\
import torch

import fusionlayer as fl

fl.init()
torch.manual_seed(fl.rank())
model = torch.nn.Sequential()
model.add_module("first", torch.nn.Linear(64, 128))
model.add_module("last", torch.nn.Linear(128, 64))
"""
FIT = """\
frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
x = torch.randn(32, 64, generator=torch.Generator().manual_seed(7 + fl.rank()))
for _ in range(5):
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
after = dict(model.named_parameters())
assert frozen and all(torch.equal(p, after[name]) for name, p in frozen.items())
total = float(sum(p.detach().double().sum() for p in model.parameters()))
print(f"rank {fl.rank()} of {fl.size()}: loss {float(loss)}, first weight {total % 1:.8f}", flush=True)
"""


@long(
    guarded_by="tests/backend/test_differential.py::test_trainings_keep_their_bits_when_calls_pass_and_come_near_with_int8"
)
def test_adapters_train_alike_and_the_rest_is_that_of_rank_0(tmp_path: Path) -> None:
    (page,) = (code for code in blocks("frameworks.md", "python") if "peft" in code)
    (tmp_path / "train.py").write_text(MODEL + page + FIT)
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
    check_losses(run(command, tmp_path, OMP_NUM_THREADS="1"))
