"""Zipped collectives over real connections: messages long enough to be acknowledged, and several pieces."""

import pytest
import torch

from fusionlayer import codecs
from fusionlayer.collectives import zipped
from fusionlayer.collectives.switching import KINDS, SAMPLES, Switcher
from fusionlayer.transport._sum import sum_in_rank_order
from fusionlayer.transport.c10d import C10dTransport
from tests.codecs.conformance import same_bits
from tests.harness import run_ranks
from tests.tiers import tiered

from .conformance import same_everywhere
from .test_switching import everything
from .test_zipped import ordinary, values

pytestmark = pytest.mark.medium

MANY = 1_500_000


def hold(rank: int, world: int) -> str:
    transport = C10dTransport()
    for name in ("zip", "rans"):
        codec = codecs.get(name).bare
        lengths = [(r % 3) * MANY // 2 + 7 for r in range(world)]
        parts = [values(n, r, torch.bfloat16) for r, n in enumerate(lengths)]
        for piece in (None, 400_000):
            out = torch.empty(sum(lengths), dtype=torch.bfloat16)
            zipped.all_gather(parts[rank], out, codec, transport, lengths=lengths, piece=piece)
            assert same_bits(out, torch.cat(parts))
        for design in (1, 2):
            sends = [(rank * 3 + to) % 4 * 300_000 for to in range(world)]
            recvs = [(source * 3 + rank) % 4 * 300_000 for source in range(world)]
            x = torch.cat([values(n, 10 * rank + to, torch.float32) for to, n in enumerate(sends)])
            out = torch.empty(sum(recvs))
            zipped.all_to_all(x, out, sends, recvs, codec, transport, design=design)
            expected = [values(n, 10 * source + rank, torch.float32) for source, n in enumerate(recvs)]
            assert same_bits(out, torch.cat(expected))
        x = ordinary(MANY, rank, torch.float16)
        expected_sum = torch.empty_like(x)
        sum_in_rank_order([ordinary(MANY, r, torch.float16) for r in range(world)], expected_sum)
        zipped.zipped(x, codec, transport, piece=600_000)
        assert same_bits(x, expected_sum) and same_everywhere(transport, x)
    switcher = Switcher(transport)
    for _ in range(2 * SAMPLES + 2):
        everything(switcher, transport)
    told = str(switcher)
    transport.close()
    return told


@pytest.mark.parametrize("world", tiered([2, 3], lambda world: world == 3))
def test_bits_are_those_of_uncompressed_collectives(world: int) -> None:
    for told in run_ranks(hold, world):
        assert all(f"{kind} of " in told for kind in KINDS)
