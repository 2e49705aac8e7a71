"""When the ranks have to know who is there for a bucket."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fusionlayer.clock import HOST
from fusionlayer.scheduler.sending import Sender
from fusionlayer.timeline import Timeline

pytestmark = pytest.mark.short

BUCKETS, LANES = 5, 2


def test_the_answer_is_due_when_the_bucket_before_it_on_its_lane_travels() -> None:
    """Neither while that bucket waits for an answer of its own, nor only when the lane has come to this one."""
    due: dict[int, Callable[[], bool]] = {}
    while_asked, while_sent = [], []
    work: list[Callable[[Any], None]] = []

    def now() -> list[int]:
        return [index for index in sorted(due) if due[index]()]

    def put(job: Callable[[Any], None], abandoned: object = None) -> Any:
        work.append(job)
        return SimpleNamespace()

    def ask(job: Callable[[Any], None]) -> Any:
        job(None)
        return SimpleNamespace(wait=lambda: while_asked.append(now()))

    def buffer(index: int) -> Any:
        def attend(transport: object, is_due: Callable[[], bool]) -> None:
            due[index] = is_due

        graceful = SimpleNamespace(attend=attend)
        return SimpleNamespace(graceful=graceful, nbytes=0, run=lambda *_: while_sent.append(now()))

    lane: Any = SimpleNamespace(put=put)
    sender = Sender([lane] * LANES, HOST, Timeline(None, 0), False, [SimpleNamespace(put=ask)])  # type: ignore[list-item]
    for index in range(BUCKETS):
        sender.send(index, buffer(index), 0, 0)
    for job in work:  # in the order of the buckets, as if the lanes were equally fast
        job(SimpleNamespace())
    assert while_asked == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert while_sent == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
