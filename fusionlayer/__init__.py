"""fusionlayer: fused, compressed, overlapped communication for PyTorch training."""

from . import codecs, collectives, native, transport
from .context import init, is_initialized, local_rank, local_size, rank, shutdown, size
from .errors import ConfigError, FusionLayerError, PlanMismatch, TransportError, UsageError, WireError
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
)
from .integrations import ddp
from .integrations.optimizer import DistributedOptimizer
from .plan import FusionPlan
from .scheduler import planners
from .scheduler.autotune import Autotune

__version__ = "0.1.0"

__all__ = [
    "Autotune",
    "Average",
    "ConfigError",
    "DistributedOptimizer",
    "FusionLayerError",
    "FusionPlan",
    "PlanMismatch",
    "ReduceOp",
    "Sum",
    "TransportError",
    "UsageError",
    "WireError",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "build_info",
    "codecs",
    "collectives",
    "ddp",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "planners",
    "rank",
    "reduce_scatter",
    "shutdown",
    "size",
    "transport",
]


def build_info() -> native.BuildInfo:
    """Return how this installation was built: version, instruction sets, compiler, CUDA architectures."""
    return native.build_info(__version__)
