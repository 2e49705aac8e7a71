"""Small agreements of many ranks: messages grow with the logarithm of their number, and results are those of few."""

import math
from collections.abc import Mapping

import pytest
import torch

from fusionlayer.base.errors import PlanMismatch
from fusionlayer.transport import Transport
from tests.ranks import on_threads, over_threads
from tests.tiers import tiered


@pytest.mark.parametrize("world", tiered([64, 256], fast=lambda world: world == 64))
def test_an_agreement_of_many_takes_each_rank_log2_messages(world: int) -> None:
    def agree(transport: Transport) -> int:
        sent, exchange = 0, transport.exchange

        def count(messages: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
            nonlocal sent
            sent += sum(x.numel() > 0 for x, _ in messages.values())
            exchange(messages)

        transport.exchange = count  # type: ignore[method-assign, assignment]
        transport.agree("the plan", "int8", 4)
        return sent

    assert over_threads(world, agree) == [math.ceil(math.log2(world))] * world


@pytest.mark.parametrize("world", [2, 3, 8, 9, 13, 16])
@on_threads()
def test_all_ranks_get_what_one_exchange_with_all_would_give(transport: Transport, world: int) -> None:
    rank = transport.rank
    transport.barrier()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        every = torch.stack([((torch.arange(5) * (3 * r + 1)) % 97 - 50).to(dtype) for r in range(world)])
        x = every[rank].clone()
        transport.all_reduce_max(x)
        assert torch.equal(x, every.amax(0))
    bits = torch.zeros(world, dtype=torch.uint8)
    bits[rank] = 1 << rank % 8
    transport.spread(bits, torch.bitwise_or)
    assert bits.tolist() == [1 << r % 8 for r in range(world)]
    assert transport.all_equal(b"ab") and not transport.all_equal(b"ab" if rank else b"aa")
    assert not transport.all_equal(bytes([rank % 2, 255 - rank % 2]))
    assert transport.all_equal(b"x" if rank else b"y", present=rank != 0), "who is absent has no say"
    assert transport.all_equal(bytes([rank]), present=False)
    odd = world // 2
    with pytest.raises(PlanMismatch, match="the plan differs") as caught:
        transport.agree("the plan", "int4" if rank != odd else "int8")
    assert caught.value.ranks == (odd,)
