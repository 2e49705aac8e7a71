"""Messages that are copied out of the memory of other ranks' devices: real processes, and threads for devices."""

import random
import signal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusionlayer.base.errors import TransportError
from fusionlayer.transport import Transport
from fusionlayer.transport.composed import by_rank
from tests.harness import checkpoint, outcomes_of, run_ranks
from tests.tiers import tiered

from . import conformance
from .conformance import message
from .device_on_host import Keeping, OverPeers, compiled, device_on_host
from .test_faults import exchange, fail_then_raise, survivors

pytestmark = pytest.mark.medium

TIMEOUT = 150.0
SLOT = 1024
LENGTHS = (0, 1, 300, SLOT - 1, SLOT, SLOT + 1, 2 * SLOT, 3 * SLOT + 7)


def conform(rank: int, world: int, path: str, peer_bytes: int) -> None:
    with device_on_host(path, rank):
        transport = OverPeers(timeout=TIMEOUT, peer_bytes=peer_bytes)
        conformance.conform(transport)
        transport.close()


@pytest.mark.parametrize("world", tiered([2, 3, 4], lambda world: world == 3))
def test_conformance(world: int) -> None:
    run_ranks(conform, world, compiled(), 1 << 20)


class Queueing(OverPeers):
    """Calls return before the device has done them, as on a GPU."""

    link = Keeping


def storm(rank: int, world: int, path: str, seed: int) -> int:
    """Queue exchanges of all ranks, of pairs and of some ranks, with messages of many pieces; then look at all bytes.

    Each device makes pauses of its own. So one is far ahead, where it may be, and slots are used again and again.
    """
    kept: list[tuple[Tensor, Tensor]] = []
    with device_on_host(path, 100 * seed + rank, longest=(0, 200, 500)[(rank + seed) % 3]):
        transport = Queueing(timeout=TIMEOUT, peer_bytes=2 * world * SLOT)
        everyone, two = [*range(world)], [world - 1, 0]
        parts: list[tuple[Transport, list[int]]] = [(transport, everyone), (transport.duplicate(), everyone)]
        if rank in two:
            parts.append((transport.subset(two), two))
        draw = random.Random(seed)
        for number in range(40):
            which, kind = draw.randrange(3), draw.choice(["all", "all", "some", "pair"])
            lengths = draw.choices(LENGTHS, k=world**2)
            if kind == "some":
                lengths = [n * draw.randrange(2) for n in lengths]
            if which < len(parts):
                kept += queue_one(*parts[which], rank, number, kind, lengths)
        for on, _ in parts:
            on.drain()
        assert all(torch.equal(got, want) for got, want in kept)
        for on, _ in parts:
            on.close()
    return len(kept)


def queue_one(
    on: Transport, members: list[int], rank: int, number: int, kind: str, lengths: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """Queue one call; return tensors that are to be equal in the end."""
    own, size = members.index(rank), on.size
    if kind == "pair":
        sender = number % size
        to, whole = (sender + 1) % size, message(sender, number, 1 + lengths[0])
        got = torch.zeros_like(whole)
        if own == sender:
            on.send(whole, to)
        elif own == to:
            on.recv(got, sender)
        return [(got, whole)] if own == to else []
    sends = [message(own, number + 3 * to, lengths[own * size + to]) for to in range(size)]
    wanted = [message(source, number + 3 * own, lengths[source * size + own]) for source in range(size)]
    recvs = [torch.zeros_like(each) for each in wanted]
    on.exchange(by_rank(sends, recvs))
    return [*zip(recvs, wanted, strict=True)]


@pytest.mark.parametrize(
    "world, seed",
    tiered(
        [(w, s) for w in (2, 3, 4) for s in range(4)],
        lambda w, s: (w, s) in ((2, 1), (4, 2)),
        lambda w, s: w == 3 and s < 2,
    ),
)
def test_slots_are_used_again_whatever_is_late(world: int, seed: int) -> None:
    assert min(run_ranks(storm, world, compiled(), seed)) > 40


def meet(rank: int, world: int, path: str, timeout: float, late: bool) -> None:
    """Queue exchanges with one rank that gets a signal before them, or comes when the others have heard."""
    with device_on_host(path, rank):
        transport = Queueing(timeout=timeout, peer_bytes=2 * world * SLOT)
        exchange(transport, 10)
        transport.drain()
        store = dist.distributed_c10d._get_default_store()
        checkpoint("exchange")
        if late and rank == 1:
            store.wait(["rank 0 knows", "rank 2 knows"])

        def call() -> None:
            try:
                exchange(transport, 5 * SLOT)
                transport.drain()
            except TransportError:
                store.set(f"rank {rank} knows", "")
                raise

        fail_then_raise(transport, call)


@pytest.mark.parametrize(
    "lost, how, timeout, words",
    [
        (2, signal.SIGKILL, 30.0, "rank 2 is gone (process "),
        (1, signal.SIGSTOP, 3.0, "rank 1 is stopped (process "),
        (1, None, 3.0, "rank 1 is alive but late: at collective 1 while rank "),
    ],
)
def test_a_rank_that_does_not_come_is_named(lost: int, how: signal.Signals | None, timeout: float, words: str) -> None:
    signals = {(lost, "exchange"): how} if how else {}
    outcomes = outcomes_of(meet, 3, compiled(), timeout, how is None, signals=signals)  # type: ignore[arg-type]
    survivors(outcomes, lost if how else -1, words, (lost,))
