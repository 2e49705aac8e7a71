"""The GPT of the examples as DeepSpeed takes it: whole, with experts, or cut into stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from torch.nn import functional

from examples.gpt import GPT, Block, Config

__all__ = ["KINDS", "build"]

KINDS = ("zero0", "zero1", "zero2", "zero3", "moe", "pipeline")
"""ZeRO's stages; experts that ranks share; two stages of layers."""

BALANCE = 0.01
EXPERTS = 4


def build(kind: str, config: Config, seed: int) -> nn.Module:
    """Return the model of one of ``KINDS``, its weights decided by ``seed``."""
    torch.manual_seed(seed)
    if kind == "pipeline":
        layers = [LayerSpec(_Embedding, config), *(LayerSpec(Block, config) for _ in range(config.layers))]
        return PipelineModule([*layers, LayerSpec(_Head, config)], num_stages=2, loss_fn=_loss)
    if kind == "moe":
        return _Mixture(config)
    return GPT(config)


class _MixtureBlock(Block):
    """A block whose perceptron is a layer of experts."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        expert = nn.Sequential(self.perceptron_in, nn.GELU(), self.perceptron_out)
        del self.perceptron_in, self.perceptron_out
        self.experts = MoE(config.width, expert, EXPERTS, ep_size=dist.get_world_size(), k=1)
        self.balance = torch.zeros(())

    def _transform(self, x: Tensor) -> Tensor:
        mixed, self.balance, _ = self.experts(x)
        return mixed  # type: ignore[no-any-return]


class _Mixture(GPT):
    """Every second block has experts; what keeps them equally busy is part of the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        blocks = [_MixtureBlock(config) if i % 2 else block for i, block in enumerate(self.blocks)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(tokens, targets)
        if not self.training:
            return loss
        return loss + BALANCE * sum(block.balance for block in self.blocks if isinstance(block, _MixtureBlock))


class _Embedding(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.context, config.width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=config.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return embedded


class _Head(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits


def _loss(logits: Tensor, targets: Tensor) -> Any:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
