"""omnireduce: the blocks that any rank has selected are summed, the others are not."""

import pytest
import torch

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs.research.omnireduce import OmniReduce, Share
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads, over_threads


def test_the_share_follows_the_union_with_momentum() -> None:
    """Equation 1 of DynamiQ's appendix C: k = 100, K = 400, K' = 500 give 96."""
    share = Share()
    assert share.select(400, 4) == 100
    share.adapt(400, 500)
    assert share.select(400, 4) == 96
    assert share.select(1, 4) == 1


@looped("world", [1, 2, 3, 5])
@on_threads()
def test_blocks_that_any_rank_selects_are_summed(transport: Transport, world: int) -> None:
    numel = 20 * 32 + 7
    codec = OmniReduce(bits=8, block_size=32, header=False)
    x = torch.full((numel,), 2.0**-9)
    mine = slice(32 * transport.rank, 32 * transport.rank + 32)
    x[mine] = 3.0
    collectives.get("omnireduce")(x, codec, transport, residual=(residual := torch.zeros(numel)))
    selected = max(1, round(10 / world))
    union = {rank for rank in range(world)}
    for rank in range(world):
        union |= set([rank, *[b for b in range(21) if b != rank]][:selected])
    expected = torch.zeros(numel)
    for rank in range(world):
        own = torch.full((numel,), 2.0**-9)
        own[32 * rank : 32 * rank + 32] = 3.0
        expected += own
    blocks = torch.arange(numel) // 32
    travelled = torch.isin(blocks, torch.tensor(sorted(union)))
    assert torch.allclose(x[travelled], expected[travelled], rtol=0.01)
    assert not x[~travelled].any()
    assert torch.equal(residual[~travelled], torch.full((int((~travelled).sum()),), 2.0**-9))


def test_the_union_comes_to_the_budget() -> None:
    numel = 400 * 32

    def body(transport: Transport) -> int:
        codec = OmniReduce(bits=4, block_size=32, header=False)
        for step in range(40):
            rng = torch.Generator().manual_seed(1000 * step + transport.rank)
            x = torch.randn(numel, generator=rng) * torch.randn(400, generator=rng).repeat_interleave(32)
            collectives.get("omnireduce")(x, codec, transport)
        return int(x.view(400, 32).any(1).sum())

    union = over_threads(4, body)
    assert len(set(union)) == 1
    assert 85 <= union[0] <= 115, "a quarter of the blocks, give or take what a step has"


@on_threads(1)
def test_other_codecs_are_refused(transport: Transport) -> None:
    with pytest.raises(ConfigError, match="sums the blocks"):
        collectives.get("omnireduce")(torch.ones(8), codecs.get("int8").bare, transport)
