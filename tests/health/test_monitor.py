"""The thread that looks after the watches, without any ranks."""

import sys
import threading
from types import FrameType
from typing import Any
from unittest.mock import Mock

from fusionlayer.health import monitor


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
