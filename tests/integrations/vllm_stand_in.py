"""What the adapter for vLLM uses of it, as version 0.32 has it, for tests without vLLM."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

SIGNATURES = {
    "vllm.distributed.weight_transfer:WeightTransferEngine": "config vllm_config device model",
    "vllm.distributed.weight_transfer:WeightTransferEngine.update_weights": "self update_info",
    "vllm.distributed.weight_transfer:WeightTransferEngine.receive_weights": "self update_info",
    "vllm.distributed.weight_transfer:WeightTransferEngine.init_transfer_engine": "self init_info",
    "vllm.distributed.weight_transfer:WeightTransferEngine.start_weight_update": "self",
    "vllm.distributed.weight_transfer:WeightTransferEngine.finish_weight_update": "self",
    "vllm.distributed.weight_transfer:WeightTransferEngine.shutdown": "self",
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine": "name module_path_or_cls "
    "class_name",
    "vllm.distributed.weight_transfer.base:WeightTransferUpdateRequest": "update_info",
    "vllm.distributed.parallel_state:get_world_group": "",
    "vllm.model_executor.model_loader.mtp_validation:disable_mtp_completeness_check": "",
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": "model",
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": "args kwargs",
    "vllm.entrypoints.llm:LLM.collective_rpc": "self method timeout args kwargs",
    "vllm.entrypoints.llm:LLM.init_weight_transfer_engine": "self request",
    "vllm.entrypoints.llm:LLM.start_weight_update": "self",
    "vllm.entrypoints.llm:LLM.update_weights": "self request",
    "vllm.entrypoints.llm:LLM.finish_weight_update": "self weight_version",
    "vllm.entrypoints.llm:LLM.reset_prefix_cache": "self reset_running_requests reset_connector",
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": "self method timeout args kwargs",
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation": "self mode clear_cache",
    "vllm.v1.engine.async_llm:AsyncLLM.resume_generation": "self",
    "vllm.v1.engine.async_llm:AsyncLLM.start_weight_update": "self",
    "vllm.v1.engine.async_llm:AsyncLLM.update_weights": "self request",
    "vllm.v1.engine.async_llm:AsyncLLM.finish_weight_update": "self weight_version",
}
"""Parameters of what the adapter calls or overrides; ``test_vllm.py`` compares them with those of an installed vLLM."""


def different() -> dict[str, str]:
    """Return the parameters of the installed vLLM that differ from those here."""
    found = {}
    for place, expected in SIGNATURES.items():
        module, _, path = place.partition(":")
        it: Any = importlib.import_module(module)
        for name in path.split("."):
            it = getattr(it, name)
        names = " ".join(inspect.signature(it).parameters)
        if names != expected:
            found[place] = names
    return found


class WeightTransferEngine:
    def __init__(self, config: object, vllm_config: object, device: object, model: object) -> None:
        self.model, self.model_config = model, config

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))  # type: ignore[attr-defined]


class WeightTransferEngineFactory:
    registry: dict[str, type[Any]] = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: type[Any], class_name: str | None = None) -> None:
        if name in cls.registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls.registry[name] = module_path_or_cls


@contextmanager
def installed() -> Iterator[None]:
    """Let ``import vllm`` find these classes, and functions that do nothing, where there is no vLLM."""

    def nothing(*args: object, **kwargs: object) -> None:
        pass

    parts: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferEngineFactory": WeightTransferEngineFactory,
        },
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferUpdateRequest": lambda update_info: SimpleNamespace(update_info=update_info)
        },
        "vllm.distributed.parallel_state": {"get_world_group": lambda: SimpleNamespace(world_size=1)},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.mtp_validation": {"disable_mtp_completeness_check": nullcontext},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": nothing,
            "finalize_layerwise_reload": nothing,
        },
    }
    modules = {}
    for name, content in parts.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(content, __path__=[])
    sys.modules.update(modules)
    try:
        yield
    finally:  # what else was imported meanwhile stays: torch's modules register their operators once
        for name in modules:
            del sys.modules[name]
