"""``omnireduce``: ranks agree on the blocks that any of them selects, and sum those."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import codecs
from ..codecs import Codec
from ..codecs.research.omnireduce import OmniReduce
from ..transport import Transport
from ._base import check_pair, collective
from .ring import ring


@collective(
    "omnireduce",
    takes=lambda codec, size: isinstance(codec, OmniReduce),
    because="sums the blocks that ranks select",
)
def omnireduce(x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None) -> None:
    """Sum the blocks that any rank has selected, in bf16 around a ring (DynamiQ, appendix C, after OmniReduce).

    1. Select: each rank selects its blocks with the most energy, as many as ``codec.share`` says.
    2. Union: ranks agree on the blocks that any rank has selected, with a byte for each block.
    3. Reduce: these blocks, one after the other, are summed around a ring in bf16. All other sums are 0.
    4. Adapt: the share changes, so that later unions approach the budget.

    A rank sends 2 (size - 1) / size of the union, 2 bytes a value. The size of the union depends on the values, and
    follows the budget only over several sums. ``residual`` keeps unsent values, and the loss of bf16.
    """
    check_pair("omnireduce", codec, transport.size)
    assert isinstance(codec, OmniReduce)
    numel, size = x.numel(), codec.block_size
    if not numel:
        return
    wanted = codec.travelling(numel)
    given = x.float() if residual is None else x + residual
    union = torch.zeros(codec.blocks(numel), dtype=torch.uint8, device=x.device)
    everything = wanted == codec.blocks(numel)
    union[codec.select(given, wanted if everything else codec.share.select(wanted, transport.size))] = 1
    transport.all_reduce_max(union)
    chosen = union.nonzero().view(-1)
    if not everything:
        codec.share.adapt(wanted, len(chosen))
    total = codec.rows(x.float())[chosen].view(-1)
    lost = None if residual is None else codec.rows(residual)[chosen].view(-1)
    ring(total, codecs.get("bf16").bare, transport, seed=seed, residual=lost)
    rows = codec.rows(given)
    if residual is not None and lost is not None:
        kept = rows.clone()
        kept[chosen] = lost.view(-1, size)
        kept = kept.view(-1)[:numel]
        residual.copy_(torch.where(kept.isfinite(), kept, residual))
    rows = torch.zeros_like(rows)
    rows[chosen] = total.view(-1, size)
    x.copy_(rows.view(-1)[:numel])
