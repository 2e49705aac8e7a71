"""Interfaces that go down and come back while a job runs, by a schedule that is set before."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab.hosts import Host
from benchmarks.lab.network import Network, seconds_of

__all__ = ["EVENTS", "Flap", "Flapping"]

EVENTS = "LAB_EVENTS"
"""Variable with the folder in which a worker makes a file of an event's name to tell that it has happened."""


@dataclass(frozen=True)
class Flap:
    """A time for which an interface of a host is down.

    Attributes:
        host: number of the host, from 0.
        device: its interface, such as "eth1".
        down: seconds after the start of the job, or after the event, at which it goes down.
        up: seconds at which it comes back; None: it does not.
        event: what the seconds are counted from; "": the job's start.
    """

    host: int
    device: str
    down: float
    up: float | None = None
    event: str = ""

    @classmethod
    def parse(cls, text: str) -> Flap:
        """Return the flap that ``text`` says: HOST:DEVICE:FROM-TO or HOST:DEVICE:FROM-TO:EVENT, TO may be left out.

        Raises:
            ValueError: it says none.
        """
        match = re.fullmatch(r"(\d+):([a-z]+\d+):([^-:]+)-([^-:]*)(?::([A-Za-z0-9._-]+))?", text)
        if match is None:
            raise ValueError(
                f"flap={text!r}; expected HOST:DEVICE:FROM-TO, such as 1:eth1:2s-5s, and :EVENT behind it where the "
                "times count from an event"
            )
        down, up = (
            0.0 if part in ("0", "0s") else seconds_of("flap", part) if part else None for part in (match[3], match[4])
        )
        assert down is not None
        if up is not None and up <= down:
            raise ValueError(f"flap={text!r}; expected a time to come back that is after {match[3]}")
        return cls(int(match[1]), match[2], down, up, match[5] or "")

    def check(self, network: Network) -> None:
        """Raise ``ValueError`` if ``network`` has no such interface."""
        if network.hosts < 2:
            raise ValueError("a flap with one host; a link needs two")
        if self.host >= network.hosts:
            raise ValueError(f"a flap of host {self.host}; expected 0 to {network.hosts - 1}")
        if self.device not in network.devices:
            raise ValueError(f"a flap of {self.device}; these hosts have {', '.join(network.devices)}")


class Flapping:
    """Takes interfaces down and up when it is their time; ``step`` must be called often.

    What comes up again has its address still. Connections over it hear of nothing: their bytes are lost meanwhile.
    """

    def __init__(self, flaps: Sequence[Flap], hosts: Sequence[Host], events: Path | None) -> None:
        self._hosts = hosts
        self._events = events
        self._start = time.monotonic()
        self._happened: dict[str, float] = {"": self._start}
        self._left = [(flap, flap.down, "down") for flap in flaps]
        self._left += [(flap, flap.up, "up") for flap in flaps if flap.up is not None]
        self._left.sort(key=lambda change: change[1])

    def step(self) -> list[str]:
        """Do what is due; return what was done, in words."""
        now = time.monotonic()
        for event in {flap.event for flap, _, _ in self._left} - self._happened.keys():
            if self._events is not None and (self._events / event).exists():
                self._happened[event] = now
        due = [change for change in self._left if now >= self._happened.get(change[0].event, float("inf")) + change[1]]
        told = []
        for flap, _, state in due:
            host = self._hosts[flap.host]
            subprocess.run([*host.enter, "ip", "link", "set", flap.device, state], check=True)
            told.append(
                f"{host.name}: {flap.device} is {state}, {time.monotonic() - self._start:.2f} s after the start"
            )
        self._left = [change for change in self._left if change not in due]
        return told
