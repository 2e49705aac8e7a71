"""How fast this process's TCP connections carry, from what the kernel counts: asking costs the job nothing."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

from .state import LinkState

# struct tcp_info of linux/tcp.h: the offsets of 32-bit numbers in its first 104 bytes, and of 64-bit ones after them.
_TRIP, _AGAIN, _ACKED, _BUSY, _WINDOW = 68, 100, 120, 168, 176
_SIZE = 256
_SMALL, _LARGE = struct.Struct("=I"), struct.Struct("=Q")
# A link is slow if it carries this many times less than before, while it has data to send for this share of the time.
_TIMES, _SHARE = 3.0, 0.2
_OVER = 1.5
# The weight of the latest measurement in the usual rate.
_LEARNING = 0.1
# Looks in a row in which it must be so.
_LOOKS = 3
# Bytes between two looks below which a rate means nothing.
_FEW = 1 << 16
# Seconds below which a round trip is no longer than usual, however short the others were.
_SHORT = 2e-3


class TcpCounters(NamedTuple):
    """Of a connection: bytes acknowledged, segments sent again, seconds with data to send, seconds of a round trip."""

    acknowledged: int
    again: int
    busy: float
    trip: float = 0.0


def counters() -> dict[tuple[str, str], TcpCounters]:
    """Return the counts of this process's established TCP connections, by address and port of both ends."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                        ends = _name(end.getsockname()), _name(end.getpeername())
                        found[ends] = _read(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE))
    return found


def _name(address: tuple[str, int]) -> str:
    return f"{address[0].removeprefix('::ffff:')}:{address[1]}"


def _read(info: bytes) -> TcpCounters:
    if len(info) < _WINDOW + 8:
        return TcpCounters(0, 0, 0.0)
    # While the other end takes nothing the link is not at fault.
    busy = _LARGE.unpack_from(info, _BUSY)[0] - _LARGE.unpack_from(info, _WINDOW)[0]
    again, trip = _SMALL.unpack_from(info, _AGAIN)[0], _SMALL.unpack_from(info, _TRIP)[0]
    return TcpCounters(_LARGE.unpack_from(info, _ACKED)[0], again, busy / 1e6, trip / 1e6)


class Links:
    """Finds connections that have become slow. One thread uses it.

    Attributes:
        ends: addresses and ports of this process's ends, by which others identify them.
        again: segments that were sent again so far, over all connections that are open.
        held_up: other ends of busy connections whose round trips take longer than usual: their data or acknowledgements
            wait at an interface.
    """

    def __init__(self) -> None:
        self.ends: tuple[str, ...] = ()
        self.again = 0
        self.held_up: tuple[str, ...] = ()
        self._before: dict[tuple[str, str], TcpCounters] = {}
        self._at = 0.0
        self._usual: dict[tuple[str, str], float] = {}
        self._trips: dict[tuple[str, str], float] = {}
        self._slow: dict[tuple[str, str], int] = {}

    def look(self, now: float, counts: dict[tuple[str, str], TcpCounters]) -> tuple[LinkState, ...]:
        """Take the ``counters`` of this moment; return the links that are slow."""
        passed, slow, held_up = now - self._at, [], []
        self.ends = tuple(sorted({here for here, _ in counts}))[:64]
        self.again = sum(each.again for each in counts.values())
        for ends, each in counts.items():
            before = self._before.get(ends)
            if before is None or passed <= 0:
                continue
            sent, busy = each.acknowledged - before.acknowledged, each.busy - before.busy
            if sent < _FEW or busy <= 0:
                continue
            trip = self._trips.setdefault(ends, each.trip)
            if each.trip > max(_SHORT, _TIMES * trip):
                held_up.append(ends[1])
            else:
                self._trips[ends] += _LEARNING * (each.trip - trip)
            rate, usual = sent / busy, self._usual.get(ends, 0.0)
            was = self._slow.get(ends, 0)
            # A link that was slow three times counts as slow until it is about as fast again.
            is_slow = rate * _OVER < usual if was >= _LOOKS else busy > _SHARE * passed and rate * _TIMES < usual
            self._slow[ends] = was + 1 if is_slow else 0
            if not is_slow:
                self._usual[ends] = rate if not usual else usual + _LEARNING * (rate - usual)
            if self._slow[ends] >= _LOOKS:
                slow.append(LinkState(*ends, rate, usual))
        self._before, self._at, self.held_up = counts, now, tuple(held_up)
        return tuple(slow)
