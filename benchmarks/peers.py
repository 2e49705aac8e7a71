"""How others train a model on all workers: torch's DDP and its hooks, torchft, accelerate."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

__all__ = ["LEFT_OUT", "PEERS", "POWERSGD_START", "Attached", "Peer", "attach", "version_of", "why_missing"]

POWERSGD_RANK = 4
POWERSGD_START = 10
"""Steps without compression, in which PowerSGD's first factors are not yet needed."""

ONE_BUCKET = 1000
"""Megabytes: more than any model here. With several buckets PowerSGD's collectives come in different orders on
different ranks, and gloo ends the process."""

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""Of DiLoCo's outer optimizer, SGD with Nesterov's momentum: the values of its paper."""

LEFT_OUT = {"demo": "DeMo's optimizer is a file without a licence and in no package: it may not be used here"}
"""Peers that are not compared, and why."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Attached:
    """A model that is trained on all workers.

    Attributes:
        model: whose forward is called.
        optimizer: whose ``step`` ends a step; what workers exchange at that time, they exchange in it.
        close: gives up threads and servers; all ranks together.
    """

    model: nn.Module
    optimizer: Optimizer
    close: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Peer:
    """One way of others to train.

    Attributes:
        about: what it is, in words.
        attach: makes model and optimizer train on all workers; all ranks call it together.
        package: of the registry, whose version is told.
        period: steps after which the workers' parameters are equal again.
    """

    about: str
    attach: Callable[[nn.Module, Optimizer, int], Attached]
    package: str = "torch"
    period: int = 1


def attach(method: str, model: nn.Module, optimizer: Optimizer, powersgd_start: int = POWERSGD_START) -> Attached:
    """Return ``model`` and ``optimizer`` as the peer ``method`` trains them; all ranks call it together."""
    return PEERS[method].attach(model, optimizer, powersgd_start)


def version_of(method: str) -> str:
    """Return package and version of a peer, such as "torch 2.13.0"; without a version where it is not installed."""
    package = PEERS[method].package
    return package if why_missing(method) else f"{package} {version(package)}"


def why_missing(method: str) -> str | None:
    """Return why a peer cannot run here; None if it can."""
    try:
        version(PEERS[method].package)
    except PackageNotFoundError:
        return f"{PEERS[method].package} is not installed"
    return None


def _ddp(model: nn.Module, optimizer: Optimizer, _: int) -> Attached:
    return Attached(DistributedDataParallel(model), optimizer)


def _fp16(model: nn.Module, optimizer: Optimizer, _: int) -> Attached:
    wrapper = DistributedDataParallel(model)
    wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Attached(wrapper, optimizer)


def _bf16(model: nn.Module, optimizer: Optimizer, _: int) -> Attached:
    wrapper = DistributedDataParallel(model)
    # By its own name DDP refuses this hook unless there is a GPU; gloo does what it needs.
    wrapper.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    return Attached(wrapper, optimizer)


def _powersgd(model: nn.Module, optimizer: Optimizer, start: int) -> Attached:
    wrapper = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET)
    state = powerSGD_hook.PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=start)
    wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Attached(wrapper, optimizer)


ACCELERATE_EVERY = 8
"""Steps between two averages: the default of accelerate."""


def _accelerate(model: nn.Module, optimizer: Optimizer, _: int) -> Attached:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    wrapper = DistributedDataParallel(model)
    local = LocalSGD(Accelerator(cpu=True), wrapper, ACCELERATE_EVERY)
    local.__enter__()  # leaving it would average once more, after the last evaluation
    optimizer.register_step_post_hook(lambda *_: local.step())
    return Attached(wrapper, optimizer)


TORCHFT_EVERY = 30
PATIENCE = timedelta(minutes=30)
"""Of torchft with its peers, who may be as late as a turn of another method takes."""


def _torchft(model: nn.Module, optimizer: Optimizer, _: int) -> Attached:
    """Attach DiLoCo: each rank is a replica group of its own, rank 0 keeps the lighthouse by which they meet."""
    os.environ.setdefault("RUST_LOG", "error")  # else each quorum is told
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    own = _own_address()

    class Group(ProcessGroupGloo):  # type: ignore[misc]
        def get_reconfigure_handle(self) -> str:
            # It tells the others the host's name, and hosts of the lab have none.
            with patch("socket.gethostname", return_value=own):
                handle: str = super().get_reconfigure_handle()
                return handle

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=dist.get_world_size()) if dist.get_rank() == 0 else None
    place = [lighthouse and f"http://{own}:{lighthouse.address().rpartition(':')[2]}"]
    dist.broadcast_object_list(place)
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=Group(timeout=PATIENCE),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=dist.get_world_size(),
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=place[0],
        replica_id=f"rank{dist.get_rank()}",
        hostname=own,
        heartbeat_interval=timedelta(seconds=1),  # beside the messages of other methods, which are counted
        init_sync=False,
    )
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    # In buckets, which its own default of a message for each parameter is slower than.
    DiLoCo(manager, [model], optimizer, outer, TORCHFT_EVERY, use_bucketization=True).__enter__()

    def close() -> None:
        dist.barrier()
        manager.shutdown(wait=False)
        dist.barrier()
        if lighthouse is not None:
            lighthouse.shutdown()

    return Attached(model, optimizer, close)


def _own_address() -> str:
    """Return this host's address on the network by which the ranks have met."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        address: str = probe.getsockname()[0]
        return address


PEERS: dict[str, Peer] = {
    "ddp": Peer("DistributedDataParallel with its defaults", _ddp),
    "ddp-fp16": Peer("DDP with torch's fp16_compress_hook", _fp16),
    "ddp-bf16": Peer("DDP with torch's bf16_compress_hook", _bf16),
    "ddp-powersgd": Peer(
        f"DDP with torch's PowerSGD hook: rank {POWERSGD_RANK}, warm start, error feedback, one bucket", _powersgd
    ),
    "accelerate-local": Peer(
        f"accelerate's LocalSGD: parameters are averaged every {ACCELERATE_EVERY} steps",
        _accelerate,
        "accelerate",
        ACCELERATE_EVERY,
    ),
    "torchft-diloco": Peer(
        f"torchft's DiLoCo, every {TORCHFT_EVERY} steps, outer SGD {OUTER_RATE:g} with Nesterov's {OUTER_MOMENTUM:g}",
        _torchft,
        "torchft-nightly",
        TORCHFT_EVERY,
    ),
}
"""What others have, by the name that results give it."""
