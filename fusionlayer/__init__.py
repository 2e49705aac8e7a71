"""fusionlayer: fused, compressed, overlapped communication for PyTorch training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import _fusionlayer_autoload

# Its exit handlers, and those of forks, are registered before the program's, so they run after them.
from . import bounded as _bounded  # noqa: F401

if TYPE_CHECKING:
    from . import backend, codecs, collectives, libraries, metrics, transport
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
    from .integrations import checkpoint, ddp, deepspeed, fsdp, megatron, moe, pipeline, tensor_parallel
    from .integrations.distributed import Distributed
    from .integrations.local import Local
    from .integrations.onebit_adam import OneBitAdam
    from .integrations.optimizer import DistributedOptimizer
    from .integrations.publication import Publisher, publish
    from .integrations.sends import FollowsSyncs, SendsItsOwn
    from .integrations.sharded import ShardedOptimizer
    from .plan import FusionPlan
    from .planning.codec_rules import CodecRule, CodecRules
    from .publishing import TLS, Follower, subscribe
    from .scheduler import planners
    from .watching import watch

__version__ = "0.1.0"

__all__ = [
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
    "TLS",
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

_HOMES = {
    "context": "init is_initialized local_rank local_size membership rank shutdown size",
    "errors": "ConfigError FusionLayerError PlanMismatch ReplicaMismatch TransportError UsageError WireError",
    "functional": "Average ReduceOp Sum all_gather all_reduce "
    "all_to_all broadcast_object broadcast_optimizer_state broadcast_parameters reduce_scatter switcher",
    "integrations": "checkpoint ddp deepspeed fsdp megatron moe pipeline tensor_parallel",
    "integrations.distributed": "Distributed",
    "integrations.local": "Local",
    "integrations.onebit_adam": "OneBitAdam",
    "integrations.optimizer": "DistributedOptimizer",
    "integrations.publication": "Publisher publish",
    "integrations.sends": "FollowsSyncs SendsItsOwn",
    "integrations.sharded": "ShardedOptimizer",
    "plan": "FusionPlan",
    "planning.codec_rules": "CodecRule CodecRules",
    "publishing": "Follower TLS subscribe",
    "scheduler": "planners",
    "watching": "watch",
}
"""The public names by their modules, which are imported when a name is first used: torch alone takes seconds."""
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

_fusionlayer_autoload.register_with_torch()


def build_info() -> libraries.BuildInfo:
    """Return how this installation was built: version, instruction sets, compiler, CUDA architectures."""
    from . import libraries

    return libraries.build_info(__version__)


if not TYPE_CHECKING:  # type checkers see the imports above, and report all other names

    def __getattr__(name: str) -> object:
        if name in _HOME:
            module = __import__(f"{__name__}.{_HOME[name]}", fromlist=[name])  # imports `name` too if it is a module
            value = globals()[name] = getattr(module, name)
            return value
        missing = AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name.startswith("_"):
            raise missing
        try:
            return importlib.import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise missing from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
