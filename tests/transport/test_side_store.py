"""The store of ranks that met by another library."""

import json
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusionlayer.base.errors import TransportError
from fusionlayer.process.interfaces import ipv4_addresses, reachable_names
from fusionlayer.transport import _side_store
from fusionlayer.transport._side_store import open_store
from fusionlayer.transport._waiting import wait_until


def told_by(notice: Tensor) -> Callable[[Tensor], None]:
    def broadcast(mine: Tensor) -> None:
        mine.copy_(notice)

    return broadcast


def kept() -> tuple[object, Tensor]:
    """Return rank 0's store, and what it told the others."""
    said: list[Tensor] = []
    store = open_store(0, 5, lambda notice: said.append(notice.clone()))
    return store, said[0]


def changed(notice: Tensor, **fields: object) -> Tensor:
    text = json.dumps({**json.loads(notice.numpy().tobytes().rstrip(b"\0")), **fields}).encode()
    other = torch.zeros_like(notice)
    other[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return other


def test_ranks_of_one_host_and_of_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, notice = kept()
    first.set("word", "from rank 0")  # type: ignore[attr-defined]
    assert open_store(1, 5, told_by(notice)).get("word") == b"from rank 0"
    elsewhere = changed(notice, node="another", names=["no.such.host.invalid", "127.0.0.1"])
    assert open_store(2, 5, told_by(elsewhere)).get("word") == b"from rank 0"


def test_an_address_at_which_another_store_answers_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_side_store, "_KNOCK", 0.5)
    store, notice = kept()
    port = json.loads(notice.numpy().tobytes().rstrip(b"\0"))["port"]
    with pytest.raises(TransportError, match=f"rank 3 cannot reach rank 0 at port {port} of 127.0.0.1") as caught:
        open_store(3, 5, told_by(changed(notice, token="another")))
    assert caught.value.ranks == (0,)
    del store


def test_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ipv4_addresses()["lo"] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert reachable_names()[0] == "127.0.0.1"
    assert len({*reachable_names()}) == len(reachable_names())


def test_waiting_ends_when_done_given_up_or_late() -> None:
    looks = iter([False] * 50 + [True])
    assert wait_until(lambda: next(looks), float("inf"))
    given_up = threading.Event()
    threading.Timer(0.05, given_up.set).start()
    assert not wait_until(lambda: False, float("inf"), given_up.is_set)
    assert not wait_until(lambda: False, 0.0)
