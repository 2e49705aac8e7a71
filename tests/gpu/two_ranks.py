"""What two ranks do over NCCL and must do over gloo to the same bits: the bodies of ``test_nccl.py``.

Each is called as ``body(rank, world, device, ...)`` in a process of its own and returns numbers to compare. With
``device`` "cpu" it runs over gloo, in the fast and exhaustive tiers too, so that all of it is known to work before
there is a GPU.

NCCL refuses two ranks that share a device, unless it takes them for two hosts: it tells hosts by ``NCCL_HOSTID``. Then
messages go through sockets of the loopback, which is slow, and enough to see that sums, orders and failures are right.
"""

import os
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import fusionlayer as fl
from fusionlayer import codecs, collectives
from fusionlayer.transport import C10dTransport, c10d
from fusionlayer.transport.composed import by_rank
from fusionlayer.transport.links.peer import PeerLink
from tests.gpu.place import PATIENCE, TensorsOn
from tests.harness import checkpoint
from tests.synthetic import gradient
from tests.transport import conformance

NCCL = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # from 2.30 on
    # Two communicators whose operations two threads launch at once are an error, not a rare hang.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    "NCCL_LAUNCH_RACE_FATAL": "1",
}
TIMEOUT = 5.0


def place(rank: int, device: str, timeout: float = PATIENCE / 2) -> torch.device:
    """Return the device of this rank, which both share; NCCL has not looked at its variables before."""
    os.environ["FUSIONLAYER_TIMEOUT"] = str(timeout)
    if device == "cpu":
        return torch.device("cpu")
    os.environ.update(NCCL, NCCL_HOSTID=f"rank-{rank}", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what this thread has asked for. It looks again and again: a wait inside CUDA would
    hold up the thread that aborts an operation which never ends."""
    if device.type == "cuda":
        done = torch.cuda.current_stream(device).record_event()
        while not done.query():
            time.sleep(0.001)


# ---- the transport --------------------------------------------------------------------------------------------------


def meet(rank: int, world: int, device: str) -> list[float]:
    """Sum by torch alone: if this fails, this machine cannot run two ranks on one device, whatever we do."""
    x = torch.full((1000,), rank + 1.0, device=place(rank, device))
    dist.all_reduce(x)
    return x[:3].tolist()


def connect(on: torch.device, timeout: float, peers: bool) -> C10dTransport:
    """Return a transport whose messages travel by peer memory, if ``peers`` and the device has such a thing."""
    with mock.patch.object(c10d, "is_faster", lambda *_: True):  # whatever is measured
        transport = C10dTransport(timeout=timeout, peer_bytes=(1 << 20) * peers)
    assert on.type == "cpu" or isinstance(transport._links.get("cuda"), PeerLink) == peers
    return transport


def conform(rank: int, world: int, device: str, peers: bool) -> None:
    """What every transport must do, with tensors on the device."""
    on = place(rank, device)
    transport = connect(on, 30.0, peers)
    with TensorsOn(on):
        conformance.conform(transport)
    transport.close()


def in_parts(rank: int, world: int, device: str, peers: bool) -> list[float]:
    """Subsets in another order and of one rank alone, a duplicate, and messages both ways at once."""
    on = place(rank, device)
    transport = connect(on, 30.0, peers)
    turned, alone, twin = transport.subset([1, 0]), transport.subset([rank]), transport.duplicate()
    assert (turned.rank, turned.size, alone.size) == (1 - rank, 2, 1)
    kept = []
    for number, each in enumerate((turned, alone, twin, transport)):
        x = gradient(5000, 10 * number + rank).to(on)
        each.all_reduce(x)
        kept.append(x)
    sends = [gradient(1000 * (1 + peer), 50 + rank).to(on).view(torch.uint8) for peer in range(2)]
    recvs = [torch.empty(4000 * (1 + rank), dtype=torch.uint8, device=on) for _ in range(2)]
    turned.exchange(by_rank(sends[::-1], recvs[::-1]))
    kept += [each.view(torch.float32) for each in recvs]
    for sender in (0, 1):
        x = gradient(300, 60 + sender).to(on) if rank == sender else torch.empty(300, device=on)
        twin.send(x, 1 - rank, tag=5) if rank == sender else twin.recv(x, sender, tag=5)
        kept.append(x)
    for each in (turned, alone, twin, transport):
        each.close()
    return torch.cat(kept).tolist()


def in_one_launch(rank: int, world: int, device: str) -> list[float]:
    """Sums whose kernels write into each other's memory, several in a row. Over gloo they travel as messages.

    The transport measures whether messages travel by peer memory, too.
    """
    on = place(rank, device)
    transport = C10dTransport(timeout=30.0, peer_bytes=8 << 20)
    kept = []
    for number, (name, numel) in enumerate((("int4", 5_000_001), ("tlq_hs", 100), ("int8", 70_000), ("taco", 300_000))):
        x, residual = gradient(numel, 10 * number + rank).to(on), torch.zeros(numel, device=on) if number < 2 else None
        collectives.get("two_shot")(x, codecs.get(name).bare, transport, seed=number, residual=residual)
        kept.append(x if residual is None else torch.cat([x, residual]))
    transport.drain()
    transport.close()
    return torch.cat(kept)[::7].tolist()


def beyond_32_bits(rank: int, world: int, device: str, numel: int) -> list[float]:
    """Sum a tensor whose elements, and message whose bytes, 32 bits cannot count; return the errors of three places."""
    on = place(rank, device, timeout=120.0)
    period = gradient(4097, rank).to(on, torch.bfloat16)
    x = period.repeat(-(-numel // 4097))[:numel]
    fl.init()
    fl.all_reduce(x, codec="int8", op=fl.Sum)
    exact = sum(gradient(4097, each).double() for each in range(world))
    errors = []
    for start in (0, numel // 2 // 4097 * 4097, numel // 4097 * 4097 - 4097):
        part = x[start : start + 4097].cpu().double()
        errors.append(float((part - exact).norm() / exact.norm()))
    fl.shutdown()
    return errors


# ---- failures -------------------------------------------------------------------------------------------------------


def lose_the_other(rank: int, world: int, device: str, peers: bool) -> None:
    """Rank 1 gets a signal at the checkpoint. The other goes on until it is told, which must be soon."""
    on = place(rank, device)
    transport = connect(on, TIMEOUT, peers)
    x = torch.zeros(2, 3 << 20, dtype=torch.uint8, device=on)

    def call() -> None:
        transport.all_to_all(x, torch.empty_like(x)) if peers else transport.all_reduce(x)
        wait_for(on)

    call()
    checkpoint("summed")
    while True:
        call()


def close_at_once(rank: int, world: int, device: str, numel: int) -> list[float]:
    """Close while the device still sums what the last step has sent: the update gets whole sums."""
    on = place(rank, device)
    parameter = nn.Parameter(torch.zeros(numel, device=on))
    wrapped: Any = fl.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], codec="raw")
    given = gradient(numel, rank).to(on)
    for _ in range(2):
        wrapped.zero_grad()
        (parameter * given).sum().backward()
        wrapped.step()
    wrapped.close()
    wait_for(on)
    expected = -2 * sum(gradient(numel, each) * 0.5 for each in range(world))
    wrong = int((parameter.detach().cpu() != expected).sum())
    assert not wrong, f"{wrong} of {numel} elements are not summed"
    return []


def break_the_device(rank: int, world: int, device: str) -> None:
    """Rank 1's device fails in a kernel of the user's own: neither a call of ours nor the network is to blame."""
    on = place(rank, device)
    transport = C10dTransport(timeout=TIMEOUT)
    x = torch.zeros(1000, device=on)
    transport.all_reduce(x)
    wait_for(on)
    if rank == 1:
        torch._assert_async(torch.zeros((), device=on))
    while True:
        transport.all_reduce(x)
        time.sleep(0.01)
        if rank == 0:
            wait_for(on)
