"""What the activations of one model travel by: torch's own collectives, or a channel of any codec and piece size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

import fusionlayer as fl

__all__ = ["BASELINE", "Channel", "Variant", "parse", "variants"]

BASELINE = "gloo"
"""torch's functional all-reduce of f32 over gloo."""

CODECS = ("raw", "bf16", "int8", "fp8_block", "mxfp8", "taco", "int4", "tahquant")
CUT = ("bf16", "taco")
PIECES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
WHOLE = 1 << 40


class Channel(Protocol):
    """What layers that are cut over ranks need: Megatron-LM's pair."""

    def copy(self, x: Tensor) -> Tensor:
        """Return ``x``; backward sums gradients over ranks."""

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over ranks; backward hands the gradient to each."""


@dataclass(frozen=True)
class Variant:
    """How activations travel.

    Attributes:
        codec: a codec's name, or ``BASELINE``.
        piece: bytes of an activation that travel at a time; None: all.
    """

    codec: str
    piece: int | None = None

    @property
    def name(self) -> str:
        """The codec, for pieces with their size."""
        return self.codec if self.piece is None else f"{self.codec}/{self.piece >> 10}KiB"

    def channel(self, width: int) -> Channel:
        """Return the channel of this variant for activations of ``width``; all ranks make it together."""
        if self.codec == BASELINE:
            return _Functional()
        options = {"channels": width} if self.codec.startswith("tahquant") else {}
        return fl.tensor_parallel.Channel(codec=self.codec, piece_bytes=self.piece or WHOLE, **options)


def parse(name: str) -> Variant:
    """Return the variant of a name, such as ``taco`` or ``taco/256KiB``."""
    codec, _, piece = name.partition("/")
    if codec != BASELINE and codec not in fl.codecs.names():
        raise ValueError(f"{codec!r} is not known; choose from {', '.join((BASELINE, *fl.codecs.names()))}")
    if piece and not (piece.endswith("KiB") and piece[:-3].isdecimal() and int(piece[:-3])):
        raise ValueError(f"piece {piece!r}; expected a size such as 256KiB")
    return Variant(codec, int(piece[:-3]) << 10 if piece else None)


def variants() -> Iterator[Variant]:
    """Yield the variants of a full run: every codec whole, some of them in pieces as well."""
    yield from (Variant(codec) for codec in (BASELINE, *CODECS))
    yield from (Variant(codec, piece) for codec in CUT for piece in PIECES)


class _Functional:
    def copy(self, x: Tensor) -> Tensor:
        copied: Tensor = _Copy.apply(x)  # type: ignore[no-untyped-call]
        return copied

    def reduce(self, x: Tensor) -> Tensor:
        total: Tensor = _Reduce.apply(x)  # type: ignore[no-untyped-call]
        return total


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return _sum(grad)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return _sum(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def _sum(x: Tensor) -> Tensor:
    assert dist.group.WORLD is not None
    total = all_reduce(x.contiguous(), "sum", dist.group.WORLD)
    return torch.ops._c10d_functional.wait_tensor(total) if type(total) is Tensor else total.wait()
