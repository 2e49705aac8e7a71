import threading
from collections.abc import Callable

import pytest
import torch

from fusionlayer.base.errors import TransportError, WireError
from fusionlayer.transport import LocalTransport, Transport, local
from fusionlayer.transport.composed import by_rank
from tests.loops import looped
from tests.ranks import on_ranks
from tests.tiers import tiered

from .conformance import CHECKS


def mine() -> LocalTransport:
    transport = local.current()
    assert transport is not None
    return transport


@pytest.mark.parametrize("world", tiered([1, 2, 3, 4, 5, 8], lambda world: world in (1, 2, 5)))
@looped("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Transport], None], world: int) -> None:
    local.run(lambda rank: check(mine()), world)


def test_a_rank_runs_its_backward_itself() -> None:
    """That of CUDA tensors, too, for which autograd has threads that belong to no rank."""
    assert torch._C._is_multithreading_enabled()
    assert local.run(lambda _: torch._C._is_multithreading_enabled(), 2) == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_64_ranks() -> None:
    def body(rank: int) -> float:
        transport = mine()
        x = torch.full((100_000,), float(rank))
        transport.all_reduce(x)
        gathered = torch.empty(64, 1, dtype=torch.uint8)
        transport.all_gather(torch.tensor([rank], dtype=torch.uint8), gathered)
        assert gathered[:, 0].tolist() == list(range(64))
        return x[99_999].item()

    assert local.run(body, 64) == [64 * 63 / 2] * 64


def test_results_are_in_rank_order_and_current_is_of_the_thread() -> None:
    assert local.current() is None
    assert local.run(lambda rank: (rank, mine().rank, mine().size), 3) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    assert local.current() is None


def test_torch_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert local.run(lambda rank: torch.get_num_threads(), 3) == [1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_first_error_is_raised_and_the_others_are_released() -> None:
    released = []

    def body(rank: int) -> None:
        if rank == 2:
            raise WireError("not what it should be")
        try:
            mine().barrier()
        except TransportError as error:
            released.append((rank, error.ranks))
            raise

    with pytest.raises(WireError, match="rank 2: not what it should be"):
        local.run(body, 4)
    assert sorted(released) == [(0, (2,)), (1, (2,)), (3, (2,))]


def test_an_error_ends_calls_on_duplicates_and_waits_for_letters() -> None:
    def body(rank: int) -> None:
        twin = mine().duplicate()
        if rank == 0:
            twin.barrier()
        if rank == 1:
            mine().recv(torch.empty(1), 2)
        if rank == 2:
            raise KeyError("x")

    with pytest.raises(KeyError):
        local.run(body, 3)


def test_a_rank_that_does_not_come_is_named_by_all_others() -> None:
    over, both = threading.Event(), threading.Barrier(2)
    errors: list[TransportError] = []

    def body(rank: int) -> None:
        if rank == 1:
            over.wait(180)
            with pytest.raises(TransportError, match="rank 1 did not come"):
                mine().barrier()
            return
        both.wait(180)
        with pytest.raises(TransportError, match=r"collective \d+: rank 1 did not come within 0.3 s") as caught:
            mine().barrier()
        errors.append(caught.value)
        if len(errors) == 2:
            over.set()

    local.run(body, 3, timeout=0.3)
    assert [(error.ranks, error.sequence) for error in errors] == [((1,), 1)] * 2


@on_ranks(3)
def test_a_rank_that_leaves_is_not_waited_for(rank: int) -> None:
    if rank == 1:
        return
    with pytest.raises(TransportError, match="rank 1 left") as caught:
        mine().barrier()
    assert caught.value.ranks == (1,)


def test_what_was_sent_before_leaving_arrives() -> None:
    def body(rank: int) -> float:
        if rank == 0:
            mine().send(torch.tensor([4.0]), 1, tag=1)
            mine().send(torch.tensor([5.0]), 1, tag=2)
            return 0.0
        later, sooner = torch.empty(1), torch.empty(1)
        mine().recv(later, 0, tag=2)
        mine().recv(sooner, 0, tag=1)
        return 10 * later.item() + sooner.item()

    assert local.run(body, 2)[1] == 54.0


def test_lengths_that_differ_raise_on_both_ranks_and_name_both() -> None:
    def body(rank: int) -> str:
        sends = [torch.zeros(5, dtype=torch.uint8)] * 2
        recvs = [torch.zeros(5 + 2 * (rank == 0 and r == 1), dtype=torch.uint8) for r in range(2)]
        with pytest.raises(TransportError) as caught:
            mine().exchange(by_rank(sends, recvs))
        assert caught.value.ranks == (0, 1)
        with pytest.raises(TransportError):
            mine().barrier()
        return str(caught.value)

    for text in local.run(body, 2):
        assert "rank 1 sends 5 bytes to rank 0, which expects 7 bytes" in text


@on_ranks(3)
def test_shapes_of_all_reduce_that_differ_raise_on_all_ranks(rank: int) -> None:
    with pytest.raises(TransportError, match=r"all_reduce of \d x float32"):
        mine().all_reduce(torch.ones(3 + (rank == 1)))


@on_ranks(2)
def test_a_message_of_another_length_is_refused(rank: int) -> None:
    if rank == 0:
        mine().send(torch.zeros(5), 1)
        return
    with pytest.raises(TransportError, match="rank 0 sends 20 bytes to rank 1, which expects 24 bytes"):
        mine().recv(torch.zeros(6), 0)
