"""Where a thread is, from its stack."""

import gc
import sys
import threading

import pytest

from fusionlayer.health import stack


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
    assert place.where.startswith("tests/health/test_stack.py:") and gc.isenabled()
    assert not collected, f"at lines {collected}"
