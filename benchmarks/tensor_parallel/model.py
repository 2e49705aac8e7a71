"""A GPT whose layers are cut over ranks, and whose activations take whatever way they are told to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .variants import Channel

__all__ = ["Shape", "TensorParallelGPT"]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a batch.

    Attributes:
        width: elements of the vector that stands for a token.
        layers: blocks, with four all-reduces each.
        heads: of attention; the ranks divide them.
        context: tokens of a text.
        batch: texts of a step.
        vocabulary: different tokens.
    """

    width: int = 256
    layers: int = 2
    heads: int = 4
    context: int = 128
    batch: int = 64
    vocabulary: int = 256

    @property
    def activation_bytes(self) -> int:
        """Bytes of what an all-reduce sums."""
        return 4 * self.batch * self.context * self.width


class TensorParallelGPT(nn.Module):
    """This rank's part of a decoder-only transformer; embeddings, norms and head are whole on all ranks.

    Attributes:
        channel: by which activations travel.
    """

    def __init__(self, shape: Shape, ranks: int, channel: Channel) -> None:
        super().__init__()
        self.channel = channel
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(_Block(shape, ranks) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=shape.width**-0.5)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of ``targets`` after ``tokens``: (batch, context) each."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, self.channel)
        logits = self.norm(x) @ self.tokens.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Block(nn.Module):
    def __init__(self, shape: Shape, ranks: int) -> None:
        super().__init__()
        width, part = shape.width, shape.width // ranks
        self.heads = shape.heads // ranks
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * part)
        self.attention_out = nn.Linear(part, width, bias=False)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron_in = nn.Linear(width, 4 * part)
        self.perceptron_out = nn.Linear(4 * part, width, bias=False)

    def forward(self, x: Tensor, channel: Channel) -> Tensor:
        x = x + channel.reduce(self.attention_out(self._attend(channel.copy(self.attention_norm(x)))))
        hidden = functional.gelu(self.perceptron_in(channel.copy(self.perceptron_norm(x))))
        return x + channel.reduce(self.perceptron_out(hidden))

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = self.attention_in(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)
