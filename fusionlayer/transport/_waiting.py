"""Waiting for libraries that can only be polled, without keeping a core busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# The first polls follow each other without sleep. Then the seconds of sleep between two polls double up to a limit.
_LOOKS_AT_ONCE = 20
_SHORTEST_SLEEP = 20e-6
_LONGEST_SLEEP = 500e-6


def wait_until(done: Callable[[], bool], deadline: float, is_given_up: Callable[[], bool] = lambda: False) -> bool:
    """Poll until ``done()`` is true; return whether it became true.

    Returns False once ``is_given_up()`` is true or the monotonic clock has passed ``deadline``.
    """
    looks = 0
    while not done():
        if is_given_up() or time.monotonic() > deadline:
            return False
        looks += 1
        if looks <= _LOOKS_AT_ONCE:
            os.sched_yield()
        else:
            time.sleep(min(_SHORTEST_SLEEP * 2 ** min(looks - _LOOKS_AT_ONCE, 10), _LONGEST_SLEEP))
    return True
