"""Batch normalization with the mean and variance of all ranks' batches, on CPU and GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from . import mpi_ops as ops
from .basics import size


class SyncBatchNorm(_BatchNorm):
    """Batch normalization of (N, C, ...). In training its statistics are those of all ranks' batches together.

    Batches may differ in size between ranks, and may be empty on some. The gradients of weight and bias are this
    rank's; the optimizer averages them. The gradient of the input includes the other ranks' outputs.

    Args:
        num_features: channels C.
        eps: added to the variance.
        momentum: share of the newest batch in the running statistics; None: the mean of all batches.
        affine: learn a weight and a bias for each channel.
        track_running_stats: keep running statistics, and use them in evaluation.

    Raises:
        ValueError: in forward, if the input has fewer than 2 dimensions, or all ranks together have fewer than two
            values per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input`` normalized, of the same shape and type."""
        if size() == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps
        )
        if self.training and self.track_running_stats:
            self._follow(mean, variance, int(count))
        result: Tensor = output
        return result

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Move the running statistics towards those of this batch. The unbiased variance is used."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), share)


class _Normalize(torch.autograd.Function):
    """Normalizes over all ranks. Forward gathers 2 C + 1 values per rank, backward sums 2 C values over ranks."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        x = input.to(wide)
        channels = x.size(1)
        over = [0, *range(2, x.dim())]
        number = x.numel() // channels
        # Each rank sums squared distances from its own mean. Plain sums of squares would lose digits by cancellation.
        mine = torch.zeros(1, 2 * channels + 1, dtype=torch.float64, device=x.device)
        if number:
            mean = x.mean(over)
            mine[0, 0] = number
            mine[0, 1 : channels + 1] = mean
            mine[0, channels + 1 :] = (x - _spread(mean, x)).square().sum(over)
        every = ops.allgather(mine, "sync_batch_norm.statistics")
        counts, means, squares = every.split([1, channels, channels], dim=1)
        count = counts.sum()
        if count < 2:
            raise ValueError(f"expected more than 1 value per channel over all ranks when training, got {int(count)}")
        mean64 = (counts * means).sum(0) / count
        variance = (squares + counts * (means - mean64).square()).sum(0) / count
        mean, scale = mean64.to(wide), (variance + eps).rsqrt().to(wide)
        normal = (x - _spread(mean, x)) * _spread(scale, x)
        ctx.save_for_backward(input, weight, mean, scale, count)
        if weight is not None and bias is not None:
            normal = normal * _spread(weight.to(wide), x) + _spread(bias.to(wide), x)
        ctx.mark_non_differentiable(mean64, variance, count)
        return normal.to(input.dtype), mean64, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, scale, count = ctx.saved_tensors
        wide = mean.dtype
        dy = gradients[0].to(wide)
        over = [0, *range(2, dy.dim())]
        centred = input.to(wide) - _spread(mean, dy)
        sums = torch.stack([dy.sum(over), (dy * centred).sum(over)])
        of_weight = (sums[1] * scale).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = sums[0].to(weight.dtype) if ctx.needs_input_grad[2] else None
        of_input = None
        if ctx.needs_input_grad[0]:
            means = ops.allreduce(sums, name="sync_batch_norm.gradients", op=ops.Sum) / count
            means = means.to(wide)
            of_input = dy - _spread(means[0], dy) - centred * _spread(means[1] * scale.square(), dy)
            of_input = of_input * _spread(scale if weight is None else scale * weight.to(wide), dy)
            of_input = of_input.to(input.dtype)
        return of_input, of_weight, of_bias, None


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """Return (C,) ``values`` in a shape that broadcasts to ``like``, (N, C, ...)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))
