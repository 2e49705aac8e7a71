"""The scripts that are written to Horovod's API, on fusionlayer; the losses beside those of one process."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.tiers import exhaustive

from .forked import torchrun
from .test_examples import of_page


def told(output: str) -> list[float]:
    """Return the numbers that an example has printed as losses."""
    return [float(loss) for loss in re.findall(r"loss (\S+)", output)]


def losses_in_one_process(module: Any, epochs: int) -> list[float]:
    """Return rank 0's loss of every batch of two ranks, and the test loss of each epoch."""
    torch.manual_seed(42)
    model = module.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=2 * 0.05, momentum=0.9)
    train_set, test_set = module.digits()
    samplers: list[Any] = [DistributedSampler(train_set, num_replicas=2, rank=rank, seed=42) for rank in range(2)]
    losses = []
    for epoch in range(1, epochs + 1):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(train_set, batch_size=32, sampler=sampler) for sampler in samplers]
        for batches in zip(*loaders, strict=True):
            optimizer.zero_grad()
            each = [F.nll_loss(model(images), labels) for images, labels in batches]
            (sum(each) / 2).backward()
            optimizer.step()
            losses.append(each[0].item())
        images, labels = zip(*test_set, strict=True)
        with torch.no_grad():
            losses.append(F.nll_loss(model(torch.stack(images)), torch.stack(labels)).item())
    return losses


@pytest.mark.medium
@exhaustive(guarded_by="tests/torch/test_behaviours.py::test_behaviour")
def test_digits_has_the_losses_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import hvd_digits

    ((workers, options),) = of_page("horovod.md", "hvd_digits.py")
    output = torchrun(workers, "hvd_digits.py", *options, "--log-interval", "1")
    losses, expected = told(output), losses_in_one_process(hvd_digits, 2)
    assert len(losses) == len(expected) == 2 * 24
    assert losses == pytest.approx(expected, abs=2e-4)
    assert losses[-1] < 0.5 * losses[0]
    accuracy = [float(percent) for percent in re.findall(r"accuracy (\S+)%", output)]
    assert len(accuracy) == 2 and accuracy[1] > 70
