"""Ranks that are killed, stopped, late or wrong: every survivor must learn in time who it was."""

import atexit
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusionlayer.base.errors import TransportError, UsageError
from fusionlayer.health import inquiry
from fusionlayer.process.processes import Identity
from fusionlayer.transport import C10dTransport
from fusionlayer.transport.composed import by_rank
from fusionlayer.transport.links.base import LinkError
from fusionlayer.transport.links.gloo import GlooLink
from fusionlayer.transport.links.socket_options import SocketOptions
from tests.harness import Outcome, checkpoint, outcomes_of, run_ranks, stay_last
from tests.tiers import tiered

pytestmark = pytest.mark.medium

TIMEOUT = 3.0


def fail_then_raise(transport: C10dTransport, call: Any) -> None:
    """Make a call that must fail; see that the transport is closed after it, and hand its error on to the test."""
    try:
        call()
    except TransportError as error:
        with pytest.raises(TransportError, match="collective"):
            transport.barrier()
        transport.close()
        assert isinstance(error.__context__, LinkError) and error.__suppress_context__, "told once"
        if transport.rank == 0:
            stay_last()  # its process may keep the store by which the others learn why they fail
        raise
    raise AssertionError("the call did not fail")


def survivors(outcomes: list[Outcome], lost: int, word: str, ranks: tuple[int, ...], sequence: int = 2) -> None:
    """See that all ranks but the lost one have raised, and have named who must be named."""
    for rank, outcome in enumerate(outcomes):
        if rank != lost:
            assert (outcome.kind, outcome.error[0]) == ("raised", "TransportError"), outcome
            assert outcome.exit_code in (1, -signal.SIGKILL), outcome  # not aborted
            assert word in outcome.error[1], outcome.error
            assert outcome.attributes["ranks"] == ranks, outcome.error
            assert outcome.attributes["sequence"] == sequence, outcome.error


def once_it_waits(transport: C10dTransport, act: Callable[[], object]) -> None:
    """Act on another thread when ``transport`` is in a call."""
    watch = transport._watch
    assert watch is not None

    def look() -> None:
        while watch.where()[1].call is None:
            time.sleep(0.01)
        time.sleep(0.1)  # into the wait
        act()

    threading.Thread(target=look).start()


def exchange(transport: C10dTransport, n: int) -> None:
    sends = [torch.zeros(n, dtype=torch.uint8) for _ in range(transport.size)]
    transport.exchange(by_rank(sends, [torch.empty(n, dtype=torch.uint8) for _ in range(transport.size)]))


def over(link: str, timeout: float, **options: Any) -> C10dTransport:
    """Return the transport over gloo, or over two connections of our own."""
    return C10dTransport(timeout=timeout, sockets=SocketOptions(2) if link == "sockets" else None, **options)


def exchange_after_checkpoint(rank: int, world: int, link: str, n: int, timeout: float) -> None:
    transport = over(link, timeout)
    transport.barrier()
    checkpoint("exchange")
    fail_then_raise(transport, lambda: exchange(transport, n))


LOST = [(1, "file", "gloo"), (2, "tcp", "gloo"), (0, "tcp", "gloo"), (0, "tcp", "sockets")]


@pytest.mark.parametrize(
    "lost, store, link", tiered([*LOST, (1, "file", "sockets"), (2, "tcp", "sockets")], lambda *case: case in LOST)
)
def test_a_killed_rank_is_gone(lost: int, store: str, link: str) -> None:
    signals = {(lost, "exchange"): signal.SIGKILL}
    outcomes = outcomes_of(exchange_after_checkpoint, 3, link, 10_000, 30.0, signals=signals, store=store)
    assert (outcomes[lost].kind, outcomes[lost].exit_code) == ("died", -signal.SIGKILL)
    survivors(outcomes, lost, f"rank {lost} is gone (process ", (lost,))


STOPPED = [(1, "file", "gloo", 10_000), (0, "tcp", "gloo", 10_000), (1, "file", "sockets", 50_000_000)]


