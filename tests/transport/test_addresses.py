"""IPv4 and IPv6: which addresses a host has, which two of them fit each other, and links over each kind."""

import socket
from typing import Any

import pytest

from fusionlayer.process import interfaces
from fusionlayer.transport.links import socket_options, sockets
from fusionlayer.transport.links.base import LinkError
from fusionlayer.transport.links.reconnecting import Keeper
from fusionlayer.transport.links.socket_options import Place, SocketOptions, Way, places, ways
from tests.loops import looped

from .relays import links
from .test_sockets import swap

HERE = {"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.1", "fd00::1"), "eth1": ("fe80::1%eth1",), "eth2": ("fd02::1",)}


@looped(
    "alone, variables, expected",
    [
        (True, {}, ("127.0.0.1",)),
        (False, {}, ("10.0.0.1", "fd00::1")),
        (False, {"GLOO_SOCKET_IFNAME": "eth1"}, ("fe80::1%eth1",)),
        (False, {"GLOO_SOCKET_IFNAME": "eth2"}, ("fd02::1",)),
        (False, {"MASTER_ADDR": "fd02::1"}, ("fd02::1",)),
        (False, {"MASTER_ADDR": "fd00::1"}, ("fd00::1", "10.0.0.1")),
        (False, {"MASTER_ADDR": "::1"}, ("10.0.0.1", "fd00::1")),
    ],
)
def test_where_a_rank_listens_if_no_interface_is_named(
    alone: bool, variables: dict[str, str], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        for module in (interfaces, socket_options):
            patched.setattr(module, "addresses", lambda: HERE)
        for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
            patched.delenv(name, raising=False)
        for name, value in variables.items():
            patched.setenv(name, value)
        assert places(SocketOptions(), alone) == [Place("", expected)]


BOTH, OLD, NEW = ("10.0.0.1", "fd00::1"), ("10.0.0.1",), ("fd00::1",)


@looped(
    "mine, theirs, expected",
    [
        (BOTH, BOTH, ["10.0.0.1", "fd00::1"]),
        (BOTH, OLD, ["10.0.0.1"]),
        (NEW, BOTH, ["fd00::1"]),
        (OLD, NEW, []),
        (NEW, ("fe80::9",), []),
        (("fe80::1%eth1",), ("fd00::1", "fe80::9"), ["fe80::9%eth1"]),
    ],
)
def test_addresses_of_one_kind_fit_each_other(
    mine: tuple[str, ...], theirs: tuple[str, ...], expected: list[str]
) -> None:
    told = [[(host, 7) for host in theirs]]
    found = ways([Place("a", mine)], 3, told)
    assert [way.host for way in found] == expected and all(way.port == 7 for way in found)


def test_interfaces_take_turns_and_one_that_fits_none_leaves_its_turn() -> None:
    mine = [Place("a", ("10.0.0.1",)), Place("b", ("fd00::1",))]
    told = [[("10.0.0.9", 1)], [("10.1.0.9", 2), ("fd00::9", 3)]]
    assert ways(mine, 0, told) == ways(mine, 2, told) == [Way("a", "10.0.0.1", "10.0.0.9", 1)]
    assert ways(mine, 1, told) == [Way("b", "fd00::1", "fd00::9", 3)]
    turned = ways(mine, 1, [told[1], told[0]])
    assert [(way.interface, way.port) for way in turned] == [("a", 2), ("a", 1), ("b", 3)]


def of_this_host() -> dict[str, str]:
    """Return an address of each kind of IPv6 that this host has."""
    found = {}
    for each in interfaces.addresses().values():
        for address in each:
            if ":" in address:
                found["link" if "%" in address else "loopback" if address == "::1" else "global"] = address
    for line in interfaces._IF_INET6.read_text().splitlines() if found else ():
        digits, _, _, scope, _, name = line.split()
        if scope == "20":
            found["link"] = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) + f"%{name}"
    return found


@pytest.mark.parametrize("kind", ["loopback", "global", "link"])
def test_a_link_over_ipv6(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_this_host()
    if kind not in found:
        pytest.skip(f"this host has no {kind} address of IPv6")
    monkeypatch.setattr(sockets, "places", lambda *_: [Place("", (found[kind],))])
    with links(2, 2, through=False) as (made, _):
        swap(made, 300_000, 1)
        assert made[0].states()[1] == [1, 1]
        assert found[kind].startswith(made[0]._keeper.addresses[0][0][0])


_INIT = Keeper.__init__


def with_places(monkeypatch: pytest.MonkeyPatch, *each: Place) -> None:
    """Let rank n be where ``each[n]`` says."""

    def make(self: Keeper, *args: Any) -> None:
        given = list(args)
        given[5] = [each[args[1]]]
        _INIT(self, *given)

    monkeypatch.setattr(Keeper, "__init__", make)


def test_hosts_with_one_family_and_hosts_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    if "loopback" not in of_this_host():
        pytest.skip("this host has no IPv6")
    both = Place("", ("127.0.0.1", "::1"))
    with_places(monkeypatch, both, Place("", ("127.0.0.1",)), both)
    with links(3, through=False) as (made, _):
        swap([made[0], made[1]], 1000, 1)
    with_places(monkeypatch, both, Place("", ("::1",)))
    with links(2, through=False) as (made, _):
        swap(made, 1000, 1)


def test_a_rank_that_no_address_fits_says_so() -> None:
    keeper = Keeper(None, 1, 2, 1, b"secret", [Place("", ("127.0.0.1",))], None)  # type: ignore[arg-type]
    with pytest.raises(
        LinkError, match=r"rank 1 at 127.0.0.1 cannot call rank 0 at fd00::1; expected two addresses of IPv4"
    ):
        keeper.start([[[("fd00::1", 5)]]])
    keeper.end()
