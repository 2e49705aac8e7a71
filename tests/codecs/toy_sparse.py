"""A sparse codec in a few torch operations: what the layers above codecs are tested with."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.codecs import Codec, TensorState, TorchCodec, VariableSizeCodec
from fusionlayer.codecs.base import registry
from fusionlayer.native.wire import Plane


@contextmanager
def toy_sparse() -> Iterator[None]:
    """Let ``toysparse`` be a codec for a while."""

    @dataclass(frozen=True)
    class ToySparse(VariableSizeCodec, TorchCodec, name="toysparse"):
        """Sends elements of at least ``threshold``, the first of them up to the ``density``; the rest is kept."""

        ahead = True
        align = 16

        density: float = 0.25
        threshold: float = 0.0
        warmup: int = 0

        def at_step(self, step: int) -> Codec:
            return replace(self, density=self.density / 2, warmup=0) if step < self.warmup else replace(self, warmup=0)

        def pairs(self, numel: int) -> int:
            return min(numel, max(1, math.floor(self.density * numel)))

        def encode_tensor(
            self, x: Tensor, payload: Tensor, state: TensorState, *, scale: float = 1.0, ranks: int = 1, seed: int = 0
        ) -> None:
            state.numbers["steps"] = state.numbers.get("steps", 0) + 1
            total = state.tensors.setdefault("total", torch.zeros_like(x, dtype=torch.float32))
            total += x * scale
            super().encode_tensor(x, payload, state, scale=scale, ranks=ranks, seed=seed)

        def compact(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
            count, positions, values = self.wire(numel, dtype).views(payload)
            used = int(count) if numel else 0
            return torch.cat([positions[:used].view(torch.uint8), values[:used].view(torch.uint8)])

        def expand(self, data: Tensor, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> None:
            used = data.numel() // 8
            count, positions, values = self.wire(numel, dtype).views(payload)
            count.fill_(used)
            positions[:used].copy_(data[: 4 * used].view(torch.int32))
            values[:used].copy_(data[4 * used :].view(torch.float32))

        def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
            pairs = self.pairs(numel)
            return [
                Plane("count", min(numel, 1), torch.int32),
                Plane("positions", pairs, torch.int32),
                Plane("values", pairs, torch.float32),
            ]

        def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
            if not x.numel():
                return
            count, positions, values = planes
            limit = x.float().abs().nan_to_num(torch.inf).sort(descending=True).values[self.pairs(x.numel()) - 1]
            passed = ~(x.abs() < max(float(limit), self.threshold)) & (x != 0)
            found = torch.nonzero(passed).view(-1)[: self.pairs(x.numel())]
            for plane in planes:
                plane.zero_()
            count.fill_(len(found))
            positions[: len(found)].copy_(found)
            values[: len(found)].copy_(x[found])

        def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
            count, positions, values = planes
            out.zero_()
            if not out.numel():
                return
            out[positions[: int(count)].long()] = values[: int(count)].to(out.dtype)

    try:
        codecs.get("toysparse")
        yield
    finally:
        registry.remove("toysparse")