@pytest.mark.parametrize(
    "lost, store, link, n", tiered([*STOPPED, (1, "file", "sockets", 10_000)], lambda *case: case in STOPPED)
)
def test_a_stopped_rank_is_stopped(lost: int, store: str, link: str, n: int) -> None:
    """Also one that leaves half of a long message on its way."""
    signals = {(lost, "exchange"): signal.SIGSTOP}
    outcomes = outcomes_of(exchange_after_checkpoint, 3, link, n, TIMEOUT, signals=signals, store=store)
    assert outcomes[lost].kind == "hung"
    survivors(outcomes, lost, f"rank {lost} is stopped (process ", (lost,))


def drain_after_checkpoint(rank: int, world: int) -> None:
    """As if the links only queued work on a device: it is done when the messages of all ranks have come."""

    def drain(link: GlooLink) -> None:
        while link._group is not None:
            time.sleep(0.01)
        raise LinkError(rank, "the connections are closed")

    GlooLink.only_queues = True
    GlooLink.drain = drain  # type: ignore[method-assign]
    torch.cuda.is_current_stream_capturing = lambda: rank == 0  # type: ignore[assignment]
    transport = C10dTransport(timeout=20)
    if rank == 0:
        with pytest.raises(UsageError, match="while a CUDA graph is captured.*make_graphed_callables"):
            transport.barrier()
        torch.cuda.is_current_stream_capturing = lambda: False  # type: ignore[assignment]
    transport.barrier()
    exchange(transport, 10)
    checkpoint("drain")
    fail_then_raise(transport, transport.drain)


def test_a_rank_that_goes_while_the_device_works_is_named_and_a_capture_is_refused() -> None:
    outcomes = outcomes_of(drain_after_checkpoint, 3, signals={(1, "drain"): signal.SIGKILL})
    survivors(outcomes, 1, "rank 1 is gone (process ", (1,))


def kill_while_it_moves(rank: int, world: int, how: str, link: str) -> None:
    transport = over(link, 20, node=str(rank) if how == "all_reduce over gloo" else None)
    transport.barrier()
    x = torch.zeros(1 << 22)
    if rank == 1:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    def for_ever() -> None:
        while True:
            if how == "exchange":
                received = [torch.empty(1 << 24, dtype=torch.uint8) for _ in range(world)]
                transport.exchange(by_rank([x.view(torch.uint8)] * world, received))
            elif how.startswith("all_reduce"):
                transport.all_reduce(x)
            elif rank == 0:
                transport.send(x, 1)
            else:
                transport.recv(x, 0)

    fail_then_raise(transport, for_ever)


MOVING = [(how, "gloo") for how in ("exchange", "all_reduce", "all_reduce over gloo", "send")]
MOVING.append(("exchange", "sockets"))


@pytest.mark.parametrize(
    "how, link", tiered([*MOVING, ("all_reduce", "sockets"), ("send", "sockets")], lambda *case: case in MOVING)
)
def test_a_rank_killed_while_data_moves_is_gone_long_before_the_deadline(how: str, link: str) -> None:
    outcomes = outcomes_of(kill_while_it_moves, 2, how, link)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].error[0] == "TransportError", outcomes[0]
    assert "rank 1 is gone" in outcomes[0].error[1]


def come_late(rank: int, world: int) -> None:
    transport = C10dTransport(timeout=TIMEOUT)
    transport.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 knows", "rank 2 knows"])

    def meet() -> None:
        try:
            exchange(transport, 10)
        except TransportError:
            store.set(f"rank {rank} knows", "")
            raise

    fail_then_raise(transport, meet)


def test_a_rank_that_is_late_is_named_also_to_itself() -> None:
    survivors(outcomes_of(come_late, 3), -1, "rank 1 is alive but late: at collective 1 while rank ", (1,))


