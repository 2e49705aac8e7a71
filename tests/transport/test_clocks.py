import time

import pytest

from fusionlayer.transport import Transport, local
from fusionlayer.transport._clocks import measure_clock
from tests.ranks import over_threads

SECOND = 1_000_000_000


class Clocks:
    """Clocks of three hosts with two ranks each, of which only the first two agree."""

    @staticmethod
    def perf_counter_ns() -> int:
        transport = local.current()
        assert transport is not None
        return time.perf_counter_ns() - (0, 0, 5, 5, -7, -7)[transport.rank] * SECOND


def test_offsets_are_right_to_the_error_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionlayer.transport._clocks.time", Clocks)

    def body(transport: Transport) -> tuple[int, int] | None:
        return measure_clock(transport, wanted=transport.rank == 3)

    found = over_threads(6, body, ranks_per_node=2)
    for clock, seconds in zip(found, (0, 0, 5, 5, -7, -7), strict=True):
        assert clock is not None
        offset, error = clock
        assert abs(offset - seconds * SECOND) <= error < SECOND
    assert found[0] == found[1] == (0, 0) and found[2] == found[3] and found[4] == found[5], "one clock on a host"


def test_without_a_timeline_nothing_is_measured() -> None:
    def body(transport: Transport) -> tuple[object, int]:
        return measure_clock(transport, wanted=False), transport.bytes_sent

    assert over_threads(3, body) == [(None, 2)] * 3, "a byte to each other rank"
