"""fusionlayer: fused, compressed, overlapped communication for PyTorch training."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

import _fusionlayer_autoload

# Its exit handlers, and those of forks, are registered before the program's handlers, so they run after them.
from .process import bounded as _bounded  # noqa: F401

if TYPE_CHECKING:
    from . import backend, codecs, collectives, transport
    from .base import libraries
    from .base.errors import (
        ConfigError,
        FusionLayerError,
        PlanMismatch,
        ReplicaMismatch,
        TransportError,
        UsageError,
        WireError,
    )
    from .base.plan import FusionPlan
    from .context import init, is_initialized, local_rank, local_size, membership, rank, shutdown, size
    from .frameworks import deepspeed, megatron, vllm
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
    from .health import watch
    from .observe import metrics
    from .parallel import moe, pipeline, tensor_parallel
    from .planning.codec_rules import CodecRule, CodecRules
    from .publishing import TLS, Follower, subscribe
    from .scheduler import planners
    from .sharded import fsdp
    from .sharded.muon import Muon
    from .sharded.sharded import ShardedOptimizer
    from .training import checkpoint, ddp
    from .training.distributed import Distributed
    from .training.optimizer import DistributedOptimizer
    from .training.planning_options import Planning
    from .training.policies.local import Local
    from .training.policies.onebit_adam import OneBitAdam
    from .training.publication import Publisher, publish
    from .training.sends import FollowsSyncs, SendsItsOwn

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
    "Muon",
    "OneBitAdam",
    "PlanMismatch",
    "Planning",
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
    "vllm",
    "watch",
]

_HOMES = {
    "base": "config errors libraries plan",
    "base.errors": "ConfigError FusionLayerError PlanMismatch ReplicaMismatch TransportError UsageError WireError",
    "base.plan": "FusionPlan",
    "context": "init is_initialized local_rank local_size membership rank shutdown size",
    "functional": "Average ReduceOp Sum all_gather all_reduce "
    "all_to_all broadcast_object broadcast_optimizer_state broadcast_parameters reduce_scatter switcher",
    "frameworks": "deepspeed megatron vllm",
    "health": "watch",
    "native": "wire",
    "observe": "metrics",
    "parallel": "moe pipeline tensor_parallel",
    "planning.codec_rules": "CodecRule CodecRules",
    "publishing": "Follower TLS subscribe",
    "scheduler": "planners",
    "sharded": "fsdp",
    "sharded.muon": "Muon",
    "sharded.sharded": "ShardedOptimizer",
    "training": "checkpoint ddp",
    "training.distributed": "Distributed",
    "training.optimizer": "DistributedOptimizer",
    "training.planning_options": "Planning",
    "training.policies.local": "Local",
    "training.policies.onebit_adam": "OneBitAdam",
    "training.publication": "Publisher publish",
    "training.sends": "FollowsSyncs SendsItsOwn",
}
"""The public names by their modules, which are imported when a name is first used: torch alone takes seconds."""
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

_IMPORTED = {name: f"{__name__}.{_HOME[name]}.{name}" for name in ["errors", "metrics", "plan", "wire"]} | {
    f"integrations.{name}": f"{__name__}.{_HOME[name]}.{name}"
    for name in ["checkpoint", "ddp", "deepspeed", "fsdp", "megatron", "moe", "pipeline", "tensor_parallel"]
}
_IMPORTED["watching"] = f"{__name__}.health"
"""Public modules that programs import by a name without their package, by that name."""


class _PublicModules(MetaPathFinder, Loader):
    """Imports ``_IMPORTED``: ``import fusionlayer.errors`` gives the module ``fusionlayer.base.errors`` itself."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        short = name.removeprefix(f"{__name__}.")
        is_package = short == "integrations"
        return ModuleSpec(name, self, is_package=is_package) if is_package or short in _IMPORTED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        home = _IMPORTED.get(spec.name.removeprefix(f"{__name__}."))
        if home is None:
            return None  # an empty package
        module = importlib.import_module(home)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None and module.__spec__.loader_state is not None:
            module.__spec__ = module.__spec__.loader_state  # the import system has replaced it


sys.meta_path.append(_PublicModules())
_fusionlayer_autoload.register_with_torch()


def build_info() -> libraries.BuildInfo:
    """Return how this installation was built: version, instruction sets, compiler, CUDA architectures."""
    from .base import libraries

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
