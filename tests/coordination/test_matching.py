"""What the coordinator decides, request by request."""

import pytest
import torch

from fusionlayer.coordination.central import compute, fits
from fusionlayer.coordination.matching import Matcher, differing
from fusionlayer.coordination.requests import (
    Item,
    Reader,
    Reason,
    Request,
    Response,
    Signature,
    Writer,
    read_farewell,
    read_response,
    unflatten,
    write_farewell,
    write_response,
)

SUM = Signature("allreduce", dtypes=("float32",), shapes=((4,),), op="Sum")


def responses(matcher: Matcher) -> list[dict[int, Response]]:
    found = []
    while (response := matcher.next_responses()) is not None:
        found.append(response)
    return found


def test_what_all_ranks_have_asked_for_travels_together_in_one_order() -> None:
    matcher = Matcher(2, fusion_bytes=64)
    names = [f"x{i}" for i in range(5)]
    matcher.take(0, [Request(i, name, SUM) for i, name in enumerate(names)])
    assert responses(matcher) == []
    matcher.take(1, [Request(10 + i, name, SUM) for i, name in reversed(list(enumerate(names)))])
    first, second = responses(matcher)
    assert [item.handle for item in first[0].items] == [4, 3, 2, 1]  # 16 bytes each, 64 at most
    assert [item.handle for item in first[1].items] == [14, 13, 12, 11]
    assert [item.handle for item in second[0].items] == [0]
    assert matcher.stalls(-1.0) == []


def test_only_what_fits_together_is_fused_and_others_are_passed_by() -> None:
    matcher = Matcher(1, fusion_bytes=1 << 20)
    other = SUM._replace(op="Max")
    custom = SUM._replace(op="Sum by int8")
    for i, signature in enumerate((SUM, other, custom, SUM, custom)):
        matcher.take(0, [Request(i, f"x{i}", signature)])
    assert [[item.handle for item in each[0].items] for each in responses(matcher)] == [[0, 3], [1], [2], [4]]


def test_requests_of_the_same_name_keep_their_order() -> None:
    matcher = Matcher(2, fusion_bytes=0)
    matcher.take(0, [Request(1, "x", SUM), Request(-1, "x", SUM)])
    matcher.take(1, [Request(7, "x", SUM)])
    assert [each[1].code for each in responses(matcher)] == ["execute"]
    matcher.take(1, [Request(8, "x", SUM)])
    (failed,) = responses(matcher)
    assert failed[1].code == "fail" and "asked for it twice" in failed[1].why.text


def test_ranks_that_have_left_or_joined() -> None:
    matcher = Matcher(3, fusion_bytes=0)
    matcher.take(0, [Request(1, "x", SUM)])
    matcher.take(1, [Request(2, 0, Signature("join"))])
    matcher.take(2, [Request(3, "x", SUM)])
    announced, ready = responses(matcher)
    assert announced == dict.fromkeys((0, 2), Response("joined"))
    assert ready[1] == Response("execute", (Item(None, (), SUM),))
    matcher.take(0, [Request(4, "y", SUM)])
    matcher.leave(2, Reason("rank 2 is lost", (2,)))
    lost = responses(matcher)
    assert {rank for each in lost for rank in each} == {0, 1}
    assert all(response.code == "lost" for each in lost for response in each.values())
    assert matcher.first_loss == Reason("rank 2 is lost", (2,))


def test_ranks_that_wait_for_each_other_are_told_so_once_none_can_go_on() -> None:
    def blocked(handle: int) -> list[Request]:
        return [Request(0, 0, Signature("blocked"), (handle,))]

    matcher = Matcher(3, fusion_bytes=0)
    for rank in range(3):
        matcher.take(rank, [Request(1, "a", SUM)])
    matcher.take(0, blocked(1))  # it is done by now
    matcher.take(1, [Request(2, "x", SUM), *blocked(2)])
    matcher.take(2, [Request(2, 0, Signature("join"))])
    assert [each[1].code for each in responses(matcher) if 1 in each] == ["joined", "execute"]
    matcher.take(0, [Request(3, "y", SUM)])
    assert responses(matcher) == [], "rank 0 may ask for x yet"
    matcher.take(0, blocked(3))
    failed = {rank: each for found in responses(matcher) for rank, each in found.items()}
    assert {rank: (each.code, each.items[0].handle) for rank, each in failed.items()} == {
        0: ("fail", 3),
        1: ("fail", 2),
    }
    told = "wait for each other: rank 0 in allreduce 'y', rank 1 in allreduce 'x', rank 2 in join; make the same calls"
    assert all(told in each.why.text for each in failed.values())


def test_stalls_say_who_is_missing() -> None:
    matcher = Matcher(3, fusion_bytes=0)
    matcher.take(1, [Request(1, "x", SUM)])
    (stall,) = matcher.stalls(-1.0)
    assert stall.name == "allreduce 'x'" and stall.missing == (0, 2) and not stall.is_late
    matcher.take(0, [Request(1, "x", SUM)])
    matcher.take(2, [Request(1, "y", SUM)])
    late, early = matcher.stalls(-1.0)
    assert (late.missing, late.is_late) == ((2,), True), "most ranks wait for rank 2"
    assert (early.missing, early.is_late) == ((0, 1), False), "rank 2 alone is elsewhere"


