"""Replicas whose weights or optimizer states are cut over ranks: FSDP2, and ``fl.ShardedOptimizer``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError
from fusionlayer.functional import make_codec
from fusionlayer.training.weights import Weights, both_ways

from .replicas import Trainee
from .workloads import Workload

__all__ = ["KINDS", "ShardedReplica", "Sharding"]

KINDS = ("fsdp", "hsdp", "zero")


@dataclass(frozen=True)
class Sharding:
    """How a sharded model sends weights and gradients: ``fsdp``, ``fsdp:delta/zip+bf16``, ``hsdp:int4``, ``zero:qwd``.

    Attributes:
        kind: "fsdp"; "hsdp", whose nodes hold replicas; or "zero" for ``fl.ShardedOptimizer``, whose ranks have whole
            weights.
        weights: preset or codec, with "hsdp" that of sums over replicas alone; None: torch's own FSDP2.
        gradients: codec; None: by the preset.
        bf16: FSDP2 computes in bf16 and sends it.
        flat: the ranks of a node are not summed first.
    """

    kind: str
    weights: str | None = None
    gradients: str | None = None
    bf16: bool = False
    flat: bool = False

    @classmethod
    def parse(cls, name: str) -> Sharding:
        """Return what a name stands for; ``ValueError`` if it is none."""
        head, *words = name.split("+")
        kind, _, codecs = head.partition(":")
        weights, _, gradients = codecs.partition("/")
        if kind not in KINDS or {*words} - {"bf16", "flat"} or (kind == "zero" and not weights):
            raise ValueError(
                f"{name!r}; expected fsdp, fsdp:WEIGHTS, fsdp:WEIGHTS/GRADIENTS+bf16+flat, "
                "hsdp, hsdp:CODEC+bf16 or zero:WEIGHTS"
            )
        try:
            found = both_ways(weights or None, gradients or None, default=None)
            if found[0] is not None:
                (make_codec(found[0], {}) if kind == "hsdp" else Weights.of(found[0]))
            if found[1] is not None:
                make_codec(found[1], {})
        except ConfigError as error:
            raise ValueError(f"{name!r}: {error}") from None
        return cls(kind, weights or None, gradients or None, **{word: True for word in words})

    @property
    def about(self) -> str:
        """What it is, in words."""
        model = {"fsdp": "FSDP2", "hsdp": "HSDP"}.get(self.kind, "fl.ShardedOptimizer")
        if self.weights is None:
            return f"torch's {model}{' in bf16' if self.bf16 else ''}"
        names = f"weights {self.weights}" + (f", gradients {self.gradients}" if self.gradients else "")
        return f"{model}, {names}{', in bf16' if self.bf16 else ''}{', one level' if self.flat else ''}"

    def place(self, model: nn.Module, plain: Optimizer) -> Optimizer:
        """Cut the model over ranks; return the optimizer that takes the place of ``plain``. All ranks call it."""
        given = {} if self.gradients is None else {"gradients": self.gradients}
        lr = plain.param_groups[0]["lr"]
        if self.kind == "zero":
            return fl.ShardedOptimizer(model.parameters(), type(plain), weights=self.weights, **given, lr=lr)
        nodes = fl.size() // fl.local_size(), fl.local_size()
        mesh = init_device_mesh("cpu", nodes, mesh_dim_names=("nodes", "ranks")) if self.kind == "hsdp" else None
        for part in (*getattr(model, "blocks", ()), model):
            sent = torch.bfloat16 if self.bf16 else torch.float32
            policy = MixedPrecisionPolicy(sent, torch.float32, torch.float32 if part is model else None)
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False if part is model else None)
        if self.kind == "hsdp":
            fl.fsdp.compress(model, None, None, replicas=self.weights)
        elif self.weights is not None:
            fl.fsdp.compress(model, self.weights, **given, nodes=1 if self.flat else None)
        return type(plain)(model.parameters(), lr=lr)


class ShardedReplica(Trainee):
    """A model in such a training."""

    def __init__(self, workload: Workload, sharding: Sharding) -> None:
        model, plain = workload.begin()
        super().__init__(workload, model, sharding.place(model, plain))

    def digest(self) -> str:  # noqa: D102 - described in Replica
        found = hashlib.sha256()
        for parameter in self._model.parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found.update(whole.detach().numpy().tobytes())
        return found.hexdigest()
