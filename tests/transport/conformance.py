"""What every transport must do: each check is called on all ranks of a group at once, with that rank's transport."""

import threading
from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor

from fusionlayer.base.errors import ConfigError, PlanMismatch, TransportError
from fusionlayer.transport import Transport
from fusionlayer.transport.composed import by_rank

# One more and one less than each length at which a message may be cut or handled another way.
LENGTHS = [0, 1, 100, 4095, 4096, 4097, 65535, 65536, 65537, (1 << 20) - 1, 1 << 20, (1 << 20) + 1]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
]


def message(sender: int, receiver: int, length: int) -> Tensor:
    """Return bytes that no other pair of ranks exchanges."""
    return ((torch.arange(length) * (2 * sender + 1) + 7 * receiver) % 251).to(torch.uint8)


def ranks_bits(transport: Transport, x: Tensor) -> list[Tensor]:
    """Return the bytes of every rank's ``x``."""
    mine = x.contiguous().view(-1).view(torch.uint8)
    every = torch.empty(transport.size, mine.numel(), dtype=torch.uint8)
    transport.all_gather(mine, every)
    return list(every.unbind(0))


def exchange_moves_messages_of_any_length(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    for shift in range(len(LENGTHS)):

        def length(sender: int, receiver: int, shift: int = shift) -> int:
            return LENGTHS[(3 * sender + 5 * receiver + shift) % len(LENGTHS)]

        sends = [message(rank, other, length(rank, other)) for other in range(size)]
        guarded = [torch.full((length(other, rank) + 16,), 255, dtype=torch.uint8) for other in range(size)]
        transport.exchange(by_rank(sends, [g[8:-8] for g in guarded]))
        for other, got in enumerate(guarded):
            assert torch.equal(got[8:-8], message(other, rank, length(other, rank))), (shift, other)
            assert (got[:8] == 255).all() and (got[-8:] == 255).all(), (shift, other)


def exchange_with_neighbours_only(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    for hop in range(5):
        given, got = message(rank, hop, 1000), torch.empty(1000, dtype=torch.uint8)
        messages = {following: (given, got[:0])}
        messages[previous] = (given if following == previous else got[:0], got)
        transport.exchange(messages)
        assert torch.equal(got, message(previous, hop, 1000))


def exchange_with_some_ranks_that_have_no_message(transport: Transport) -> None:
    """Ranks 0 and 1 swap bytes; the others take part with nothing, and no rank has an entry for itself."""
    rank, got = transport.rank, torch.empty(100, dtype=torch.uint8)
    pair = rank < 2 <= transport.size
    transport.exchange({1 - rank: (message(rank, 0, 100), got)} if pair else {})
    assert not pair or torch.equal(got, message(1 - rank, 0, 100))


def all_gather_and_all_to_all(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    for n in (1, 70_000):
        gathered = torch.empty(size, n, dtype=torch.uint8)
        transport.all_gather(message(rank, 0, n), gathered)
        assert all(torch.equal(gathered[r], message(r, 0, n)) for r in range(size))
        swapped = torch.empty(size, n, dtype=torch.uint8)
        transport.all_to_all(torch.stack([message(rank, r, n) for r in range(size)]), swapped)
        assert all(torch.equal(swapped[r], message(r, rank, n)) for r in range(size))


def all_reduce_adds_and_gives_all_ranks_the_same_bits(transport: Transport) -> None:
    for dtype in DTYPES:
        for shape in ((), (1,), (0,), (7,), (33, 67), (1 << 18,), ((1 << 18) + 1,)):
            xs = []
            for rank in range(transport.size):
                values = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 20
                xs.append(values.to(dtype) if dtype.is_floating_point else values.round().abs().to(dtype))
            total = xs[0].to(torch.float32 if dtype.itemsize == 2 else dtype).clone()
            for x in xs[1:]:
                total += x
            result = xs[transport.rank].clone()
            transport.all_reduce(result)
            # float32 may be added in another order; what is shorter is added in float32 and rounded once.
            exact = dtype.itemsize <= 2 or not dtype.is_floating_point
            torch.testing.assert_close(result, total.to(dtype), **({"rtol": 0, "atol": 0} if exact else {}))
            bits = ranks_bits(transport, result)
            assert all(torch.equal(mine, bits[0]) for mine in bits), (dtype, shape)


def all_reduce_lets_nan_and_infinity_through(transport: Transport) -> None:
    x = torch.ones(10_000)
    if transport.rank == transport.size - 1:
        x[3], x[9_999] = float("nan"), float("inf")
    transport.all_reduce(x)
    assert x[3].isnan() and x[9_999].isinf() and x[4] == transport.size


def all_reduce_max_keeps_the_largest(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.int64):
        for n in (0, 1, 5, 4097):
            every = torch.stack([((torch.arange(n) * (3 * r + 1)) % 97 - 50).to(dtype) for r in range(size)])
            x = every[rank].clone()
            transport.all_reduce_max(x)
            assert torch.equal(x, every.amax(0)), (dtype, n)
    for n in (3, 4097):
        x = torch.full((n,), float(rank))
        x[rank % n] = float("nan") if rank == size - 1 else float("inf")
        transport.all_reduce_max(x)
        assert x[(size - 1) % n].isnan() and (x.isinf().sum() >= min(size, n) - 1)
        assert (x[size:] == size - 1).all()


def broadcast_from_every_rank(transport: Transport) -> None:
    for root in range(transport.size):
        for x in (
            torch.arange(5),
            torch.randn(300, 101, generator=torch.Generator().manual_seed(root)),
            torch.tensor(2.5),
        ):
            mine = x.clone() if transport.rank == root else torch.zeros_like(x)
            transport.broadcast(mine, root)
            assert torch.equal(mine, x)


def send_and_recv_by_tag(transport: Transport) -> None:
    if transport.size == 1:
        return
    rank, size = transport.rank, transport.size
    for tag, n in ((0, 1), (7, 0), (7, 5000), (2**31, 300_000), (3, 2_000_000)):
        for sender in range(size):
            receiver = (sender + 1) % size
            if rank == sender:
                transport.send(message(sender, tag % 97, n).float(), receiver, tag)
            elif rank == receiver:
                x = torch.empty(n)
                transport.recv(x, sender, tag)
                assert torch.equal(x, message(sender, tag % 97, n).float())


def barrier_and_sequence(transport: Transport) -> None:
    before = transport.sequence
    for _ in range(3):
        transport.barrier()
    assert transport.sequence == before + 3


def duplicates_do_not_meet(transport: Transport) -> None:
    other = transport.duplicate()
    assert (other.rank, other.size, other.timeout) == (transport.rank, transport.size, transport.timeout)
    failures: list[BaseException] = []

    def add_up(on: Transport, start: float) -> None:
        try:
            for i in range(20):
                x = torch.full((3000,), start + i)
                on.all_reduce(x)
                assert (x == on.size * (start + i)).all()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=add_up, args=(other, 1000.0))
    thread.start()
    add_up(transport, 1.0)
    thread.join()
    assert not failures, failures
    other.close()
    transport.barrier()


def bytes_sent_are_counted(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    start = transport.bytes_sent
    sends = [torch.zeros(10 * (j + 1), dtype=torch.uint8) for j in range(size)]
    transport.exchange(by_rank(sends, [torch.empty(10 * (rank + 1), dtype=torch.uint8) for _ in range(size)]))
    expected = sum(10 * (j + 1) for j in range(size) if j != rank)
    assert transport.bytes_sent - start == expected
    transport.all_reduce(torch.zeros(60 * 1000))
    expected += 2 * (size - 1) * 60 * 1000 * 4 // size
    assert transport.bytes_sent - start == expected
    transport.broadcast(torch.zeros(1000), 0)
    expected += (size - 1) * 4000 * (rank == 0)
    assert transport.bytes_sent - start == expected


def disagreement_is_found_on_all_ranks(transport: Transport) -> None:
    transport.agree("the plan", 4, "int4", {"bits": 4, "group": 64} if transport.rank else {"group": 64, "bits": 4})
    if transport.size > 1:
        odd = transport.size - 1
        with pytest.raises(PlanMismatch, match="the plan differs") as caught:
            transport.agree("the plan", 4, "int4" if transport.rank != odd else "int8")
        assert caught.value.ranks == (odd,)
    transport.barrier()


def wrong_arguments_are_refused_and_harmless(transport: Transport) -> None:
    size = transport.size
    byte = torch.zeros(1, dtype=torch.uint8)
    for wrong in (size, -1):
        with pytest.raises(ConfigError, match="ranks from 0 to"):
            transport.exchange({0: (byte, byte.clone()), wrong: (byte, byte.clone())})
    with pytest.raises(ConfigError, match="uint8"):
        transport.exchange({rank: (torch.zeros(1), byte.clone()) for rank in range(size)})
    with pytest.raises(ConfigError, match="contiguous"):
        transport.all_reduce(torch.zeros(4, 4).t())
    with pytest.raises(ConfigError, match="rank"):
        transport.broadcast(byte, size)
    with pytest.raises(ConfigError, match="rank"):
        transport.send(byte, transport.rank)
    with pytest.raises(ConfigError, match="rank"):
        transport.recv(byte, -1)
    recvs = [torch.zeros(1 + (r == transport.rank), dtype=torch.uint8) for r in range(size)]
    with pytest.raises(ConfigError, match="for itself"):
        transport.exchange(by_rank([byte] * size, recvs))
    transport.barrier()


def a_closed_transport_raises(transport: Transport) -> None:
    other = transport.duplicate()
    other.barrier()
    transport.barrier()
    other.close()
    other.close()
    byte = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(TransportError, match="closed"):
        other.barrier()
    with pytest.raises(TransportError, match="closed"):
        other.all_reduce(byte)
    with pytest.raises(TransportError, match="closed"):
        other.broadcast(byte, 0)
    transport.barrier()


CHECKS: list[Callable[[Transport], None]] = [
    exchange_moves_messages_of_any_length,
    exchange_with_neighbours_only,
    exchange_with_some_ranks_that_have_no_message,
    all_gather_and_all_to_all,
    all_reduce_adds_and_gives_all_ranks_the_same_bits,
    all_reduce_lets_nan_and_infinity_through,
    all_reduce_max_keeps_the_largest,
    broadcast_from_every_rank,
    send_and_recv_by_tag,
    barrier_and_sequence,
    duplicates_do_not_meet,
    bytes_sent_are_counted,
    disagreement_is_found_on_all_ranks,
    wrong_arguments_are_refused_and_harmless,
    a_closed_transport_raises,
]


def conform(transport: Transport, without: Collection[Callable[[Transport], None]] = ()) -> None:
    """Make all checks but those ``without``; an error names the check."""
    for check in CHECKS:
        if check not in without:
            try:
                check(transport)
            except BaseException as error:
                where = f"on rank {transport.rank} of {transport.size}"
                raise AssertionError(f"{check.__name__} {where}: {error}") from error
