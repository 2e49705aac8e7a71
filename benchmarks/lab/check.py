"""What a lab gives, against what was asked of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab.hosts import address_of
from benchmarks.lab.launcher import launch
from benchmarks.lab.network import Network, Obstacle
from benchmarks.lab.probe import MESSAGE

__all__ = ["Seen", "measure"]

_PROBE = str(Path(__file__).with_name("probe.py"))
_PAYLOAD, _DATAGRAM = 1448 / 1514, 1472 / 1514
"""Shares of a full frame that are payload of TCP and of UDP, as shapers count frames: the most that a link gives."""

_FEW, _MANY = 2000, 60000
"""Datagrams that are counted: so many at least, and so many at most, to see a rare loss thirty times."""


@dataclass(frozen=True)
class Seen:
    """What the link between two hosts gave. Rates are of payload, in bits per second; times in seconds.

    Attributes:
        network: what was asked.
        rate: of the link between the two, as asked; None: not limited.
        congestion: control that TCP really used.
        round_trip: of one byte and back, median and shortest.
        after_idle: of 64 KiB over a link that was idle, and an answer of one byte; median and shortest.
        lost: share of small datagrams that did not come.
        overtaken: share of those that came after one that was sent later.
        datagrams: rate of datagrams that fill frames, sent as fast as the link takes them; TCP has no part in it.
        single: rate of one stream.
        both: rates of two streams at the same time, one each way.
        cpu: seconds of a core per megabyte that arrived, one way and both ways: of the probe at both ends, of the
            switch where it is a process, and of this machine's interrupts.
    """

    network: Network
    rate: float | None
    congestion: str
    round_trip: tuple[float, float]
    after_idle: tuple[float, float]
    lost: float
    overtaken: float
    datagrams: float
    single: float
    both: tuple[float, float]
    cpu: tuple[float, float]

    def rows(self) -> list[dict[str, str]]:
        """Return a table: what, asked, seen, and how much of what was asked that is."""
        asked = self.rate
        most = None if asked is None else asked * _PAYLOAD
        message = None if most is None else MESSAGE * 8 / most + 2 * self.network.delay_seconds
        limit = None if most is None else f"{most / 1e6:.1f} Mbit/s"
        there_and_back = 2 * self.network.delay_seconds
        full = None if asked is None else asked * _DATAGRAM
        return [
            _row(
                "datagrams, one way",
                None if full is None else f"{full * (1 - self.network.loss) / 1e6:.1f} Mbit/s",
                f"{self.datagrams / 1e6:.1f} Mbit/s",
                _share(self.datagrams, None if full is None else full * (1 - self.network.loss)),
            ),
            _row("frames lost", f"{self.network.loss:.3%}", f"{self.lost:.3%}"),
            _row("frames overtaken", f"{self.network.reordering:.3%}", f"{self.overtaken:.3%}"),
            _row("one stream", limit, f"{self.single / 1e6:.1f} Mbit/s", _share(self.single, most)),
            *(
                _row(f"both ways, {way}", limit, f"{rate / 1e6:.1f} Mbit/s", _share(rate, most))
                for way, rate in zip(("out", "back"), self.both, strict=True)
            ),
            _row("round trip, median", f"{there_and_back * 1e3:.2f} ms", f"{self.round_trip[0] * 1e3:.2f} ms"),
            _row("round trip, shortest", f"{there_and_back * 1e3:.2f} ms", f"{self.round_trip[1] * 1e3:.2f} ms"),
            *(
                _row(
                    f"64 KiB after idle, {which}",
                    None if message is None else f"{message * 1e3:.2f} ms",
                    f"{time * 1e3:.2f} ms",
                    _share(time, message),
                )
                for which, time in zip(("median", "shortest"), self.after_idle, strict=True)
            ),
            *(
                _row(f"CPU per MB, {way}", None, f"{seconds * 1e3:.2f} ms")
                for way, seconds in zip(("one way", "both ways"), self.cpu, strict=True)
            ),
            _row("congestion control", self.network.congestion, self.congestion),
        ]


def _row(what: str, asked: str | None, seen: str, share: str = "") -> dict[str, str]:
    return {"": what, "asked": asked or "", "seen": seen, "of asked": share}


def _share(seen: float, asked: float | None) -> str:
    return "" if asked is None else f"{seen / asked:.1%}"


def measure(network: Network, seconds: float = 3.0, interface: int = 0, peer: int = 1) -> Seen:
    """Return what ``network`` gives between its first host and another; each stream lasts for ``seconds``.

    Args:
        network: what is measured.
        seconds: for which each stream lasts.
        interface: number of the interface whose link is measured.
        peer: number of the other host.

    Raises:
        ValueError: there is one host, no such interface or other host, or too little time.
        Obstacle: the network cannot be made, or a stream broke.
    """
    if network.hosts < 2:
        raise ValueError("check with one host; a link needs two")
    if not (0 <= interface < len(network.devices) and 0 < peer < network.hosts):
        raise ValueError(f"interface {interface} of host {peer}; {network} has {', '.join(network.devices)}")
    if seconds < 1:
        raise ValueError(f"seconds={seconds:g}; expected 1 or more, half a second of which is warm-up")
    rates = [rate for host in (0, peer) if (rate := network.rate_of(host, interface)) is not None]
    rate = min(rates, default=None)
    rarest = min((chance for chance in (network.loss, network.reordering) if chance > 0), default=1.0)
    count = int(min(max(_FEW, 30 / rarest), _MANY))
    asked = {"address": address_of(peer, interface), "peer": peer, "seconds": seconds, "rate": rate, "count": count}
    command = ["env", f"LAB_PROBE={json.dumps(asked)}", sys.executable, _PROBE]
    timeout = 90 + 4 * seconds
    with launch(command, network, timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        # Not communicate(), which would close the lifeline; errors are few, and come at the end.
        output, errors = process.stdout.read(), process.stderr.read()
        process.wait()
    if process.returncode:
        raise Obstacle((errors.strip() or "the probe failed").splitlines()[-1])
    seen: dict[str, Any] = json.loads(output)
    return Seen(
        network,
        rate,
        seen["congestion"],
        (seen["round_trip"]["median"], seen["round_trip"]["min"]),
        (seen["after_idle"]["median"], seen["after_idle"]["min"]),
        seen["lost"],
        seen["overtaken"],
        seen["datagrams"],
        seen["single"][0],
        (seen["both"][0], seen["both"][1]),
        (seen["cpu_seconds_per_megabyte"]["single"], seen["cpu_seconds_per_megabyte"]["both"]),
    )
