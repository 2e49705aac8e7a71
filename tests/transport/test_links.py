"""What links share: sums in two exchanges, copies to memory that a link can reach, and who keeps the store."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusionlayer.transport._staging import bring
from fusionlayer.transport.c10d import C10dTransport
from fusionlayer.transport.links.base import LinkMessage
from fusionlayer.transport.links.exchange import WHOLE_BELOW_BYTES, ExchangeLink
from fusionlayer.transport.links.nccl import NcclLink
from fusionlayer.transport.rendezvous import Rendezvous
from tests.harness import run_ranks


class Noting(ExchangeLink):
    """Notes the keys of each exchange; nothing is sent."""

    def __init__(self) -> None:
        super().__init__(0, 3, 60.0, frozenset())
        self.keys: list[set[int]] = []

    def exchange(
        self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage], deadline: float | None = None
    ) -> None:
        self.keys.append({message.key for message in (*outgoing, *incoming)})

    def close(self) -> None:
        pass


def test_messages_of_two_exchanges_of_a_call_have_other_keys() -> None:
    for call in ("all_reduce", "broadcast"):
        link, x = Noting(), torch.zeros(WHOLE_BELOW_BYTES, dtype=torch.uint8)
        link.all_reduce(x, 7) if call == "all_reduce" else link.broadcast(x, 0, 7)
        first, second = link.keys
        assert first == {7} and len(second) == 1 and first != second, call


def test_each_tensor_is_copied_once_and_a_view_of_it_by_itself() -> None:
    x = torch.arange(8.0)
    whole, view, again = bring([x, x[:3], x], torch.device("meta"))
    assert whole is again and (whole.shape, view.shape) == (x.shape, (3,))


def test_the_keeper_of_the_store_has_another_rank_in_a_subset() -> None:
    known = Rendezvous(store=dist.HashStore(), name="all", rank=2, size=4, store_rank=3)
    some = known.narrowed((3, 0, 2), "some")
    assert (some.rank, some.size, some.store_rank) == (2, 3, 0)
    assert known.narrowed((1, 2), "others").store_rank is None


WORLD, NUMEL = 3, 1001


class OverGloo(NcclLink):
    """The calls that ``NcclLink`` makes, of a group of gloo on the CPU; ``exchange``, which gloo lacks, fails."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.calls = 0
        world: Any = dist.group.WORLD
        self._group = world._get_backend(self.device)

    @contextmanager
    def _operation(self) -> Iterator[None]:
        self.calls += 1
        yield


def row(source: int, to: int) -> Tensor:
    return torch.arange(NUMEL).add(10 * source + to).to(torch.uint8)


def move_rows(rank: int, world: int) -> tuple[int, int, int]:
    transport = C10dTransport()
    usual, link = transport._links["cpu"], OverGloo()
    transport._links["cpu"] = link
    before = transport.sequence, transport.bytes_sent
    every = torch.zeros(world, NUMEL, dtype=torch.uint8)
    transport.all_gather(row(rank, 0), every)
    assert torch.equal(every, torch.stack([row(source, 0) for source in range(world)]))
    every[(rank + 1) % world] = 0
    transport.all_gather(every[rank], every)  # in place
    assert torch.equal(every, torch.stack([row(source, 0) for source in range(world)]))
    transport.all_to_all(torch.stack([row(rank, to) for to in range(world)]), every)
    assert torch.equal(every, torch.stack([row(source, rank) for source in range(world)]))
    transport.all_gather(every[0, :0], every[:, :0])  # nothing to send
    with transport.doing("a test", "which adds 'w'"):
        transport.all_gather(every[rank], every)
    assert transport._watch is not None and transport._watch.position.recent[-1][1].why == "which adds 'w'"
    calls = transport.sequence - before[0]
    sent = transport.bytes_sent - before[1]
    transport._links["cpu"] = usual
    transport.barrier()
    transport.close()
    return link.calls, calls, sent


@pytest.mark.medium
def test_rows_travel_by_one_call() -> None:
    """However many ranks there are; one message for each of them is ``exchange``."""
    assert run_ranks(move_rows, WORLD) == [(4, 5, 4 * (WORLD - 1) * NUMEL)] * WORLD
