"""A configuration of torchtitan's Llama 3 debug model whose communication fusionlayer compresses.

    cd torchtitan
    torchrun --nproc-per-node 8 -m torchtitan.train --module train_torchtitan --config llama3_debugmodel \
        --parallelism.data_parallel_replicate_degree 2 --parallelism.tensor_parallel_degree 2

torchtitan imports this module, which must be on PYTHONPATH, and calls the function that ``--config`` names. FSDP2's
weights and gradients and HSDP's sums are coded by ``fl.fsdp.compress``. Calls between tensor-parallel ranks follow the
rule below. Without a GPU start ``torchtitan_on_cpu.py`` instead of ``-m torchtitan.train``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

import fusionlayer as fl

TENSOR_PARALLEL = {"op": ["all_reduce", "all_gather", "reduce_scatter"], "group": "mesh_tp", "codec": "int8"}


def llama3_debugmodel() -> Trainer.Config:
    """Return torchtitan's configuration of this name, compressed."""
    return compressed(config_registry.llama3_debugmodel(), weights="qwd", gradients="int8", replicas="int4")


def compressed(config: Trainer.Config, **codecs: Any) -> Trainer.Config:
    """Let any configuration send by ``codecs``, which are arguments of ``fl.fsdp.compress``."""
    parallelize = config.model_spec.parallelize_fn

    def parallelize_and_compress(model: nn.Module, **how: Any) -> nn.Module:
        model = parallelize(model, **how)
        options = codecs if how["parallel_dims"].dp_replicate_enabled else {**codecs, "replicas": "auto"}
        fl.fsdp.compress(model, **options)
        return model

    config.model_spec = replace(config.model_spec, parallelize_fn=parallelize_and_compress)
    config.parallelism.spmd_backend = "partial_dtensor"  # sends by functional collectives
    dist.init_process_group("fusionlayer", pg_options={"rules": [TENSOR_PARALLEL]})  # torchtitan uses it as it is
    return config
