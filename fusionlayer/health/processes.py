"""Which processes of a job are gone or stopped, as far as that can be seen from here without a store."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..process.processes import Identity
from .judge import Evidence
from .state import Finding

# Seconds for which ranks continue connecting after one is gone: it may have done its part, and had nothing more to do.
_GRACE = 0.5
# The share of the host's processor time that all its ranks may spend on looking for processes that are gone: each look
# reads a file of every process of the host.
_SHARE = 0.02
# Seconds that a host may take to accept a connection, and between two attempts to connect to a process.
_CONNECT, _PAUSE = 1.0, 0.5


class Processes:
    """The processes of a job's ranks, looked up in the process table of this host. Any thread may use it.

    Attributes:
        of: the known processes by rank, this one's included; complete and constant once ranks have met.
        own: this process.
    """

    def __init__(self, rank: int, size: int, known: Mapping[int, Identity]) -> None:
        self.own = Identity.own()
        self.of = {**known, rank: self.own}
        self._rank = rank
        # Guards the next three.
        self._lock = threading.Lock()
        self._first: list[Evidence] = []
        self._first_at = self._next_look = 0.0

    def look_at(self, rank: int) -> Evidence | None:
        """Return the evidence that the process of a rank is gone or stopped, or None."""
        identity = self.of.get(rank)
        trouble = identity.trouble(self.own) if identity else None
        if not trouble:
            return None
        text = f"rank {rank} is gone ({identity})" if trouble == "gone" else f"rank {rank} is stopped ({identity})"
        return Evidence(rank, trouble, text)

    def look_around(self) -> list[Evidence]:
        """Return the evidence against each process that is gone or stopped."""
        return [found for rank in self._here() if (found := self.look_at(rank))]

    def _here(self) -> list[int]:
        """Return the known other ranks on this host."""
        of, place = dict(self.of), self.own.place
        return sorted(rank for rank, process in of.items() if process.place == place and rank != self._rank)

    def see_gone(self) -> bool:
        """Return whether a process has been gone for a while. ``seen`` then returns which ones went first.

        Ranks that fail for the same reason end soon after the first one, so it is worth looking often.
        """
        with self._lock:
            if not self._first and time.monotonic() >= self._next_look:
                begun = time.thread_time()
                self._first = [each for each in self.look_around() if each.kind == "gone"]
                self._first_at = time.monotonic()
                share = _SHARE * min(1.0, len(os.sched_getaffinity(0)) / (1 + len(self._here())))
                self._next_look = self._first_at + (time.thread_time() - begun) / share
            return bool(self._first) and time.monotonic() - self._first_at > _GRACE

    def see_first(self) -> list[Evidence]:
        """Look around, unless something was seen before; return what was seen first."""
        with self._lock:
            self._first = self._first or self.look_around()
            return self._first

    def seen(self) -> list[Evidence]:
        """Return the first observation, or else the present one without keeping it."""
        with self._lock:
            return self._first or self.look_around()


@dataclass(frozen=True, slots=True)
class Culprits:
    """Why a transport of this process has failed, for its other transports.

    The program soon leaves its other transports too, and their peers must report the same culprit, which may have
    another rank there.

    Attributes:
        finding: as the transport has it.
        processes: the processes of the ranks that caused it.
    """

    finding: Finding
    processes: tuple[Identity, ...]

    @classmethod
    def of(cls, finding: Finding, identities: Mapping[int, Identity]) -> Culprits:
        """Return what a transport has found out. ``identities``: the processes of its ranks."""
        return cls(finding, tuple(identities[rank] for rank in finding.ranks))

    def among(self, identities: Mapping[int, Identity]) -> Finding | None:
        """Return the finding for a transport over these processes; None if no culprit is one of these processes."""
        ranks = tuple(sorted(rank for rank, identity in identities.items() if identity in self.processes))
        return Finding(self.finding.kind, ranks, self.finding.text) if ranks else None


class Ends:
    """Which processes have ended: by the process table on this host, on others by a port that they keep open.

    One thread at a time uses it.
    """

    def __init__(self) -> None:
        self._own = Identity.own()
        self._refused: dict[tuple[tuple[str, ...], int], tuple[float, bool]] = {}

    def has_ended(self, process: Identity, names: tuple[str, ...], port: int) -> bool:
        """Return whether a process has ended, or has closed its port."""
        if process.trouble(self._own) == "gone":
            return True
        # It may run and have left the job, or be on another host.
        at, refused = self._refused.get((names, port), (0.0, False))
        if not refused and time.monotonic() > at:
            refused = is_refused(names, port)
            self._refused[names, port] = (time.monotonic() + _PAUSE, refused)
        return refused


def is_refused(names: Iterable[str], port: int) -> bool:
    """Return whether a host answers, and refuses connections to a port."""
    answers = []
    for name in names:
        try:
            socket.create_connection((name, port), _CONNECT).close()
        except ConnectionRefusedError:
            answers.append(True)
        except OSError:
            continue
        else:
            answers.append(False)
    return bool(answers) and all(answers)
