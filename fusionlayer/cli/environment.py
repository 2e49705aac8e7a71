"""The environment variables that fusionlayer knows, its own and Horovod's, and their meanings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ..base import config
from ..base.job_key import looks_secret
from ..base.registry import nearest
from ..torch.environment import VARIABLES

HOROVOD = {
    "HOROVOD_RANK": "this process's rank, as horovodrun sets it",
    "HOROVOD_SIZE": "number of processes, as horovodrun sets it",
    "HOROVOD_LOCAL_RANK": "rank on this host, as horovodrun sets it",
    "HOROVOD_LOCAL_SIZE": "processes of this host, as horovodrun sets it",
    "HOROVOD_HOSTNAME": "name of this host, as horovodrun sets it",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "where processes of horovodrun meet",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "where processes of horovodrun meet",
    **VARIABLES,
}

# Horovod's variables that have no effect here, and why.
HOROVOD_UNUSED = {
    "HOROVOD_CYCLE_TIME": "a message is sent when it is complete, without a cycle",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "algorithm 'two_level' is a setting: algorithm",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "gathers send each value between nodes once",
    "HOROVOD_TORUS_ALLREDUCE": "algorithm 'two_level' is a setting: algorithm",
    **dict.fromkeys(
        (
            "HOROVOD_AUTOTUNE",
            "HOROVOD_AUTOTUNE_LOG",
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
            "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        ),
        "there is no search for buckets during training; it made no step faster",
    ),
    "HOROVOD_TIMELINE_MARK_CYCLES": "there are no cycles",
    "HOROVOD_DISABLE_GROUP_FUSION": "a plan decides what is fused",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "process sets may always be made",
    "HOROVOD_ELASTIC": "torchrun decides whether a job is elastic",
    "HOROVOD_THREAD_AFFINITY": "threads are not bound; use numactl or taskset",
    "HOROVOD_LOG_HIDE_TIME": "the program that configures logging chooses the format",
    "HOROVOD_CONTROLLER": "FUSIONLAYER_TRANSPORT chooses the transport",
    "HOROVOD_CPU_OPERATIONS": "FUSIONLAYER_TRANSPORT chooses the transport",
    "HOROVOD_NUM_NCCL_STREAMS": "each lane has one stream; setting: lanes",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "tensors are always copied in one call",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "results are always ordered by streams",
    "HOROVOD_GLOO_IFACE": "GLOO_SOCKET_IFNAME names the interface",
    "HOROVOD_CROSS_RANK": "it follows from rank and local rank",
    "HOROVOD_CROSS_SIZE": "it follows from size and local size",
}

# Variables of other programs that have an effect on fusionlayer.
OTHERS = {
    "MASTER_ADDR": "host of rank 0, where the processes meet",
    "MASTER_PORT": "port there",
    "GLOO_SOCKET_IFNAME": "network interface of gloo and of fusionlayer's own ports",
    "NCCL_HOSTID": "name of this host for NCCL; ranks with different names may share a GPU",
    "NCCL_SOCKET_IFNAME": "network interface of NCCL",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torch's NCCL watchdog, which is off in fusionlayer's groups by default",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "whether the watchdog aborts after a failed device; off by default there",
    "OMP_NUM_THREADS": "threads of torch and codecs on the CPU; the setting `threads` takes precedence",
    "CUDA_VISIBLE_DEVICES": "GPUs that a process sees",
}


class Variable(NamedTuple):
    """An environment variable that is set. ``used``: whether it has an effect; ``meaning``: which one, or why none."""

    name: str
    value: str
    used: bool
    meaning: str


def report(environ: Mapping[str, str] = os.environ) -> list[Variable]:
    """Return the variables that are set and concern fusionlayer, sorted by name."""
    found = []
    unknown = config.unknown_variables(environ)
    for name, value in sorted(environ.items()):
        value = "(not shown)" if looks_secret(name) else value
        known = config.VARIABLES.get(name) or HOROVOD.get(name)
        if known:
            found.append(Variable(name, value, True, known))
        elif name in HOROVOD_UNUSED:
            found.append(Variable(name, value, False, f"means nothing here: {HOROVOD_UNUSED[name]}"))
        elif name in unknown:
            found.append(Variable(name, value, False, f"unknown; {unknown[name]}"))
        elif name.startswith("HOROVOD_"):
            found.append(Variable(name, value, False, f"unknown; {nearest(name, [*HOROVOD, *HOROVOD_UNUSED])}"))
        elif name in OTHERS:
            found.append(Variable(name, value, True, OTHERS[name]))
    return found
