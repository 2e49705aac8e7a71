"""Handwritten digits, in a script for Horovod: only the import is another one, and with --horovod not even that.

    torchrun --nproc-per-node 2 examples/hvd_digits.py
    horovodrun -np 2 python examples/hvd_digits.py --horovod

The digits are scikit-learn's, 8 x 8 pixels; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.data
import torch.utils.data.distributed
from sklearn.datasets import load_digits
from torch import Tensor, nn, optim

try:
    hvd: Any = importlib.import_module("horovod.torch" if "--horovod" in sys.argv else "fusionlayer.torch")
except ModuleNotFoundError as error:
    sys.exit(f"hvd_digits: {error.name} is not installed; install it, or leave --horovod out")


def parse_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--horovod", action="store_true", help="import horovod.torch instead of fusionlayer.torch")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="images per worker (default 32)")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="(default 5)")
    parser.add_argument("--lr", type=float, default=0.05, help="for one worker (default 0.05)")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD (default 0.9)")
    parser.add_argument("--seed", type=int, default=42, help="of weights and order (default 42)")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as f16")
    parser.add_argument("--use-adasum", action="store_true", help="add gradients by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0, help="divide so much before the sum")
    parser.add_argument("--batches-per-allreduce", type=int, default=1, help="passes before each reduction (default 1)")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="batches (default 10)")
    options = parser.parse_args()
    for name in ("batch_size", "epochs", "batches_per_allreduce", "log_interval"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}; expected a whole number above 0")
    return options


class Net(nn.Module):
    """Two convolutions and two linear layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(64, 48)
        self.fc2 = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities (n, 10) of images (n, 1, 8, 8)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits() -> tuple[torch.utils.data.Dataset[Any], torch.utils.data.Dataset[Any]]:
    """Return images and labels to train with, 1437, and to test with, 360."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)
    whole = torch.utils.data.TensorDataset(images, labels)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1)).tolist()
    return torch.utils.data.Subset(whole, order[360:]), torch.utils.data.Subset(whole, order[:360])


def metric_average(value: float, name: str) -> float:
    """Return the mean over workers."""
    mean: float = hvd.allreduce(torch.tensor(value), name=name).item()
    return mean


def main() -> None:
    """Train, and print the loss and the accuracy of each epoch."""
    options = parse_options()
    hvd.init()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if cuda else "cpu")

    train_set, test_set = digits()
    train_sampler: Any = torch.utils.data.distributed.DistributedSampler(
        train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed
    )
    batch = options.batch_size * options.batches_per_allreduce
    train_loader: Any = torch.utils.data.DataLoader(train_set, batch_size=batch, sampler=train_sampler)
    test_sampler: Any = torch.utils.data.distributed.DistributedSampler(
        test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    test_loader: Any = torch.utils.data.DataLoader(test_set, batch_size=180, sampler=test_sampler)

    model = Net().to(device)
    # Adasum takes the learning rate of one worker: it adds up only what gradients do not have in common.
    scale = options.batches_per_allreduce * (1 if options.use_adasum else hvd.size())
    optimizer: Any = optim.SGD(model.parameters(), lr=options.lr * scale, momentum=options.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=options.batches_per_allreduce,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
        gradient_predivide_factor=options.gradient_predivide_factor,
    )

    for epoch in range(1, options.epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for index, (images, labels) in enumerate(train_loader):
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            parts = list(zip(images.split(options.batch_size), labels.split(options.batch_size), strict=True))
            loss = torch.zeros((), device=device)
            # A last batch may make fewer parts than the optimizer counts on; empty ones add nothing.
            parts += [(images[:0], labels[:0])] * (options.batches_per_allreduce - len(parts))
            for some, theirs in parts:
                part = F.nll_loss(model(some), theirs, reduction="sum") / len(labels)
                part.backward()
                loss += part.detach()
            optimizer.step()
            if index % options.log_interval == 0 and hvd.rank() == 0:
                done = index * options.batch_size * options.batches_per_allreduce
                print(f"epoch {epoch}  [{done}/{len(train_sampler)}]  loss {loss.item():.6f}", flush=True)
        model.eval()
        loss_sum, right = 0.0, 0.0
        with torch.no_grad():
            for images, labels in test_loader:
                output = model(images.to(device))
                loss_sum += F.nll_loss(output, labels.to(device), reduction="sum").item()
                right += (output.argmax(1).cpu() == labels).float().sum().item()
        mean_loss = metric_average(loss_sum / len(test_sampler), "avg_loss")
        accuracy = metric_average(right / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"test after epoch {epoch}  loss {mean_loss:.6f}  accuracy {accuracy:.2%}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
