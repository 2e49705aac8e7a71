"""Whether the machine is quiet enough for a measurement of time."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

__all__ = ["pressure", "refuse_if_busy"]

PRESSURE_LIMIT = 20.0
"""Percent of the last ten seconds in which some process waited for a core."""


def pressure() -> dict[str, float]:
    """Return how busy the machine is: ``load``, the mean number of running processes over the last minute, and
    ``cpu_waiting``, the percentage of the last ten seconds in which some process waited for a core.

    The second is left out where the kernel does not tell it.
    """
    found = {"load": round(os.getloadavg()[0], 2)}
    try:
        text = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return found
    if match := re.search(r"^some avg10=([\d.]+)", text, re.MULTILINE):
        found["cpu_waiting"] = float(match[1])
    return found


def refuse_if_busy(busy_ok: bool, ranks: int, patience: float = 180.0) -> None:
    """Return when the machine is quiet enough to time ``ranks`` processes, at once if ``busy_ok``.

    The mean of the last minute keeps what a benchmark before this one has done; it halves every 42 seconds, so
    ``patience`` seconds are waited.

    Raises:
        SystemExit: other work goes on; the message says what was seen.
    """
    if busy_ok:
        return
    end = time.monotonic() + patience
    told = False
    while reason := _why_busy(ranks):
        if time.monotonic() >= end:
            raise SystemExit(f"the machine is busy: {reason}; end other work, or measure anyway with --busy-ok")
        if not told:
            print(f"waiting up to {patience:g} s for the machine to become quiet: {reason}", file=sys.stderr)
            told = True
        time.sleep(1)


def _why_busy(ranks: int) -> str | None:
    seen = pressure()
    if seen["load"] > ranks + 1:
        return f"the load of the last minute is {seen['load']:g}, expected at most {ranks + 1} for {ranks} workers"
    waiting = seen.get("cpu_waiting", 0.0)
    if waiting > PRESSURE_LIMIT:
        return f"processes waited for a core {waiting:g} % of the last 10 s, expected at most {PRESSURE_LIMIT:g} %"
    return None
