"""A program that knows only torch, and trains until something is done to it; `benchmarks.watching` runs it.

It trains by DDP on gloo, or on the backend "fusionlayer", and all-reduces its loss. At step `at` the rank `who` does
what the fault's name says. The only line that it owes to fusionlayer is `fl.watch()`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

__all__ = ["FAULTS"]

WIDTH = int(os.environ.get("WATCHED_WIDTH", "64"))


class Samples(Dataset[torch.Tensor]):
    """Random rows; one of them may be slow to read."""

    def __init__(self) -> None:
        self.slow = 0.0
        self.full_disk = False

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow:
            time.sleep(self.slow)
        if self.full_disk:
            with open("/dev/full", "w") as file:
                file.write("cache\n")
        return torch.full((WIDTH,), float(index % 7))


def slow_loader(job: Job) -> None:
    job.samples.slow = 60.0


def endless_compute(job: Job) -> None:
    while True:
        sum(range(10000))


def sleeps(job: Job) -> None:
    time.sleep(600)


def killed(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exits(job: Job) -> None:
    sys.exit(0)


def exits_hard(job: Job) -> None:
    os._exit(3)


def raises(job: Job) -> None:
    raise ValueError("the label 17 is out of range")


def out_of_memory(job: Job) -> None:
    torch.empty(1 << 60)


def full_disk(job: Job) -> None:
    job.samples.full_disk = True


def wrong_shape(job: Job) -> None:
    dist.all_reduce(torch.ones(WIDTH + 1))


def wrong_type(job: Job) -> None:
    dist.all_reduce(torch.ones(WIDTH, dtype=torch.float64))


def wrong_type_same_bytes(job: Job) -> None:
    dist.all_reduce(torch.ones(WIDTH, dtype=torch.int32))


def wrong_operation(job: Job) -> None:
    dist.broadcast(torch.ones(WIDTH), 0)


def wrong_order(job: Job) -> None:
    x = next(iter(job.model.parameters())).new_ones(WIDTH)
    dist.broadcast(x, 0)  # the others broadcast after their next step
    dist.all_reduce(x)


def extra_call(job: Job) -> None:
    dist.barrier()
    dist.all_reduce(torch.ones(WIDTH))


def branch(job: Job) -> None:
    """Skip the exchange, as under ``if loss < limit``: the rank goes on to the next step."""


def other_group(job: Job) -> None:
    dist.all_reduce(torch.ones(WIDTH), group=job.others)


def lock(job: Job) -> None:
    threading.Lock().acquire()
    forever = threading.Lock()
    forever.acquire()
    forever.acquire()


def checkpoint_hangs(job: Job) -> None:
    read, _ = os.pipe()
    os.read(read, 1)


def waits_for_nobody(job: Job) -> None:
    dist.recv(torch.ones(4), (dist.get_rank() + 1) % dist.get_world_size())


def backward_hangs(job: Job) -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: time.sleep(600))
    x.sum().backward()


def slow_interface(job: Job) -> None:
    """Let the link of this host carry a tenth; in the lab, whose links carry 1 Gbit/s."""
    shape = "tc qdisc replace dev eth0 root tbf rate 100mbit burst 64kb latency 400ms"
    subprocess.run(shape.split(), check=True)


FAULTS: dict[str, Callable[[Job], None]] = {
    each.__name__: each
    for each in (
        *(slow_loader, endless_compute, sleeps, killed, stopped, exits, exits_hard, raises, out_of_memory, full_disk),
        *(wrong_shape, wrong_type, wrong_type_same_bytes, wrong_operation, wrong_order, extra_call, branch),
        *(other_group, lock, checkpoint_hangs, waits_for_nobody, backward_hangs, slow_interface),
    )
}


# Faults that make another call, or none, in place of the step's exchange.
REPLACES = ("wrong_shape", "wrong_type", "wrong_type_same_bytes", "wrong_operation", "branch", "other_group")


class Job:
    """One rank."""

    def __init__(self) -> None:
        self.samples = Samples()
        self.model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
        self.others = dist.new_group(list(range(dist.get_world_size())))

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield batches for ever."""
        while True:
            yield from DataLoader(self.samples, batch_size=4)

    def run(self, fault: str, who: int, at: int, uneven: float, seconds: float) -> None:
        """Train until the fault, or for so many seconds."""
        optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        noise = torch.Generator().manual_seed(dist.get_rank())
        end = time.monotonic() + seconds
        batches = self.batches()
        for step in range(1 << 30):
            x = next(batches)
            loss = self.model(x).square().mean()
            loss.backward()
            if uneven:
                tail = 10.0 if torch.rand((), generator=noise) < 0.005 else 1.0
                time.sleep(uneven * tail * float(torch.rand((), generator=noise)))
            else:
                time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()
            if step == at:
                print(json.dumps({"fault": fault, "at": time.time()}), flush=True)
            if step == at and dist.get_rank() == who and fault in FAULTS:
                FAULTS[fault](self)
            if not (step == at and dist.get_rank() == who and fault in REPLACES):
                dist.all_reduce(torch.ones(WIDTH))
            if step % 10 == 0:
                over = torch.tensor(float(time.monotonic() > end))
                dist.all_reduce(over)
                if over:
                    return


def main() -> None:
    """Run one rank; the arguments are fault, rank, step, unevenness and seconds."""
    fault, who, at, uneven, seconds, backend, watched = sys.argv[1:8]
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    if watched == "1":
        import fusionlayer as fl

        fl.watch()
    began = time.monotonic()
    Job().run(fault, int(who), int(at), float(uneven), float(seconds))
    for thread in threading.enumerate():
        if thread.name == "fusionlayer watch" and thread.ident is not None:
            spent = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            print(json.dumps({"cost": spent / (time.monotonic() - began)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
