"""Tensors like those that training sends, and what collectives lose of their sums."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.codecs import Codec
from fusionlayer.codecs.research.omnireduce import OmniReduce
from fusionlayer.transport import local

__all__ = ["adapt", "gaussian", "skewed", "sum_error", "tensor_parallel"]

SUMS = 24
"""All-reduces before the one that counts, for codecs that adapt to what they have seen."""
RUN, GROUP = 256, 16


def gaussian(workers: int, numel: int) -> list[Tensor]:
    """Return each worker's (numel,) of N(0, 0.02^2), independent of the others', in bf16's precision."""
    rng = torch.Generator().manual_seed(9)
    return [(0.02 * torch.randn(numel, generator=rng)).bfloat16().float() for _ in range(workers)]


def skewed(workers: int, numel: int) -> list[Tensor]:
    """Return each worker's (numel,) like gradients of a trained model, in bf16's precision."""
    rng = torch.Generator().manual_seed(2)
    runs = numel // RUN
    cold = _wandering(runs, 0.995, rng)
    threshold = cold.quantile(0.3)
    size = 1.2 * _wandering(runs, 0.97, rng)
    size -= torch.where(cold < threshold, 3.5 + threshold - cold, 0.0)
    jitter = 0.35 * torch.randn(numel // GROUP, generator=rng)
    scale = 1e-3 * torch.exp(size.repeat_interleave(RUN) + jitter.repeat_interleave(GROUP))
    mean = 0.05e-3 * (torch.exp(size) * torch.randn(runs, generator=rng)).repeat_interleave(RUN)
    common = _heavy_tailed(numel, rng)
    every = []
    for _ in range(workers):
        own = _heavy_tailed(numel, rng)
        every.append((scale * 0.5**0.5 * (common + own) + mean).bfloat16().float())
    return every


def tensor_parallel(numel: int, channels: int = 1024) -> Tensor:
    """Return (numel,) like what a row-parallel layer sums: most values near zero, few channels far out."""
    rng, tokens = torch.Generator().manual_seed(0), numel // channels
    sizes = torch.exp(0.7 * torch.randn(1, channels, generator=rng))
    sizes = sizes + 40 * (torch.rand(1, channels, generator=rng) < 0.004)
    magnitude = -torch.log(torch.rand(tokens, channels, generator=rng).clamp(min=1e-7))
    sign = torch.sign(torch.rand(tokens, channels, generator=rng) - 0.5)
    x = 2e-3 * torch.exp(0.6 * torch.randn(tokens, 1, generator=rng)) * sizes * sign * magnitude
    return x.reshape(-1).bfloat16().float()


def sum_error(algorithm: str, codec: Codec | Sequence[Codec], inputs: Sequence[Tensor]) -> float:
    """Return the squared error of the sum of each worker's (n,) f32 by a collective, over its squared norm."""
    reduce = collectives.get(algorithm)
    each = [codec] * len(inputs) if isinstance(codec, Codec) else codec

    def worker(rank: int) -> Tensor | None:
        transport = local.current()
        assert transport is not None
        x = inputs[rank].clone()
        reduce(x, each[rank].bare, transport, seed=1)
        return x if rank == 0 else None  # all have the same bits

    result = local.run(worker, len(inputs))[0]
    assert result is not None
    exact = torch.zeros_like(result, dtype=torch.float64)
    for x in inputs:
        exact += x
    return float((result - exact).square().sum() / exact.square().sum())


def adapt(name: str, inputs: Sequence[Tensor]) -> list[Codec]:
    """Return a codec for each worker; those of OmniReduce have adapted their shares to sums of ``inputs``."""
    each = [codecs.get(name).bare for _ in inputs]
    shares = [codec for codec in each if isinstance(codec, OmniReduce)]
    for _ in range(SUMS if shares else 0):
        first = shares[0]
        wanted = first.travelling(inputs[0].numel())
        count = first.share.select(wanted, len(inputs))
        union = torch.cat([first.select(x, count) for x in inputs]).unique()
        first.share.adapt(wanted, len(union))
        for codec in shares[1:]:
            codec.share.value = first.share.value
    return each


def _wandering(numel: int, memory: float, rng: torch.Generator) -> Tensor:
    """Return (numel,) of variance 1 of which each is ``memory`` of the one before."""
    values, value = [], 0.0
    for step in torch.randn(numel, generator=rng, dtype=torch.float64).tolist():
        value = memory * value + (1 - memory**2) ** 0.5 * step
        values.append(value)
    return torch.tensor(values)


def _heavy_tailed(numel: int, rng: torch.Generator, freedom: int = 6) -> Tensor:
    """Return (numel,) of Student's t distribution."""
    squares = torch.randn(freedom, numel, generator=rng).square().sum(0)
    return torch.randn(numel, generator=rng) / (squares / freedom).sqrt()
