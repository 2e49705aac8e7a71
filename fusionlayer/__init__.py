"""fusionlayer: fused, compressed, overlapped communication for PyTorch training."""

import importlib
from typing import TYPE_CHECKING, Any

from . import backend, codecs, collectives, libraries, transport
from .context import init, is_initialized, local_rank, local_size, membership, rank, shutdown, size
from .errors import (
    ConfigError,
    FusionLayerError,
    PlanMismatch,
    ReplicaMismatch,
    TransportError,
    UsageError,
    WireError,
)
from .functional import (
    Average,
    ReduceOp,
    Sum,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    reduce_scatter,
    switcher,
)
from .integrations import ddp
from .integrations.distributed import Distributed
from .integrations.local import Local
from .integrations.onebit_adam import OneBitAdam
from .integrations.optimizer import DistributedOptimizer
from .integrations.publication import Publisher, publish
from .integrations.sends import FollowsSyncs, SendsItsOwn
from .integrations.sharded import ShardedOptimizer
from .plan import FusionPlan
from .planning.autotune import Autotune
from .planning.codec_rules import CodecRule, CodecRules
from .publishing import Follower, subscribe
from .scheduler import planners
from .watching import watch

if TYPE_CHECKING:
    from . import metrics
    from .integrations import checkpoint, deepspeed, fsdp, megatron, moe, pipeline, tensor_parallel

__version__ = "0.1.0"

__all__ = [
    "Autotune",
    "Average",
    "CodecRule",
    "CodecRules",
    "ConfigError",
    "Distributed",
    "DistributedOptimizer",
    "Follower",
    "FollowsSyncs",
    "FusionLayerError",
    "FusionPlan",
    "Local",
    "OneBitAdam",
    "PlanMismatch",
    "Publisher",
    "ReduceOp",
    "ReplicaMismatch",
    "SendsItsOwn",
    "ShardedOptimizer",
    "Sum",
    "TransportError",
    "UsageError",
    "WireError",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "backend",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "build_info",
    "checkpoint",
    "codecs",
    "collectives",
    "ddp",
    "deepspeed",
    "fsdp",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "megatron",
    "membership",
    "metrics",
    "moe",
    "pipeline",
    "planners",
    "publish",
    "rank",
    "reduce_scatter",
    "shutdown",
    "size",
    "subscribe",
    "switcher",
    "tensor_parallel",
    "transport",
    "watch",
]

backend.register()


def build_info() -> libraries.BuildInfo:
    """Return how this installation was built: version, instruction sets, compiler, CUDA architectures."""
    return libraries.build_info(__version__)


def __getattr__(name: str) -> Any:
    # Imported on first use: the parts of torch that they need take more than a second, and most jobs do without them.
    if name in ("checkpoint", "deepspeed", "fsdp", "megatron", "moe", "pipeline", "tensor_parallel"):
        return importlib.import_module(f".integrations.{name}", __name__)
    if name == "metrics":
        return importlib.import_module(".metrics", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
