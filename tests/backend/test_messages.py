"""Sends and receives as messages, without processes: what is sent is kept, what comes is decoded, in batches too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.backend.messages import PointToPoint
from fusionlayer.backend.work import DecodedWork
from tests.synthetic import gradient

pytestmark = pytest.mark.short

CODEC = codecs.get("int8").bare


class Native(dist.Work):
    """A native call that is done when it is waited for."""

    def __init__(self, carry: Any) -> None:
        super().__init__()
        self.carry = carry
        self.waits = 0

    def wait(self, *timeout: Any) -> bool:
        self.waits += 1
        self.carry()
        return True


def pair(batch: bool) -> tuple[PointToPoint, Native, Native, Tensor, Tensor, list[dist.Work]]:
    messages, wire = PointToPoint(7), {}
    x, out = gradient(1000, 1), torch.zeros(1000)
    sends = Native(lambda: None)

    def send(tensors: list[Tensor]) -> dist.Work:
        wire["message"] = tensors[0]
        return sends

    def receive(tensors: list[Tensor]) -> dist.Work:
        receives.carry = lambda: tensors[0].copy_(wire["message"])
        return receives

    receives = Native(lambda: None)
    if batch:
        messages.begin_batch()
    works = [messages.send(x, CODEC, send, x.device), messages.receive(out, CODEC, receive, x.device)]
    assert messages.bytes_sent == wire["message"].numel() < 1000 * 4 / 3
    return messages, sends, receives, x, out, works


def holds(x: Tensor, out: Tensor) -> bool:
    return bool((out.reshape(-1) - x).norm() < 0.02 * x.norm())


def test_each_is_finished_when_it_is_waited_for() -> None:
    messages, sends, receives, x, out, (sent, received) = pair(batch=False)
    assert len(messages._leaving) == 1 and not out.any()
    assert received.wait() and holds(x, out) and received.wait() and receives.waits == 2
    assert len(messages._leaving) == 1, "not gone before its sender has waited"
    assert sent.wait() and not messages._leaving and sends.waits == 1


def test_a_batch_is_finished_by_its_own_work() -> None:
    messages, sends, receives, x, out, works = pair(batch=True)
    assert works == [sends, receives]
    collective = Native(lambda: None)
    messages.join_batch(collective)
    whole = Native(receives.carry)
    work = messages.end_batch(whole)
    assert isinstance(work, DecodedWork) and not out.any()
    assert work.wait() and holds(x, out) and not messages._leaving
    assert (whole.waits, collective.waits, sends.waits) == (1, 1, 0)
    messages.join_batch(Native(lambda: None))
    assert messages.end_batch(whole) is whole, "what came after belongs to no batch"