@pytest.mark.parametrize(("odd", "to_blame"), [({1: 8}, (1,)), ({0: 8}, (0,)), ({1: 8, 2: 9}, (0, 1, 2))])
def test_of_requests_that_differ_the_odd_ones_are_named(odd: dict[int, int], to_blame: tuple[int, ...]) -> None:
    matcher = Matcher(3, fusion_bytes=0)
    for rank in range(3):
        matcher.take(rank, [Request(rank, "x", SUM._replace(shapes=((odd.get(rank, 4),),)))])
    (failed,) = responses(matcher)
    assert {rank: response.why.ranks for rank, response in failed.items()} == dict.fromkeys(range(3), to_blame)


def test_whom_most_ranks_contradict() -> None:
    assert differing({0: 5, 1: 5, 2: 5}) == ()
    assert differing({0: 5, 1: 6, 2: 5}) == (1,)
    assert differing({0: 6, 1: 5, 2: 5}) == (0,), "rank 0 is as likely wrong as any other"
    assert differing({0: 5, 3: 6}) == (0, 3)
    assert differing({0: 5, 1: 5, 2: 6, 3: 6}) == (0, 1, 2, 3)


def test_messages_come_back_as_they_were() -> None:
    writer, reader = Writer(capacity=3), Reader()
    gather = Signature("allgather", 2, ("int64", "bool"), ((3, 2), ()), "cpu", None, 0.5, 2.0, None, (1, 2))
    for step in range(4):
        requests = [
            Request(step, "x", SUM, (), b"0123456789abcdef"),
            Request(step + 1, step, gather, (4, step), None),
            Request(-1, f"once.{step}", SUM, (), b""),
        ]
        message = writer.write(requests)
        assert read_farewell(message) is None
        assert reader.read(message) == requests
    assert len(reader._known) <= 3 + 2
    assert read_farewell(write_farewell(Reason("gone", (2,)))) == Reason("gone", (2,))
    for response in (
        Response("ready"),
        Response("execute", (Item(3, (1, 2)), Item(None, (), gather), Item(0))),
        Response("take", (Item(3),), data=b"abc"),
        Response("fail", (Item(-1),), Reason("why", (2, 3))),
    ):
        assert read_response(write_response(response)) == response


def test_small_tensors_are_reduced_by_the_coordinator() -> None:
    given = [torch.tensor([1.0, 2.0, 3.0, 4.0]) * (rank + 1) for rank in range(2)]
    assert fits(SUM, given[:1], 2) and not fits(SUM, [torch.zeros(1 << 20)], 2)
    assert not fits(SUM._replace(op="Sum by int8"), given[:1], 2)
    requests = {rank: Request(rank, "x", SUM, (), x.numpy().tobytes()) for rank, x in enumerate(given)}
    half = SUM._replace(op="Average", postscale=3.0)
    found = torch.frombuffer(bytearray(compute(half, [requests], [0, 1])), dtype=torch.float32)
    assert torch.equal(found, (given[0] + given[1]) / 2 * 3)
    # A rank that has joined gives zeros, and is counted.
    found = torch.frombuffer(bytearray(compute(half, [requests], [0, 1, 2, 3])), dtype=torch.float32)
    assert torch.equal(found, (given[0] + given[1]) / 4 * 3)


def test_ranks_that_have_joined_hear_which_steps_have_begun() -> None:
    matcher = Matcher(3, fusion_bytes=0)
    begin, join = Signature("begin"), Signature("join")
    matcher.take(0, [Request(0, 0, begin, (0, 0, 4))])
    assert responses(matcher) == []  # nobody has joined
    matcher.take(1, [Request(5, 0, join, (0, 0, 3, 2, 1, 1))])
    assert responses(matcher) == [
        dict.fromkeys((0, 2), Response("joined")),
        {1: Response("begun", (Item(0, (0, 0, 4, 2, 1, 1)),))},
    ]
    matcher.take(2, [Request(0, 0, begin, (0, 0, 4))])  # known
    matcher.take(2, [Request(0, 0, begin, (0, 0, 5))])
    assert responses(matcher) == [{1: Response("begun", (Item(0, (0, 0, 5, 2, 1, 1)),))}]
    # What the last ranks have begun is told before they hear that all have joined.
    matcher.take(2, [Request(6, 0, join, (0, 0, 6))])
    matcher.take(0, [Request(7, 0, join, (0, 0, 5))])
    *told, joined = responses(matcher)
    assert [sorted(each) for each in told] == [[1, 2], [0, 1, 2]]
    assert unflatten(told[0][1].items[0].numbers) == {(0, 0): 6, (2, 1): 1} == unflatten(told[1][0].items[0].numbers)
    assert joined == {rank: Response("execute", (Item(handle, (0,)),)) for rank, handle in enumerate((7, 5, 6))}