def differ(rank: int, world: int, how: str) -> None:
    # Two of three ranks are both to blame if the third does not answer in time, which on a busy machine takes seconds.
    inquiry._PATIENCE = 60.0
    transport = C10dTransport(timeout=8)
    transport.barrier()

    def call() -> None:
        if how == "operation":
            if rank == 1:
                transport.all_reduce(torch.zeros(5))
            else:
                transport.broadcast(torch.zeros(5), 0)
        elif how in ("short", "long"):
            transport.all_reduce(torch.zeros({"short": 100_000, "long": 1_000_000}[how] + (rank == 1)))
        else:
            n = 100 - {"shorter": 1, "none": 100}[how] * (rank == 1)
            x = torch.zeros(100, dtype=torch.uint8)
            transport.exchange(by_rank([x[:n], x, x[:n]], [torch.empty_like(x) for _ in range(world)]))

    fail_then_raise(transport, lambda: [call() for _ in range(3)])


@pytest.mark.parametrize(
    "how, words",
    [
        ("shorter", ("rank 1 sends 99 bytes", "expects 100 bytes")),
        ("none", ("rank 1 sends 0 bytes", "expects 100 bytes")),
        ("short", ("all_reduce of 100001 x float32", "all_reduce of 100000 x float32")),
        ("long", ("all_reduce of 1000001 x float32", "all_reduce of 1000000 x float32")),
        ("operation", ("all_reduce of 5 x float32", "broadcast from rank 0 of 5 x float32")),
    ],
)
def test_calls_that_differ_over_ranks_raise_on_all_of_them(how: str, words: tuple[str, ...]) -> None:
    for outcome in outcomes_of(differ, 3, how):
        assert outcome.kind == "raised" and outcome.error[0] == "TransportError", outcome
        assert all(word in outcome.error[1] for word in words), outcome.error
        assert outcome.attributes["ranks"] == (1,), "the two others make the same call"


def mismatch_messages(rank: int, world: int, how: str) -> None:
    transport = C10dTransport(timeout=8)
    x = torch.zeros(10 + rank)
    if how == "length":
        fail_then_raise(transport, lambda: transport.recv(x, 0) if rank else transport.send(x, 1))
    elif how == "both send":
        fail_then_raise(transport, lambda: transport.send(x, 1 - rank))
    else:
        fail_then_raise(transport, lambda: transport.recv(x, 1 - rank))


@pytest.mark.parametrize(
    "how, word",
    [
        ("length", "rank 0 sends 40 bytes to rank 1, which expects 44 bytes"),
        ("both send", "both wait to send to each other"),
        ("both receive", "both wait to receive from each other"),
    ],
)
def test_messages_that_do_not_pair_raise_on_both_ranks(how: str, word: str) -> None:
    for outcome in outcomes_of(mismatch_messages, 2, how):
        assert outcome.kind == "raised" and outcome.error[0] == "TransportError", outcome
        assert word in outcome.error[1]
        assert outcome.attributes["ranks"] == (0, 1)


def stay_until_the_others_end() -> None:
    with suppress(RuntimeError):
        dist.barrier()


def close_early(rank: int, world: int, link: str) -> None:
    transport = over(link, 60)
    transport.barrier()
    if rank == 1:
        transport.close()
        stay_until_the_others_end()
        return
    fail_then_raise(transport, lambda: exchange(transport, 10))


@pytest.mark.parametrize("link", ["gloo", "sockets"])
def test_a_rank_that_closes_is_named(link: str) -> None:
    outcomes = outcomes_of(close_early, 3, link)
    survivors(outcomes, 1, "rank 1 closed its transport after collective 1", (1,))


def interrupt_a_call(rank: int, world: int) -> None:
    transport = C10dTransport(timeout=60)
    transport.barrier()
    store = dist.distributed_c10d._get_default_store()

    def interrupt() -> None:
        while transport.sequence < 2:
            time.sleep(0.01)
        time.sleep(0.1)  # into the call, where rank 0 is missing
        os.kill(os.getpid(), signal.SIGINT)
        store.set("interrupted", "")

    if rank == 1:
        threading.Thread(target=interrupt).start()
    if rank == 0:
        store.wait(["interrupted"])
    try:
        fail_then_raise(transport, lambda: [exchange(transport, 10) for _ in range(2)])
    except KeyboardInterrupt:
        stay_until_the_others_end()
        raise


