"""The thread that looks after the watches, without any ranks."""

import gc
import sys
import threading
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest

from fusionlayer.health import monitor, stack


def make_watch() -> Mock:
    return Mock(**{"tick.return_value": 0.001})


def test_a_transport_may_be_dropped_in_the_middle_of_any_line() -> None:
    # As the garbage collector does it, which may run on any thread, in any line.
    own = monitor._Monitor()
    kept, dropped = make_watch(), [make_watch() for _ in range(200)]
    own._beating += dropped
    lines = set()

    def drop(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in (monitor.__file__, threading.__file__):
            return None
        lines.add((frame.f_code.co_name, frame.f_lineno))
        if dropped:
            own.remove(dropped.pop())
        return drop

    def add_and_remove() -> None:
        sys.settrace(drop)
        own.add(kept)
        while dropped:
            own.wake()
        own.remove(kept)
        sys.settrace(None)

    threading.settrace(drop)
    try:
        training = threading.Thread(target=add_and_remove, daemon=True)
        training.start()
    finally:
        training.join(180)
        threading.settrace(None)  # type: ignore[arg-type]
    assert not training.is_alive(), "a thread waits for a lock that it holds"
    thread = own._thread
    if thread is not None:
        thread.join(180)
    assert own._thread is None and not own._beating and not own._leaving
    assert {"add", "wake", "remove", "_run"} <= {name for name, _ in lines}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="allocations do not collect garbage")
def test_nothing_is_collected_while_the_frames_of_a_thread_are_read() -> None:
    """A destructor may release the GIL: the thread then returns from the frame that is being read."""
    arrived, done, collected = threading.Event(), threading.Event(), []

    def deep(depth: int) -> None:
        if depth:
            return deep(depth - 1)
        arrived.set()
        done.wait()

    def begun(phase: str, info: dict[str, int]) -> None:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "_frames":
            collected.append(frame.f_lineno)

    thread = threading.Thread(target=deep, args=(100,))
    thread.start()
    arrived.wait()
    thresholds = gc.get_threshold()
    gc.callbacks.append(begun)
    gc.set_threshold(1)
    try:
        assert thread.ident is not None
        place = stack.of_thread(thread.ident)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(begun)
        done.set()
        thread.join()
    assert place.where.startswith("tests/health/test_monitor.py:") and gc.isenabled()
    assert not collected, f"at lines {collected}"
