"""``raw``, ``bf16`` and ``fp16``: the values themselves, unchanged or narrowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ... import native
from ...native.wire import Plane
from ..native import NativeCodec


@dataclass(frozen=True)
class Raw(NativeCodec, name="raw"):
    """Values unchanged, in the type they have: lossless."""

    lossless: ClassVar[bool] = True
    _narrow: ClassVar[torch.dtype | None] = None

    @property
    def feedback_pays(self) -> bool:
        """Never: the loss of a cast is far below the noise of a gradient."""
        return False

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        return [Plane("values", numel, self._narrow or dtype)]

    def _params(self, dtype: torch.dtype) -> native.CodecParams:
        return native.CodecParams(native.CAST, (native.DTYPES[self._narrow or dtype],))


@dataclass(frozen=True)
class BF16(Raw, name="bf16"):
    """Values rounded to the nearest bfloat16, ties to even: f32's range, 8 bits of precision."""

    lossless: ClassVar[bool] = False
    _narrow: ClassVar[torch.dtype | None] = torch.bfloat16


@dataclass(frozen=True)
class FP16(Raw, name="fp16"):
    """Values rounded to the nearest float16, ties to even; beyond 65504 they become Inf, which loss scaling sees."""

    lossless: ClassVar[bool] = False
    _narrow: ClassVar[torch.dtype | None] = torch.float16
