"""The throughput of TCP connections between two ranks over a long and lossy path."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..base.errors import ConfigError
from ..base.registry import nearest

_SEGMENT_BYTES = 1448
"""Payload of a TCP segment on Ethernet, with timestamps."""

_FIRST_SEGMENTS = 10
"""The segments that a connection sends before its first acknowledgement (RFC 6928), and after a pause."""

_SPREAD = 0.407
"""Standard deviation of a window of reno by its mean, where losses come at random (Ott, Kemperman, Mathis: "The
Stationary Behavior of Ideal TCP Congestion Avoidance", 1996): of loss p the mean is 1.31 / sqrt(p), the mean of the
square 2 / p."""

_CHUNK_BYTES = 12 << 10
"""For a short message over connections of our own. A message with fewer chunks leaves connections unused."""


def _reno(loss: float, rtt: float) -> float:
    """Mathis et al., "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm" (1997)."""
    return math.sqrt(1.5 / loss)


def _cubic(loss: float, rtt: float) -> float:
    """The mean window of CUBIC (RFC 9438, section 5.1), which is no smaller than that of reno."""
    return max(_reno(loss, rtt), 1.054 * math.pow(rtt / loss, 0.75))


def _bbr(loss: float, rtt: float) -> float:
    """BBR does not take a loss for a full link."""
    return math.inf


CONGESTION_CONTROLS = {"bbr": _bbr, "cubic": _cubic, "reno": _reno}
"""Mean segments in flight by chance of a loss and round trip in seconds, by the kernel's name of the control."""


def tcp_rate(rtt: float, loss: float, congestion: str = "reno") -> float:
    """Return the bits of payload per second that one TCP connection carries, however fast its link; infinite: any.

    Args:
        rtt: seconds of a round trip.
        loss: probability that a segment is dropped, 0 to 1.
        congestion: a key of ``CONGESTION_CONTROLS``.

    Raises:
        ConfigError: no formula is known for this congestion control.
    """
    if congestion not in CONGESTION_CONTROLS:
        raise ConfigError(
            f"no formula for congestion control {congestion!r}; {nearest(congestion, sorted(CONGESTION_CONTROLS))}"
        )
    if not (rtt > 0 and loss > 0):
        return math.inf
    return 8 * _SEGMENT_BYTES / rtt * CONGESTION_CONTROLS[congestion](loss, rtt)


def way_name(rtt: float, loss: float, congestion: str) -> str:
    """Return the name that a profile has for a way, such as "50ms/0.0005/reno"."""
    return f"{1e3 * rtt:g}ms/{loss:g}/{congestion}"


@dataclass(frozen=True)
class Connections:
    """The TCP connections of one rank to one other, over a link that many may share.

    Attributes:
        rtt: seconds of a round trip.
        loss: probability that a segment is dropped, 0 to 1, each way.
        congestion: control of TCP.
        count: of connections of our own; None: gloo's one.
        link_rate: bits of payload per second of the whole link.
        measured: bits per second of one connection; None: by ``tcp_rate``.
        shared: all lanes send by the same ones, as the threads of one group of gloo do.
        rested: they begin with ten segments each, as after a pause of more than 200 ms and a round trip.
    """

    rtt: float
    loss: float = 0.0
    congestion: str = "reno"
    count: int | None = None
    link_rate: float = math.inf
    measured: float | None = None
    shared: bool = False
    rested: bool = False

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for which ``nbytes`` occupy the connections, beyond the arrival of the first byte.

        As many bytes are sent the other way meanwhile; the result is the time of the slower direction.

        Idle connections send twice as many segments after each round trip, up to the limit of loss and link; those of
        BBR keep their rate. Then come the bytes. A dropped segment comes a round trip later, which counts as far as it
        outlasts the other bytes.
        """
        used = min(self.count or 1, max(1, math.ceil(nbytes / _CHUNK_BYTES)))
        one = tcp_rate(self.rtt, self.loss, self.congestion) if self.measured is None else self.measured
        rate = min(used * one, self.link_rate)
        waited, left = 0.0, nbytes
        if self.rested and self.congestion != "bbr":
            window = used * _FIRST_SEGMENTS * _SEGMENT_BYTES
            while left > window and window * 8 < rate * self.rtt:
                left -= window
                waited += self.rtt
                window *= 2
        carried = 8 * left / rate if rate < math.inf else 0.0
        if self.loss and used * one < self.link_rate and self.congestion != "bbr":
            carried *= self._slower(nbytes, used)
        return waited + carried + self._repeated(nbytes, rate)

    def _slower(self, nbytes: float, used: int) -> float:
        """Return by how much the slower direction of an exchange takes longer than their mean.

        Each loss halves a window. So windows differ, and a message has as many independent ones as it has connections
        and losses. The larger of two values of one normal distribution is in the mean 1 / sqrt(pi) deviations above
        its mean.
        """
        losses = self.loss * nbytes / _SEGMENT_BYTES
        return 1 + _SPREAD / math.sqrt(math.pi * (used + losses))

    def _repeated(self, nbytes: float, rate: float) -> float:
        """Return the mean delay of repeated segments in seconds, both ways together.

        Losses come at random moments, so the last one is an exponentially distributed time before the end. If that is
        less than a round trip, the rest of the round trip is waited for.
        """
        if not (self.loss and self.rtt and rate < math.inf):
            return 0.0
        often = 2 * self.loss * rate / 8 / _SEGMENT_BYTES
        late = min(self.rtt, 8 * nbytes / rate)
        kept = math.exp(-often * late)
        return self.rtt * (1 - kept) - (1 - kept) / often + late * kept
