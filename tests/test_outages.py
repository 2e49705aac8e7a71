import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from fusionlayer import TransportError, launch
from fusionlayer.launch import RankInfo, make_store
from fusionlayer.process.outages import Outage, explain

UNKNOWN = "no-such-host.invalid"
ERROR = RuntimeError("The client socket has timed out\nat frame 1")


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_what_is_not_known_is_told_as_it_is(port: int) -> None:
    assert explain(ERROR) == explain(ERROR, "127.0.0.1", port) == Outage("The client socket has timed out", False)


def test_gloos_own_text_is_left_out_but_for_what_happened() -> None:
    text = (
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:10139: "
        "Connection reset by peer. This is typically caused by a remote worker hanging or bugs in it. GLHF!"
    )
    assert explain(RuntimeError(text)).text == "Read error [127.0.0.1]:10139: Connection reset by peer"


def test_too_many_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    told = []
    for spare in (3, 100):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, before[1]))
        try:
            told.append(explain(ERROR))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert told[0].here and told[0].text.startswith(f"too many open files: this process may have {used + 3}; raise")
    assert told[1] == explain(ERROR)
    assert explain(OSError(24, "Too many open files")).here


def test_an_interface_that_is_not_there() -> None:
    told = explain(RuntimeError("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: nope9"))
    assert told.here and told.text.startswith("no network interface nope9; set GLOO_SOCKET_IFNAME to one of: ")


def test_a_loopback_address_that_another_host_told() -> None:
    gloo = "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: refused, remote=[{}]:9626$0"
    told = explain(RuntimeError(gloo.format("127.0.1.1")))
    assert not told.here, "no rank of this host is to blame"
    assert told.text.startswith("nothing listens at 127.0.1.1, an address of one host alone; if ranks are on several")
    assert "set GLOO_SOCKET_IFNAME on each to the interface that joins them (here: lo" in told.text
    assert explain(RuntimeError(gloo.format("10.0.0.2"))).text == gloo.format("10.0.0.2")


@pytest.mark.parametrize(
    "rank, place, words, ranks",
    [
        (1, "nobody", "found no store of rank 0 at 127.0.0.1:.*: nothing listens there; was rank 0 started", (0,)),
        (0, "taken", "cannot open a store at 127.0.0.1:.*: port .* is taken; end the program that has it", (0,)),
        (1, "unknown", f"found no store .* at {UNKNOWN}:.*: the name {UNKNOWN} is unknown", (1,)),
        (0, "unknown", f"cannot open a store at {UNKNOWN}:.*: the name {UNKNOWN} is unknown", (0,)),
    ],
)
def test_a_meeting_that_fails_says_why(
    port: int, rank: int, place: str, words: str, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = socket.getaddrinfo

    def look_up(host: str, *about: Any, **more: Any) -> list[Any]:
        if host == UNKNOWN:  # a name server may take its time to say so
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(host, *about, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(launch, "_LAST_LOOK", 20.0)  # for a machine that has other things to do
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    host = UNKNOWN if place == "unknown" else "127.0.0.1"
    environ = {"MASTER_ADDR": host, "MASTER_PORT": str(port if place == "taken" else nobody)}
    with pytest.raises(TransportError, match=words) as failed:
        make_store(RankInfo(rank, 2), 0.5, environ)
    assert failed.value.ranks == ranks
