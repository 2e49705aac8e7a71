"""Cost functions: seconds by size, measured or given, of codecs and links."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from ..base.errors import ConfigError
from ..collectives._alpha_beta import AlphaBeta

__all__ = ["FREE", "AlphaBeta", "CodecCost", "Cost", "Curve", "LinkCost", "parse_rate"]

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_rate(text: str) -> float:
    """Return bits per second for a rate in the words of tc, such as "100mbit"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text)
    if found is None or not float(found[1]):
        raise ConfigError(f"rate {text!r}; expected a number above 0 with bit, kbit, mbit or gbit, such as 100mbit")
    return float(found[1]) * _UNITS[found[2]]


FREE = AlphaBeta(0.0, 0.0)
"""The cost of 0 seconds for any size."""


@dataclass(frozen=True)
class Curve:
    """Measured seconds, interpolated linearly between the measured sizes.

    A size below the smallest costs as much as the smallest; size 0 costs nothing. The curve never falls: a point below
    an earlier one counts as noise. Beyond the largest size the last rising segment continues, because a flat end is
    noise and would make larger sizes free.

    Attributes:
        points: (size, seconds), sizes above 0 and growing.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if len(sizes) < 2:
            raise ConfigError(f"a curve of {len(sizes)} points; expected at least 2: [[size, seconds], ...]")
        if sizes[0] <= 0 or any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)):
            raise ConfigError(f"a curve over the sizes {sizes}; expected sizes above 0, growing")
        if not all(0 <= seconds < float("inf") for _, seconds in self.points):
            raise ConfigError(f"a curve with {[s for _, s in self.points]} seconds; expected numbers of at least 0")

    @cached_property
    def _rising(self) -> tuple[list[float], list[float]]:
        """Return sizes and seconds that never fall, with a point beyond the largest size to extend the curve."""
        sizes = [size for size, _ in self.points]
        seconds = list(accumulate((each for _, each in self.points), max))
        slopes = [(b - a) / (y - x) for x, y, a, b in zip(sizes, sizes[1:], seconds, seconds[1:], strict=False)]
        last = next((slope for slope in reversed(slopes) if slope > 0), 0.0)
        return [*sizes, 2 * sizes[-1]], [*seconds, seconds[-1] + last * sizes[-1]]

    def __call__(self, size: float) -> float:
        """Return seconds."""
        if size <= 0:
            return 0.0
        sizes, seconds = self._rising
        size = max(size, sizes[0])
        i = bisect_right(sizes, size, 1, len(sizes) - 1)
        share = (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def fit(self, alpha: float) -> AlphaBeta:
        """Return the line that starts at ``alpha`` seconds and best fits the points of the upper decade.

        It minimizes relative errors. Small messages are left out: on a shaped link they pass as a burst, faster than
        the rate.
        """
        top = self.points[-1][0]
        used = [(x, y) for x, y in self.points if x >= top / 10 and y > 0]
        beta = sum((y - alpha) * x / y**2 for x, y in used) / max(sum((x / y) ** 2 for x, y in used), 1e-300)
        return AlphaBeta(alpha, max(beta, 0.0))


Cost = AlphaBeta | Curve


@dataclass(frozen=True)
class CodecCost:
    """The costs of a codec: CPU seconds of its functions on one core, by number of elements.

    Attributes:
        bits: the bits that are sent for each element, metadata included.
        encode: the cost of encoding this many elements, with error feedback if the codec has it by default.
        decode: the cost of decoding this many elements.
        sum: the cost of summing messages with this many elements altogether.
        recode: the cost of summing messages with this many elements altogether and encoding the sum.
        lossless: whether values are sent unchanged.
        algorithm: collective that the codec needs; None lets the nodes decide.
        ahead: the thread that computes encodes gradients one by one as they arrive, and their messages are gathered.
        within_bits: the bits that are sent for each element inside a host in a two-level sum; None: ``bits``.
    """

    bits: float
    encode: Cost
    decode: Cost
    sum: Cost
    recode: Cost
    lossless: bool = False
    algorithm: str | None = None
    ahead: bool = False
    within_bits: float | None = None

    def __post_init__(self) -> None:
        for bits in (self.bits, self.bits if self.within_bits is None else self.within_bits):
            if not 0 <= bits <= 64:
                raise ConfigError(f"bits={bits!r} for an element; expected 0 to 64")

    @property
    def collective(self) -> str | None:
        """The collective that the codec needs; ``collectives.choose`` reads it."""
        return self.algorithm

    def nbytes(self, elements: float) -> float:
        """Return bytes of a message."""
        return elements * self.bits / 8

    def nbytes_within(self, elements: float) -> float:
        """Return bytes of a message inside a host in a two-level sum."""
        return elements * (self.bits if self.within_bits is None else self.within_bits) / 8


@dataclass(frozen=True)
class LinkCost:
    """The costs of a link, measured between two ranks.

    Attributes:
        latency: seconds of an exchange of one byte; every further hop of a collective costs as much.
        overhead: CPU seconds of a message; every further message of an exchange costs as much.
        cpu_per_byte: CPU seconds for each byte that a rank sends, and for one that it receives at the same time.
        exchange: seconds by bytes that each rank sends, all ranks at once.
        all_reduce: seconds of the transport's own all-reduce of two ranks, by bytes that each rank sends.
        sum_per_byte: CPU seconds for each byte that a rank sends in that all-reduce, which may have no checksums; None:
            ``cpu_per_byte``.
    """

    latency: float
    overhead: float
    cpu_per_byte: float
    exchange: Cost
    all_reduce: Cost
    sum_per_byte: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency", "overhead", "cpu_per_byte", "cpu_per_summed_byte"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)!r}; expected seconds of at least 0")

    def fitted(self) -> LinkCost:
        """Return the link with alpha-beta costs instead of curves; an all-reduce of two ranks has two latencies."""
        exchange = self.exchange.fit(self.latency) if isinstance(self.exchange, Curve) else self.exchange
        reduce = self.all_reduce.fit(2 * self.latency) if isinstance(self.all_reduce, Curve) else self.all_reduce
        return replace(self, exchange=exchange, all_reduce=reduce)

    def with_latency(self, latency: float) -> LinkCost:
        """Return the fitted link with another latency; each of an all-reduce's two hops changes by as much."""
        line = self.fitted()
        assert isinstance(line.exchange, AlphaBeta) and isinstance(line.all_reduce, AlphaBeta)
        reduce = max(0.0, line.all_reduce.alpha + 2 * (latency - self.latency))
        exchange = AlphaBeta(latency, line.exchange.beta)
        return replace(line, latency=latency, exchange=exchange, all_reduce=AlphaBeta(reduce, line.all_reduce.beta))

    @property
    def cpu_per_summed_byte(self) -> float:
        """``sum_per_byte``, or what stands in its place."""
        return self.cpu_per_byte if self.sum_per_byte is None else self.sum_per_byte

    @property
    def hop(self) -> float:
        """Seconds of a hop of the transport's own all-reduce, however small."""
        return self.all_reduce.alpha / 2 if isinstance(self.all_reduce, AlphaBeta) else self.latency

    def at_distance(self, rtt: float, *, asks: bool) -> LinkCost:
        """Return the fitted link with a longer way.

        Args:
            rtt: seconds of a round trip, beyond the measured latency.
            asks: a message is sent when its receiver has signalled readiness, as gloo's are: a round trip after it was
                asked for. Other messages, over connections of our own, arrive after half a round trip.
        """
        return self.with_latency(self.latency + (rtt if asks else rtt / 2))

    @staticmethod
    def between(rate: float, known: Iterable[tuple[float, LinkCost]]) -> LinkCost:
        """Return the link of ``rate`` bits per second from links of ``known`` rates.

        Between two known rates, seconds per byte are interpolated on logarithmic axes, other costs over the logarithm
        of the rate. Beyond them the nearest rate's seconds per byte change with the rate, but never fall below its CPU
        time, and other costs stay. On a slower link nothing is faster than its rate: ranks of one host, on which a
        profile may have been measured, sum through shared memory, faster than they exchange messages.
        """
        pairs = sorted(((bits, link.fitted()) for bits, link in known), key=lambda pair: pair[0])
        rates = np.log([bits for bits, _ in pairs])
        links = [link for _, link in pairs]
        place = float(np.log(rate))

        def value(name: str) -> float:
            return float(np.interp(place, rates, [getattr(link, name) for link in links]))

        def beta(name: str) -> float:
            betas = [max(getattr(link, name).beta, 1e-300) for link in links]
            inside = float(np.exp(np.interp(place, rates, np.log(betas))))
            scaled = inside * float(np.exp(np.clip(place, rates[0], rates[-1]) - place))
            return max(scaled, 8 / rate) if place < rates[0] else scaled

        latency, cpu_per_byte, sum_per_byte = map(value, ("latency", "cpu_per_byte", "cpu_per_summed_byte"))
        return LinkCost(
            latency,
            value("overhead"),
            cpu_per_byte,
            AlphaBeta(latency, max(beta("exchange"), cpu_per_byte)),
            AlphaBeta(2 * value("hop"), max(beta("all_reduce"), sum_per_byte)),
            sum_per_byte,
        )
