"""``powersgd``: sends matrices as two thin factors, which are summed over ranks instead of the matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...base.errors import ConfigError
from ...native.wire import Plane
from ..base import Codec, registry
from ..capabilities import PartsCodec
from ..pytorch import TorchCodec
from ..state import Part
from .factors import orthonormal, product, random_factor, square_shape

_FACTORS = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class PowerSGD(PartsCodec, TorchCodec, name="powersgd"):
    """The part of a matrix that one step of subspace iteration finds (Vogels et al., "PowerSGD", NeurIPS 2019).

    A gradient of shape (n, ...) is a matrix of n rows and as many columns as a row has elements. The collective
    ``low_rank`` sums its factors over ranks; they are linear in the gradient, so nothing is requantised. Vectors, and
    matrices that would not become ``min_compression_rate`` times smaller, are sent uncompressed. In other collectives a
    message lays its elements out as a square matrix and has the factors of that, from a random start.

    Attributes:
        rank: rank r of the products; at most the shorter side of a matrix.
        min_compression_rate: a matrix of n rows and m columns is compressed if (n + m) r times this is below n m.
        warm_start: each step begins with the right factor of the last one, kept for each tensor; False draws a new one.
        factors: type of sent factors and uncompressed values; the residual keeps the loss of "bf16".
        warmup_steps: steps at the start of training in which all values are sent uncompressed.
        parts: the parts of the flat tensor that is summed; None treats it as one square matrix.
    """

    local: ClassVar[bool] = False
    collective: ClassVar[str | None] = "low_rank"
    needs_feedback: ClassVar[bool] = True

    rank: int = 4
    min_compression_rate: float = 2.0
    warm_start: bool = True
    factors: Literal["f32", "bf16"] = "f32"
    warmup_steps: int = 0
    parts: tuple[Part, ...] | None = field(default=None, kw_only=True, compare=False, repr=False)

    @property
    def waits(self) -> bool:
        """Always: for whether its factors are finite, and which of their rows are zero."""
        return True

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ConfigError(f"powersgd codec: rank={self.rank!r}; expected at least 1")
        if isinstance(self.min_compression_rate, bool) or not isinstance(self.min_compression_rate, int | float):
            raise ConfigError(f"powersgd codec: min_compression_rate={self.min_compression_rate!r}; expected a factor")
        if not self.min_compression_rate > 0:
            raise ConfigError(f"powersgd codec: min_compression_rate={self.min_compression_rate!r}; expected above 0")
        if not isinstance(self.warm_start, bool):
            raise ConfigError(f"powersgd codec: warm_start={self.warm_start!r}; expected True or False")
        if self.factors not in _FACTORS:
            raise ConfigError(f"powersgd codec: factors={self.factors!r}; expected 'f32' or 'bf16'")
        if type(self.warmup_steps) is not int or self.warmup_steps < 0:
            raise ConfigError(f"powersgd codec: warmup_steps={self.warmup_steps!r}; expected at least 0")

    def at_step(self, step: int) -> Codec:
        return self if step >= self.warmup_steps else registry.get("raw", header=self.header)

    def for_parts(self, parts: Sequence[Part]) -> Codec:
        return replace(self, parts=tuple(parts))

    def rank_of(self, rows: int, columns: int) -> int:
        """Return the rank of a matrix's factors, or 0 if the matrix is not compressed."""
        rank = min(self.rank, rows, columns)
        return rank if (rows + columns) * rank * self.min_compression_rate < rows * columns else 0

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        (rows, columns), kind = square_shape(numel), _FACTORS[self.factors]
        rank = self.rank_of(rows, columns)
        if not rank:
            return [Plane("values", numel, kind)]
        return [Plane("left", rank * rows, kind), Plane("right", rank * columns, kind)]

    def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
        if len(planes) == 1:
            planes[0].copy_(x)
            return
        rows, columns = square_shape(x.numel())
        rank = planes[0].numel() // rows
        # Machines that add in other orders get f64 sums that differ by far less than an f32 resolves.
        matrix = torch.nn.functional.pad(x.double(), (0, rows * columns - x.numel())).view(rows, columns)
        start = random_factor(rank, columns, seed, offset).to(x.device)
        left = orthonormal((start.double() @ matrix.T).float()[None])[0].to(planes[0].dtype)
        planes[0].copy_(left.view(-1))
        planes[1].copy_((left.double() @ matrix).view(-1))

    def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
        if len(planes) == 1:
            out.copy_(planes[0])
            return
        rows, columns = square_shape(out.numel())
        left, right = (plane.float().view(-1, length) for plane, length in zip(planes, (rows, columns), strict=True))
        matrix = torch.empty(rows, columns, device=out.device)
        product(left, right, matrix)
        out.copy_(matrix.view(-1)[: out.numel()])
