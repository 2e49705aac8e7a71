"""Models to measure: two built-in ones, and any that a function returns."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...base.errors import ConfigError

Batch = Sequence[Any]


class _GPT(nn.Module):
    """A decoder-only transformer with 10.8 million parameters; its forward returns the loss of the next token."""

    def __init__(self, width: int = 384, layers: int = 6, heads: int = 6, context: int = 128, vocabulary: int = 256):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.shortcut(x))


class _ResNet(nn.Module):
    """A residual network with 2.8 million parameters for pictures of 32 x 32; its forward returns the loss."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256), depth: int = 2, classes: int = 10):
        super().__init__()
        blocks: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)]
        before = widths[0]
        for width in widths:
            blocks += [_Residual(before if i == 0 else width, width, 2 if i == 0 else 1) for i in range(depth)]
            before = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.blocks(pictures).mean((2, 3))), labels)


def _gpt() -> tuple[nn.Module, Batch]:
    return _GPT(), (torch.randint(256, (2, 128), device="cpu"), torch.randint(256, (2, 128), device="cpu"))


def _resnet() -> tuple[nn.Module, Batch]:
    return _ResNet(), (torch.randn(16, 3, 32, 32, device="cpu"), torch.randint(10, (16,), device="cpu"))


BUILT_IN: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {"gpt": _gpt, "resnet": _resnet}


def load_model(name: str) -> tuple[nn.Module, Batch]:
    """Return a model, whose forward returns its loss, and the arguments of that forward."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError(f"model {name!r}; expected one of {', '.join(BUILT_IN)}, or module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"model {name!r} cannot be loaded: {error}") from error
    if not callable(make):
        raise ConfigError(f"model {name!r} is no function; expected one that returns a model and its arguments")
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ConfigError(f"{name} returned {type(made).__name__}; expected a model and the arguments of its forward")
    model, batch = made
    return model, batch if isinstance(batch, (tuple, list)) else (batch,)
