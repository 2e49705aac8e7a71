"""The switcher with a rank that comes late: its lateness is no cost of either form, and all ranks choose alike."""

import threading

import pytest
import torch

from fusionlayer.collectives import switching
from fusionlayer.collectives.switching import SAMPLES, Switcher
from fusionlayer.transport import Transport
from tests.ranks import over_threads

WORLD, LATE = 3, 2
LIKE = torch.zeros(1)


class SharedTime(threading.local):
    """A clock for each rank; who waits for others has waited until the last of them."""

    now = 0.0


@pytest.mark.parametrize("slow_form", [False, True])
@pytest.mark.parametrize("late_for", [False, True])
def test_lateness_is_no_cost_of_a_form(monkeypatch: pytest.MonkeyPatch, late_for: bool, slow_form: bool) -> None:
    """A rank is 10 s late for each call of one form, and both forms wait for it, as collectives do."""
    clock = SharedTime()
    monkeypatch.setattr(switching.time, "perf_counter", lambda: clock.now)
    seconds = {slow_form: 2.0, not slow_form: 1.0}
    clocks = [0.0] * WORLD
    meeting = threading.Barrier(WORLD)

    def meet(rank: int) -> None:
        clocks[rank] = clock.now
        meeting.wait(180)
        clock.now = max(clocks)
        meeting.wait(180)

    def body(transport: Transport) -> tuple[list[bool], float, float, float]:
        rank, barrier = transport.rank, transport.barrier

        def late_barrier() -> None:
            barrier()
            meet(rank)

        def call(form: bool) -> None:
            meet(rank)
            clock.now += seconds[form]

        transport.barrier = late_barrier  # type: ignore[method-assign]
        switcher = Switcher(transport)
        forms = []
        for number in range(2 * SAMPLES + 20):
            form_to_come = bool(number % 2) if number < 2 * SAMPLES else late_for
            clock.now += 0.001 * rank + (10.0 if rank == LATE and form_to_come == late_for else 0.0)
            forms.append(switcher.run("all_reduce", 1000, lambda: call(False), lambda: call(True), like=LIKE))
        (decision,) = switcher.decisions
        assert decision.native is not None and decision.zipped is not None
        return forms, decision.native, decision.zipped, float(decision.zips)

    first, *others = over_threads(WORLD, body)
    assert all(other == first for other in others), "ranks have chosen differently"
    forms, native, zipped, zips = first
    assert forms[: 2 * SAMPLES] == [False, True] * SAMPLES
    assert (native, zipped) == pytest.approx((seconds[False], seconds[True]))
    assert bool(zips) is not slow_form and all(form is not slow_form for form in forms[2 * SAMPLES :])
