"""What the ranks of tests/transport/test_mpi.py do: ``python -m mpi4py -m tests.transport.mpi_worker NAME``."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
import torch
from mpi4py import MPI

import fusionlayer as fl
from fusionlayer import context
from fusionlayer.base.errors import ConfigError, TransportError
from fusionlayer.transport.composed import by_rank
from fusionlayer.transport.mpi import MpiTransport
from tests.transport.conformance import all_gather_and_all_to_all, conform

WORLD = MPI.COMM_WORLD


def some_of_the_ranks() -> None:
    world = MpiTransport(timeout=120)
    ranks = [WORLD.size - 1, 0]
    if WORLD.rank in ranks:
        part = world.subset(ranks)
        assert (part.rank, part.size) == (ranks.index(WORLD.rank), 2)
        all_gather_and_all_to_all(part)
        twin = part.duplicate()
        part.close()
        all_gather_and_all_to_all(twin)
        twin.close()
    else:
        with pytest.raises(ConfigError, match="subset .* on rank"):
            world.subset(ranks)
    world.barrier()
    world.close()


def conformance() -> None:
    """All sizes up to that of the world: the world itself, and its halves at the same time."""
    torch.set_num_threads(1)
    with closing(MpiTransport(timeout=120)) as transport:
        conform(transport)
    some_of_the_ranks()
    for first in range((WORLD.size + 1) // 2):
        part = WORLD.Split(WORLD.rank <= first)
        with closing(MpiTransport(part, timeout=120)) as transport:
            conform(transport)
        part.Free()
    print(f"rank {WORLD.rank} conforms", flush=True)


def job() -> None:
    """A training job by ``fl.init``, without a process group of torch."""
    fl.init()
    assert not torch.distributed.is_initialized()
    assert isinstance(context.transport(), MpiTransport) and context.transport().timeout == 40
    torch.manual_seed(fl.rank())
    model = torch.nn.Sequential(torch.nn.Linear(300, 50), torch.nn.Linear(50, 2))
    optimizer = fl.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), codec="int8", planner="wfbp"
    )
    fl.broadcast_parameters(model.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
    assert fl.all_gather(model[0].weight.detach().flatten()[None], "raw").unique(dim=0).shape[0] == 1
    optimizer.close()
    place = f"{fl.rank()} {fl.size()} {fl.local_rank()} {fl.local_size()}"
    fl.shutdown()
    fl.init()
    assert fl.all_reduce(torch.tensor([1.0]), op=fl.Sum).item() == fl.size()
    fl.shutdown()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "3"
    with pytest.raises(fl.ConfigError, match="transport 'mpi' sees 2 processes, the variables of torchrun say 3"):
        fl.init()
    print(place, flush=True)


def exchange(transport: MpiTransport, n: int) -> None:
    sends = [torch.zeros(n, dtype=torch.uint8) for _ in range(transport.size)]
    transport.exchange(by_rank(sends, [torch.empty(n, dtype=torch.uint8) for _ in range(transport.size)]))


def failures() -> None:
    """What goes wrong on three ranks, each on a transport of its own."""
    transport = MpiTransport(timeout=120)
    with pytest.raises(TransportError, match="rank . sends 10[01] bytes .*, which expects 10[01]") as caught:
        exchange(transport, 101 if WORLD.rank == 2 else 100)
    assert 2 in caught.value.ranks
    with pytest.raises(TransportError, match="sends 10[01] bytes"):
        transport.barrier()

    # Closing waits for nobody, and is told to those who wait for it.
    transport = MpiTransport(timeout=60)
    transport.barrier()
    if WORLD.rank == 0:
        transport.close()
        WORLD.Barrier()
    else:
        WORLD.Barrier()
        with pytest.raises(TransportError, match="rank 0 closed its transport after collective 1"):
            transport.barrier()

    WORLD.Barrier()
    if WORLD.rank != 1:
        with pytest.raises(TransportError, match=r"ranks \[1\] did not come within 1 s") as caught:
            MpiTransport(timeout=1)
        assert caught.value.ranks == (1,)
    WORLD.Barrier()
    if WORLD.rank == 1:
        with pytest.raises(TransportError, match="ranks .1. did not come"):
            MpiTransport(timeout=10)

    WORLD.Barrier()
    transport = MpiTransport(timeout=8)
    transport.barrier()
    if WORLD.rank == 1:
        resume = subprocess.Popen(["sh", "-c", f"sleep 14; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        resume.wait()
    used = time.thread_time()
    with pytest.raises(TransportError) as caught:
        while True:  # the others' messages of their last call have reached the rank that was stopped
            transport.barrier()
    if WORLD.rank != 1:  # which may see that the others have failed before they know why
        assert "rank 1 is stopped" in str(caught.value) or "rank 1 is alive but late" in str(caught.value)
        assert caught.value.ranks == (1,)
    share = (time.thread_time() - used) / 8
    print(f"rank {WORLD.rank} knows; waiting took {share:.0%} of a core", flush=True)


def killed() -> None:
    transport = MpiTransport(timeout=120)
    transport.barrier()
    if WORLD.rank == 1:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(TransportError, match="rank 1 is gone") as caught:
        while True:
            exchange(transport, 1 << 20)
    print(f"rank {WORLD.rank} blames {caught.value.ranks}", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
