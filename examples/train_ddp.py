"""One line more in a DDP script: fusionlayer as its communication hook.

torchrun --nproc-per-node 2 examples/train_ddp.py [CODEC]
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusionlayer as fl


def main(codec: str = "int8", steps: int = 100) -> None:
    """Fit a small network to a smooth function of eight numbers; each rank draws data of its own."""
    fl.init()
    if fl.size() == 1:
        sys.exit("train_ddp: DDP needs several processes; use torchrun --nproc-per-node 2")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    model = DistributedDataParallel(network)
    fl.ddp.register(model, codec=codec)  # the line
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    data = torch.Generator().manual_seed(fl.rank() + 1)
    for step in range(steps + 1):
        inputs = torch.randn(64, 8, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            mean = fl.all_reduce(loss.detach())
            if fl.rank() == 0:
                print(f"step {step}  loss {mean:.4f}")
    fl.shutdown()


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "int8")
    except fl.FusionLayerError as error:
        sys.exit(f"train_ddp: {error}")