def test_a_rank_interrupted_in_a_call_is_named() -> None:
    outcomes = outcomes_of(interrupt_a_call, 3)
    assert outcomes[1].error[0] == "KeyboardInterrupt"
    survivors(outcomes, 1, "rank 1 raised KeyboardInterrupt", (1,), sequence=3)


def pause(rank: int, world: int) -> float:
    transport = C10dTransport(timeout=20)
    transport.barrier()
    if rank == 1:
        resume = subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        resume.wait()
    x = torch.tensor([1.0])
    transport.all_reduce(x)
    return x.item()


def test_a_rank_that_is_stopped_for_a_while_does_no_harm() -> None:
    assert run_ranks(pause, 2) == [2.0, 2.0]


def fail_apart(rank: int, world: int, slow: int) -> None:
    transport = C10dTransport(timeout=5)
    other = transport.duplicate()
    for each in (transport, other):
        each.barrier()
    checkpoint("barrier")
    try:
        if rank != slow:
            transport.barrier()
        assert other._watch is not None
        while len(other._watch.processes.look_around()) < world - 1:
            time.sleep(0.01)
        other.barrier()
    except TransportError:
        atexit._run_exitfuncs()  # what a program runs that this error ends
        raise


FAST = [(3, 1, 2, signal.SIGSTOP, "tcp"), (3, 0, 2, signal.SIGKILL, "tcp")]
CASES = [
    *FAST,
    *(
        (world, lost, (lost + 1) % world, how, "tcp" if how == signal.SIGKILL or lost == 0 else "file")
        for world in (3, 4)
        for lost in range(world)
        for how in (signal.SIGSTOP, signal.SIGKILL)
    ),
]


def in_ci(world: int, lost: int, slow: int, how: signal.Signals, store: str) -> bool:
    """Tell whether CI has the case: each lost rank of four once, in turn killed and stopped."""
    return world == 4 and (how == signal.SIGKILL) == (lost % 2 == 0)


@pytest.mark.parametrize("world, lost, slow, how, store", tiered(CASES, lambda *case: case in FAST, in_ci))
def test_the_culprit_is_the_same_on_every_rank(
    world: int, lost: int, slow: int, how: signal.Signals, store: str
) -> None:
    """One rank comes when all others have raised and are gone, to another transport, and blames none of those."""
    outcomes = outcomes_of(fail_apart, world, slow, signals={(lost, "barrier"): how}, store=store)
    for rank, outcome in enumerate(outcomes):
        if rank != lost:
            assert outcome.error[0] == "TransportError" and outcome.attributes["ranks"] == (lost,), outcomes


def fail_or_go_on(rank: int, world: int, apart: bool) -> None:
    if apart:  # processes of other hosts, which nobody can look up
        own = Identity(os.getpid(), f"host{rank}", f"place {rank}", "")
        Identity.own = classmethod(lambda _: own)  # type: ignore[assignment, method-assign]
    transport = C10dTransport(timeout=4)
    checkpoint("made")
    if rank == 0:
        transport.duplicate()
    else:
        transport.barrier()


@pytest.mark.parametrize("apart", [False, True])
def test_who_waits_for_the_next_transport_blames_the_rank_that_was_lost_in_this_one(apart: bool) -> None:
    """Rank 2 does not come to the next one because rank 1 is gone."""
    outcomes = outcomes_of(fail_or_go_on, 3, apart, signals={(1, "made"): signal.SIGKILL}, store="tcp")
    assert [outcomes[rank].attributes["ranks"] for rank in (0, 2)] == [(1,), (1,)], outcomes


def run_out_of_files(rank: int, world: int) -> None:
    transport = C10dTransport(timeout=TIMEOUT)
    if rank == 1:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    transport.subset([0, 1])


def test_a_rank_that_runs_out_of_files_says_so() -> None:
    """The other one can only tell which rank did not come."""
    outcomes = outcomes_of(run_out_of_files, 2, store="tcp")
    assert [outcome.attributes["ranks"] for outcome in outcomes] == [(1,), (1,)], outcomes
    assert "rank 1 has too many open files: this process may have " in outcomes[1].error[1]
