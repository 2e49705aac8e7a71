"""This host's addresses, and on which of them a job listens: IPv4 and IPv6."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from fusionlayer import context
from fusionlayer.base.errors import TransportError
from fusionlayer.elastic import member_store, members
from fusionlayer.health.processes import is_refused
from fusionlayer.launch import stores
from fusionlayer.launch.meeting import HorovodBoard
from fusionlayer.process import interfaces
from fusionlayer.transport import _side_store, star
from tests.harness import run_ranks
from tests.ports import free_port

HERE = interfaces.addresses()
ALL = [address for found in HERE.values() for address in found]
OTHERS = {name: found[0] for name, found in HERE.items() if not interfaces.is_loopback(found[0])}
needs_ipv6 = pytest.mark.skipif("::1" not in ALL, reason="this machine has no IPv6")
needs_network = pytest.mark.skipif(not OTHERS, reason="this machine has no interface but the loopback")


@pytest.fixture(autouse=True)
def unrestricted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    yield
    interfaces.restrict(())


def listens(port: int, anybody: bool = False) -> set[str]:
    """Return the addresses on which this process listens at a port, or on which anybody on this host does."""
    own = {
        os.stat(f"/proc/self/fd/{name}").st_ino
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
    }
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            digits, at = words[1].split(":")
            if words[3] == "0A" and int(at, 16) == port and (anybody or int(words[9]) in own):
                parts = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
                found.add(socket.inet_ntop(family, b"".join(parts)))
    return found


def test_what_is_opened_for_other_hosts_is_at_the_interfaces_that_are_named_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert HERE["lo"][0] == "127.0.0.1" and interfaces.own_address() == ""
    assert interfaces.with_port("::1", 5) == "[::1]:5" and interfaces.with_port("a", 5) == "a:5"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    assert interfaces.own_address() == "127.0.0.1"
    assert interfaces.reachable_names()[: len(HERE["lo"])] == [*HERE["lo"]]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for address in ALL:
        monkeypatch.setenv("MASTER_ADDR", address)
        assert interfaces.own_address() == ("" if interfaces.is_loopback(address) else address)
        assert interfaces.allowed_address(address) == "", "nothing is restricted"
    interfaces.restrict(["nosuch", "lo"])
    assert interfaces.own_address() == "127.0.0.1" and interfaces.allowed_address("127.0.0.1") == "127.0.0.1"
    assert interfaces.allowed_address("no.such.name.invalid") == interfaces.allowed_address("\0" * 99) == ""
    kept, where = member_store.open_store(False, 5.0)
    assert listens(where.port) == {"127.0.0.1"} and where.names == ("127.0.0.1",)
    assert member_store.reach(where, 5.0).check(["x"]) is False and not is_refused(
        member_store.names(where), where.port
    )
    side = _side_store.open_store(0, 5.0, lambda _: None)
    assert isinstance(side, TCPStore) and listens(side.port) == {"127.0.0.1"}
    store = stores.open_store("127.0.0.1", 0, 0, 1, 5.0, serve_it=True)
    assert listens(store.port) == {"127.0.0.1"}
    with stores.listen(interfaces.own_address()) as listener:
        assert listener.getsockname()[0] == "127.0.0.1" and star._hosts("127.0.0.1") == []
    del kept


@needs_network
def test_the_store_of_rank_0_is_at_the_interface_that_is_named_alone() -> None:
    name, address = next(iter(OTHERS.items()))
    everywhere = stores.open_store(address, free_port(), 0, 1, 5.0, serve_it=True)
    assert listens(everywhere.port) & {"0.0.0.0", "::"}
    interfaces.restrict([name])
    port = free_port()
    store = stores.open_store(address, port, 0, 1, 5.0, serve_it=True)
    assert listens(port) == {address}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert stores.open_store(address, port, 1, 2, 5.0, serve_it=False).port == port
    del store


@needs_ipv6
def test_stores_and_members_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    store = stores.open_store("::1", port, 0, 2, 5.0, serve_it=True)
    assert listens(port) == {"::1"}
    store.set("a", "b")
    assert stores.open_store("::1", port, 1, 2, 5.0, serve_it=False).get("a") == b"b"
    with pytest.raises(TransportError, match="::1:"):
        stores.open_store("::1", free_port(), 1, 2, 0.1, serve_it=False)
    with stores.listen("") as listener:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, listener.getsockname()[1])).close()
    (found,) = members._named_by("[fd00::2]:1234")
    assert (found.names, found.port) == (("fd00::2",), 1234)
    monkeypatch.setattr(member_store, "own_address", lambda: "::1")
    kept, where = member_store.open_store(False, 5.0)
    assert where.names == ("::1",) and listens(where.port) == {"::1"} and member_store.reach(where, 5.0) and kept
    with stores.listen("::1") as server:
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "::1")
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(server.getsockname()[1]))
        board = HorovodBoard(os.environ, 0.1)
        with pytest.raises(TransportError, match="does not answer: timed out"):
            board.look()


def meet_over_ipv6(rank: int, world: int, port: int) -> tuple[float, bool]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "::1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    context.init(60.0)
    transport = context.transport()
    end = star.connect(transport)
    end.close()
    x = torch.full((9,), float(rank + 1))
    transport.all_reduce(x)
    return float(x[0]), listens(port, anybody=True) == {"::1"}


@pytest.mark.medium
@needs_ipv6
def test_a_job_that_meets_over_ipv6() -> None:
    assert run_ranks(meet_over_ipv6, 2, free_port(), backend=None) == [(3.0, True)] * 2
