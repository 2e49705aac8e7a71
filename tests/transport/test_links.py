"""What links share: sums in two exchanges, copies to memory that a link can reach, and who keeps the store."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusionlayer.transport._staging import bring
from fusionlayer.transport.links.base import LinkMessage
from fusionlayer.transport.links.exchange import WHOLE_BELOW_BYTES, ExchangeLink
from fusionlayer.transport.rendezvous import Rendezvous


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
