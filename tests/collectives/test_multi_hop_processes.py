"""Ring and butterfly among processes of which one dies, or does something else, in the middle."""

import signal
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import TransportError
from fusionlayer.transport.c10d import C10dTransport
from tests.harness import checkpoint, outcomes_of

pytestmark = pytest.mark.medium

WORLD, LOST = 4, 2


def stop_at_a_hop(rank: int, world: int, name: str, hop: int, codec: str) -> None:
    transport = C10dTransport()
    transport.barrier()
    exchange, calls = transport.exchange, [0]

    def counting(messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        if rank == LOST and calls[0] == hop:
            checkpoint("hop")
        calls[0] += 1
        exchange(messages)

    transport.exchange = counting  # type: ignore[method-assign]
    collectives.get(name)(torch.ones(300_000), codecs.get(codec).bare, transport)


@pytest.mark.parametrize(
    ("name", "hop", "codec"),
    [("ring", 1, "int8"), ("ring", 3, "dynamiq"), ("butterfly", 0, "int8"), ("butterfly", 1, "dynamiq")],
)
def test_a_rank_that_dies_in_the_middle_is_named_on_all_others(name: str, hop: int, codec: str) -> None:
    outcomes = outcomes_of(stop_at_a_hop, WORLD, name, hop, codec, signals={(LOST, "hop"): signal.SIGKILL})
    assert outcomes[LOST].kind == "died"
    for rank, outcome in enumerate(outcomes):
        if rank != LOST:
            assert outcome.error[0] == "TransportError", outcome
            assert f"rank {LOST} is gone" in outcome.error[1]


def differ(rank: int, world: int) -> None:
    transport = C10dTransport(timeout=3)
    transport.barrier()
    name = "butterfly" if rank == 1 else "ring"
    with pytest.raises(TransportError):
        collectives.get(name)(torch.ones(5000), codecs.get("int8").bare, transport)


def test_ranks_in_different_collectives_time_out() -> None:
    outcomes = outcomes_of(differ, WORLD)
    assert [outcome.kind for outcome in outcomes] == ["returned"] * WORLD, outcomes
