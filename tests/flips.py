"""Flips one bit of one message between processes, below all that fusionlayer adds, as a broken network card does.

    with Flips() as flips:                   # before transports are made; one process per rank
        transport = C10dTransport(checksum=True)
        flips.arm()                          # count this process's messages from here on
        work(transport)
        messages = flips.lengths             # of each message sent since, in bytes
        flips.arm(at=3, bit=12345)           # flip a bit of the fourth message from here on
        work(transport)                      # raises TransportError, on every rank
        assert flips.done

It stands between fusionlayer's link and gloo. What gloo sends by itself, such as its own headers, is not touched: a
damaged header is a message that never comes, which ends with the deadline.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from torch import Tensor

from fusionlayer.transport.links.gloo import GlooLink

__all__ = ["Flips"]


class Flips:
    """Counts the messages of this process's gloo links, and damages the one that it is told to.

    Attributes:
        lengths: bytes of each message sent since the last ``arm``, in order.
        done: whether a bit was flipped since then.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.done = False
        self._at: int | None = None
        self._length: int | None = None
        self._bit = 0
        self._kept: list[Tensor] = []
        # Guards all of it: an optimizer's lanes send at the same time.
        self._lock = threading.Lock()

    def arm(self, at: int | None = None, bit: int = 0, length: int | None = None) -> None:
        """Count messages from 0 again, and flip bit ``bit``, modulo its length, of message ``at``.

        Lanes send at the same time, so a message may have another place in another run. ``length`` names the first
        message of so many bytes instead. With neither nothing is flipped.
        """
        with self._lock:
            self.lengths, self.done, self._at, self._bit, self._length = [], False, at, bit, length

    def disarm(self) -> None:
        """Flip nothing from here on; ``done`` and ``lengths`` stay."""
        with self._lock:
            self._at = self._length = None

    def __enter__(self) -> Flips:
        self._original = original = GlooLink.__init__

        def make(link: GlooLink, *args: Any, **options: Any) -> None:
            original(link, *args, **options)
            link._group = _Group(link._group, self)

        GlooLink.__init__ = make  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        GlooLink.__init__ = self._original  # type: ignore[method-assign]

    def _pass(self, message: Tensor) -> Tensor:
        with self._lock:
            self.lengths.append(message.numel())
            if len(self.lengths) - 1 != self._at and (message.numel() != self._length or self.done):
                return message
            self.done = True
            damaged = message.clone()  # the sender's own memory stays as it is
            damaged[self._bit // 8 % damaged.numel()] ^= 1 << self._bit % 8
            self._kept.append(damaged)
            return damaged


class _Group:
    """A gloo group whose sends pass through ``Flips``."""

    def __init__(self, group: Any, flips: Flips) -> None:
        self._group = group
        self._flips = flips

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._group.send([self._flips._pass(tensor) for tensor in tensors], peer, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
