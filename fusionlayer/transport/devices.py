"""GPUs and runtimes of torch that are refused, and the comparison of ranks before NCCL connects them."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..base.errors import ConfigError, PlanMismatch
from ..process.processes import node_name
from .settings import gather_settings

# The compute capability that the CUDA kernels need: A100's.
_LEAST = (8, 0)


def check_devices(store: dist.Store, rank: int, size: int, device: torch.device) -> None:
    """Refuse GPUs that NCCL could not connect. All ranks call it together before, and every rank raises the same."""
    found = torch.cuda.get_device_properties(device)
    gpu = str(getattr(found, "uuid", device.index))
    # The place on the PCI bus, which all MIG slices of a GPU share. Not every version of torch knows it.
    places = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    slot = gpu if None in places else ":".join(map(str, places))
    mine = {
        # NCCL_HOSTID makes one host look like several to NCCL, which then lets ranks share a GPU.
        "host": os.environ.get("NCCL_HOSTID") or node_name(),
        "slot": slot,
        "gpu": gpu,
        "device": str(device),
        "unsupported": _why_unsupported(device),
    }
    _, every = gather_settings(store, rank, size, "", mine)
    for each, theirs in enumerate(every):
        if theirs["unsupported"]:
            raise ConfigError(f"rank {each}: {theirs['unsupported']}")
    owners: dict[tuple[object, object], int] = {}
    for each, theirs in enumerate(every):
        first = owners.setdefault((theirs["host"], theirs["slot"]), each)
        if first != each:
            raise PlanMismatch(f"ranks {first} and {each} {_conflict(every[first], theirs)}", ranks=[first, each])


def _conflict(one: Mapping[str, object], other: Mapping[str, object]) -> str:
    """Return the problem of two ranks with one GPU, and its remedy."""
    if one["gpu"] != other["gpu"]:
        return (
            f"have slices of one GPU (MIG: {one['gpu']} and {other['gpu']}), and NCCL connects whole GPUs: give each "
            "rank a GPU of its own, or set transport: sockets in the settings, which needs no NCCL"
        )
    return (
        f"use one GPU ({one['device']} and {other['device']}, {other['gpu']}), and NCCL needs one for each rank: call "
        "torch.cuda.set_device(fusionlayer.local_rank()) before the model is built, or start fewer processes on this "
        "host"
    )


def refuse_old_gpu() -> None:
    """Refuse the current GPU if there are no kernels for it. Before CUDA is in use it is not asked."""
    if torch.cuda.is_initialized() and (why := _why_unsupported(torch.device("cuda", torch.cuda.current_device()))):
        raise ConfigError(why)


def _why_unsupported(device: torch.device) -> str:
    """Return why there are no kernels for a GPU, and the remedy; "" if there are some."""
    found = torch.cuda.get_device_capability(device)
    if found >= _LEAST:
        return ""
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}; expected at least "
        f"{_LEAST[0]}.{_LEAST[1]} (A100 or newer): use another GPU, or hide it (CUDA_VISIBLE_DEVICES=) and train "
        "on the CPU"
    )


def refuse_rocm() -> None:
    """Refuse AMD's GPUs, for which there are no kernels."""
    if torch.version.hip is not None and torch.cuda.is_available():
        raise ConfigError(
            f"this torch is built for AMD's ROCm ({torch.version.hip}) and sees a GPU; fusionlayer has kernels for "
            "NVIDIA's GPUs alone: set HIP_VISIBLE_DEVICES=-1 and train on the CPU"
        )


def refuse_torchcomms() -> None:
    """Refuse TorchComms, with which torch does not make the groups that were registered with it."""
    if getattr(getattr(dist, "config", None), "use_torchcomms", False):
        raise ConfigError(
            "torch.distributed.config.use_torchcomms is set, and fusionlayer is no backend of TorchComms: unset "
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS"
        )
