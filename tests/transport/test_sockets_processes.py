"""The transport over connections of our own, between processes: the conformance table, the fault table, the choice."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusionlayer as fl
from fusionlayer.base.config import Config
from fusionlayer.base.errors import PlanMismatch, TransportError
from fusionlayer.transport import C10dTransport
from fusionlayer.transport.links.gloo import GlooLink
from fusionlayer.transport.links.socket_options import SocketOptions
from fusionlayer.transport.links.sockets import SocketLink
from tests.harness import outcomes_of, run_ranks
from tests.ranks import on_processes
from tests.tiers import tiered

from . import conformance
from .test_faults import fail_then_raise, once_it_waits

pytestmark = pytest.mark.medium

TIMEOUT = 150.0


def own(connections: int = 2, timeout: float = TIMEOUT, **options: Any) -> C10dTransport:
    return C10dTransport(timeout=timeout, sockets=SocketOptions(connections), **options)


def conform(rank: int, world: int, connections: int, checksum: bool | None, guards: dict[str, bool]) -> None:
    transport = C10dTransport(timeout=TIMEOUT, sockets=SocketOptions(connections, **guards), checksum=checksum)
    assert isinstance(transport._links["cpu"], SocketLink)
    conformance.conform(transport)
    transport.close()


TAGS, TLS = {"authenticate": True}, {"encrypt": True}
CASES = [(2, 1, None, TLS), (2, 4, True, TAGS), (3, 3, None, {}), (4, 2, True, {}), (3, 4, None, TLS)]


@pytest.mark.parametrize("world, connections, checksum, guards", tiered(CASES, lambda *case: case in CASES[:3]))
def test_conformance(world: int, connections: int, checksum: bool | None, guards: dict[str, bool]) -> None:
    run_ranks(conform, world, connections, checksum, guards)


def interrupt_a_call(rank: int, world: int) -> None:
    transport = own(timeout=60)
    transport.barrier()
    if rank == 1:
        once_it_waits(transport, lambda: os.kill(os.getpid(), signal.SIGINT))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["over"])
        return
    try:
        fail_then_raise(transport, lambda: transport.recv(torch.zeros(9), rank - 1))
    except TransportError:
        store.set("over", "")
        raise


def test_a_rank_that_waits_can_be_interrupted_and_is_named() -> None:
    """gloo would end the wait at its deadline alone."""
    outcomes = outcomes_of(interrupt_a_call, 3)
    assert outcomes[1].error[0] == "KeyboardInterrupt"
    assert outcomes[2].attributes["ranks"] == (1,) and "rank 1 raised KeyboardInterrupt" in outcomes[2].error[1]


def leave_at_once(rank: int, world: int) -> float:
    transport = own(4)
    x = torch.full((1 << 20,), rank + 1.0)
    transport.all_reduce(x)
    return x.sum().item()


def test_a_process_that_ends_right_after_its_last_call_delivers_it() -> None:
    assert run_ranks(leave_at_once, 3) == [6.0 * (1 << 20)] * 3


@on_processes(2)
def test_a_forked_child_leaves_the_connections_to_its_parent(rank: int, world: int) -> None:
    transport = own()
    transport.barrier()
    child = os.fork()
    if not child:
        try:
            transport.barrier()
        except fl.UsageError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    transport.barrier()


def sums(rank: int, world: int, transport: str) -> list[bytes]:
    fl.init(transport=transport, settings=Config(connections=3, timeout=TIMEOUT))
    kept = []
    for codec in ("raw", "int8", "int4"):
        x = torch.randn(300_001, generator=torch.Generator().manual_seed(rank))
        fl.all_reduce(x, codec)
        kept.append(x)
    every = fl.all_gather(torch.randn(1000, generator=torch.Generator().manual_seed(rank)), "int8")
    link = type(fl.context.transport()._links["cpu"]).__name__  # type: ignore[attr-defined]
    assert link == {"c10d": "GlooLink", "sockets": "SocketLink"}[transport]
    fl.shutdown()
    return [x.numpy().tobytes() for x in (*kept, every)]


def test_results_have_the_bits_of_gloo() -> None:
    assert run_ranks(sums, 2, "sockets") == run_ranks(sums, 2, "c10d")


def takes(kind: Any, seconds: float, clock: Any) -> None:
    """Let each exchange by a kind of link take a time of ``clock``, which nothing else moves."""
    exchange = kind.exchange

    def timed(self: Any, *args: Any) -> None:
        exchange(self, *args)
        clock.now += seconds

    kind.exchange = timed


def choose(rank: int, world: int, slow: str) -> list[str]:
    """As if the ranks were on hosts of their own, and one kind of link were slow on one rank."""
    from fusionlayer.transport.links import faster
    from fusionlayer.transport.links import sockets as _sockets

    if slow != "alone":
        _sockets.node_name = lambda: f"host {rank}"  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        clock = faster.time = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)  # type: ignore[assignment]
        for name, kind in {"gloo": GlooLink, "own": SocketLink}.items():
            takes(kind, 0.05 if name == slow and rank == 1 else 0.001, clock)
    transport = C10dTransport(timeout=TIMEOUT, sockets=SocketOptions(2, only_if_faster=True))
    second = transport.duplicate()
    x = torch.ones(70_000)
    for each in (transport, second):
        each.all_reduce(x)
    assert (x == 4).all()
    return [type(each._links["cpu"]).__name__ for each in (transport, second)]


@pytest.mark.parametrize(
    "slow, link", tiered([("gloo", "SocketLink"), ("own", "GlooLink"), ("alone", "GlooLink")], lambda *_: True)
)
def test_auto_takes_the_faster_link_on_all_ranks(slow: str, link: str) -> None:
    assert run_ranks(choose, 2, slow) == [[link, link]] * 2


@on_processes(3)
def test_settings_that_differ_over_ranks_are_told(rank: int, world: int) -> None:
    with pytest.raises(PlanMismatch, match=r"setting transport differs over ranks .*\[1\] differ.*rank 1: \"c10d\""):
        C10dTransport(timeout=TIMEOUT, sockets=None if rank == 1 else SocketOptions(2))
    with pytest.raises(PlanMismatch, match=r"setting connections differs over ranks .*rank 1: 3"):
        own(3 if rank == 1 else 2)
