"""Copies of weights that differences keep up to date: the same bits on all ranks, near the weights, sent once."""

import pytest
import torch
from torch import Tensor

import fusionlayer as fl
from fusionlayer.sharded.replica import Replica
from fusionlayer.training.weights import Weights
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient

NUMEL = 5000  # of each rank: groups of 2048 and a part of one
CODEC = Weights.of("qwd").codec


def weights_at(step: int, rank: int) -> Tensor:
    """Return a rank's weights after so many steps, each of which changes them by a thousandth or so."""
    walk = sum((gradient(NUMEL, 50 * i + rank) for i in range(1, step + 1)), torch.zeros(NUMEL))
    return gradient(NUMEL, rank) + 1e-3 * walk


@looped("world, per_node", [(4, 2), (8, 4), (3, 3)])
@looped("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_equal_and_stay_near(world: int, per_node: int, dtype: torch.dtype) -> None:
    def body(transport: Transport) -> tuple[Tensor, list[float]]:
        replica = Replica(CODEC)
        memory = replica.memory(world * NUMEL, dtype, torch.device("cpu"))
        mine = memory.view(world, NUMEL)[transport.rank]
        weights, excess = gradient(NUMEL, transport.rank), []
        for step in range(40):
            mine.copy_(weights)  # as FSDP does, whose all-gather has its input in its output
            shard = mine.clone()
            change = 0.0 if replica.own is None else float((shard.float() - replica.own).abs().max())
            replica.gather(mine, transport, step)
            left = float((shard.float() - mine).abs().max())
            # Codes are a seventh of the largest change apart; and the sum is rounded.
            excess.append(left - change / 14 - 1.01 * float(shard.abs().max()) * torch.finfo(dtype).eps)
            assert replica.own is not None and torch.equal(replica.own, mine)
            weights = weights + 1e-3 * gradient(NUMEL, 50 * (step + 1) + transport.rank)
        return memory.clone(), excess

    results = over_threads(world, body, ranks_per_node=per_node)
    for memory, excess in results:
        assert torch.equal(memory.view(torch.uint8), results[0][0].view(torch.uint8))
        assert max(excess) <= 0


def test_one_version_travels_once_and_whole_weights_first() -> None:
    def body(transport: Transport) -> list[int]:
        replica, sent = Replica(CODEC), []
        memory = replica.memory(2 * NUMEL, torch.bfloat16, torch.device("cpu"))
        mine = memory.view(2, NUMEL)[transport.rank]
        for version, forget in ((0, False), (0, False), (1, False), (1, False), (3, False), (3, True)):
            if forget:
                replica.forget()
            before = transport.bytes_sent
            mine.copy_(weights_at(version, transport.rank))
            replica.gather(mine, transport, version)
            sent.append(transport.bytes_sent - before)
        assert torch.equal(mine, weights_at(3, transport.rank).bfloat16())
        assert replica.nbytes == 3 * NUMEL * 2
        return sent

    coded = CODEC.wire(NUMEL, torch.float32).capacity
    whole = 2 * NUMEL
    for sent in over_threads(2, body):
        assert sent == [whole, 0, coded, 0, coded, whole]


@on_threads(2)
def test_a_replica_goes_on_from_the_parts_of_all_ranks(transport: Transport) -> None:
    device = torch.device("cpu")
    kept, again = Replica(CODEC), Replica(CODEC)
    first, second = (replica.memory(2 * NUMEL, torch.float32, device) for replica in (kept, again))
    for version in range(6):
        if version == 3:
            assert kept.own is not None
            again.restore(kept.own.clone(), 2)
        for replica in (kept, again)[: 1 + (version >= 3)]:
            replica.gather(weights_at(version, transport.rank), transport, version)
        assert version < 3 or torch.equal(first, second)
    with pytest.raises(fl.ConfigError, match=r"10 weights of .*float32 .* where 10000 .* keeps its shape"):
        kept.memory(10, torch.float32, device)
