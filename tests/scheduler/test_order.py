from hypothesis import given
from hypothesis import strategies as st

from fusionlayer.scheduler.order import MEASURED, WARM_UP, SendOrder, send_order
from fusionlayer.transport import Transport
from tests.ranks import over_threads

SECONDS = st.floats(0, 10, allow_nan=False)


def test_a_fast_network_sends_in_the_order_of_completion() -> None:
    assert send_order([0.0, 1.0, 2.0, 3.0], [0.5] * 4) == [0, 1, 2, 3]


def test_a_slow_network_sends_what_the_next_forward_wants_first() -> None:
    # 0 leaves at once and takes until 3; by then all are complete, and forward begins with the last one.
    assert send_order([0.0, 1.0, 2.0, 3.0], [3.0] * 4) == [0, 3, 2, 1]


def test_in_between_it_takes_the_latest_that_is_complete() -> None:
    # At 1.5 bucket 1 is alone, at 3.0 there are 2 and 3, then 4 has come.
    assert send_order([0.0, 1.0, 2.0, 3.0, 4.0], [1.5] * 5) == [0, 1, 3, 4, 2]


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=12))
def test_every_bucket_leaves_once_and_the_network_never_waits_without_need(buckets: list[tuple[float, float]]) -> None:
    ready, cost = [a for a, _ in buckets], [b for _, b in buckets]
    order = send_order(ready, cost)
    assert sorted(order) == list(range(len(buckets)))
    now = 0.0
    for place, index in enumerate(order):
        waiting = [i for i in order[place:] if ready[i] <= now]
        assert (index == max(waiting)) if waiting else ready[index] == min(ready[i] for i in order[place:])
        now = max(now, ready[index]) + cost[index]


def test_ranks_that_measured_differently_agree() -> None:
    def body(transport: Transport) -> list[int]:
        order = SendOrder(4, lanes=1)
        assert order.sequence == [0, 1, 2, 3]
        for _ in range(WARM_UP + MEASURED):
            assert not order.due
            for index in range(4):
                order.note_complete(index)
                # The mean of ranks says that the network is slow, rank 0 alone would not.
                order.note_sent(index, 0.0, transport.rank * 100.0)
            order.end_step()
        assert order.due
        order.agree(transport)
        order.end_step()
        assert not order.due
        return order.sequence

    first, *others = over_threads(3, body)
    assert all(other == first for other in others)
    assert first == [0, 3, 2, 1]
