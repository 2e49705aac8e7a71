"""The order in which blocks of a tensor are sent, and the means that are subtracted from them first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arrangement:
    """The order in which blocks of a tensor are sent, and the mean subtracted from each; the same on all ranks.

    Attributes:
        numel: elements of the tensor.
        block: elements of a block; the last one is filled up with zeros.
        order: (m,) int64, for each place the block that is sent there; None keeps the order of blocks.
        means: (m,) f32, subtracted from each block on every rank; None subtracts nothing.
        ranks: number of ranks that subtract the means.
    """

    numel: int
    block: int
    order: Tensor | None
    means: Tensor | None
    ranks: int

    def arrange(self, x: Tensor, *, centred: bool = True) -> Tensor:
        """Return a copy of ``x`` (numel,) in wire order, less the means if ``centred``: (m * block,) f32."""
        missing = -self.numel % self.block
        rows = torch.nn.functional.pad(x.float(), (0, missing)).view(-1, self.block)
        rows = rows.clone() if self.order is None else rows.index_select(0, self.order)
        if centred and self.means is not None:
            rows -= (self.means if self.order is None else self.means[self.order])[:, None]
        if missing:
            last = len(rows) - 1
            rows[last if self.order is None else self.order == last, self.block - missing :] = 0
        return rows.view(-1)

    def restore(self, total: Tensor, out: Tensor, *, centred: bool = True) -> None:
        """Fill ``out`` (numel,) from ``total`` (m * block,) f32, a sum over ranks in wire order.

        If ``centred``, the means that the ranks subtracted are added back.
        """
        rows = total.view(-1, self.block)
        if self.order is not None:
            rows = torch.empty_like(rows).index_copy_(0, self.order, rows)
        if centred and self.means is not None:
            rows = rows + (self.means * self.ranks)[:, None]
        out.copy_(rows.view(-1)[: self.numel])
