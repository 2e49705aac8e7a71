"""A small decoder-only transformer, and text that every machine with Python has: what the examples train on."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPT", "Config", "Corpus"]


@dataclass(frozen=True)
class Config:
    """Sizes of a ``GPT``; the defaults make 0.8 million parameters, width 384 and 6 layers make 10.8 million.

    Attributes:
        width: elements of the vector that stands for a token.
        layers: number of blocks.
        heads: attention heads of each block; they divide ``width``.
        context: tokens that are seen at once.
        vocabulary: number of different tokens; 256 for bytes.
        tied: the output layer uses the weights of the embedding.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    vocabulary: int = 256
    tied: bool = True


class Block(nn.Module):
    """Attention to earlier tokens, then a two-layer perceptron; each adds to what came in, normalized first."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention_in = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.perceptron_norm = nn.LayerNorm(config.width)
        self.perceptron_in = nn.Linear(config.width, 4 * config.width)
        self.perceptron_out = nn.Linear(4 * config.width, config.width)

    @torch.no_grad()
    def damp(self, factor: float) -> None:
        """Scale what the block adds at the start of training, so that many blocks add up to about one."""
        self.attention_out.weight *= factor
        self.perceptron_out.weight *= factor

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, width) for the same."""
        x = x + self.attention_out(self._attend(self.attention_norm(x)))
        return x + self._transform(self.perceptron_norm(x))

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = self.attention_in(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def _transform(self, x: Tensor) -> Tensor:
        return self.perceptron_out(functional.gelu(self.perceptron_in(x)))


class GPT(nn.Module):
    """Predicts the next token at every place of a text."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=config.width**-0.5)
        for block in self.blocks.modules():
            if isinstance(block, Block):
                block.damp((2 * config.layers) ** -0.5)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats, of ``targets`` after ``tokens``: (batch, n <= context) each."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Corpus:
    """The bytes of Python's standard library, modules in the order of their names; every tenth one is for validation.

    Attributes:
        train: (n,) uint8.
        validation: (m,) uint8.

    Raises:
        FileNotFoundError: this Python came without the sources of its library.
    """

    def __init__(self) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
        if len(sources) < 10:
            raise FileNotFoundError(f"{folder} has no Python sources to train on; use a Python that has them")
        self.train = _join(source for i, source in enumerate(sources) if i % 10)
        self.validation = _join(sources[::10])

    def sample(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return ``count`` random pieces of the training text and the same moved by one: (count, length) int64 each."""
        starts = torch.randint(len(self.train) - length, (count,), generator=generator)
        return _pieces(self.train, starts, length)

    def validate(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` pieces of the validation text, always the same, as ``sample`` does."""
        return _pieces(self.validation, torch.linspace(0, len(self.validation) - length - 1, count).long(), length)


def _join(sources: Iterable[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(sources)), dtype=torch.uint8)


def _pieces(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    pieces = text[starts[:, None] + torch.arange(length + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]
