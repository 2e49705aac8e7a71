"""Codecs that count the time spent in them."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import fusionlayer as fl
from fusionlayer.codecs import Codec

__all__ = ["Clock", "timed"]

VERBS = ("encode_tensor", "encode_chunks", "decode_chunks", "decode_sum", "recode")
"""Every other verb is written in these. Sparsifiers encode whole tensors by other means than in chunks."""


class Clock:
    """Seconds that all threads together have spent in something.

    Attributes:
        seconds: of wall time.
        cpu: of CPU time of the threads that called; threads that the codec itself starts are not in it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu = 0.0
        self._lock = threading.Lock()
        self._inside = threading.local()

    def count(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``verb`` with its time counted, once where such verbs call each other."""

        @wraps(verb)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "now", False):
                return verb(*args, **kwargs)
            self._inside.now = True
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                return verb(*args, **kwargs)
            finally:
                end, cpu_end = time.perf_counter(), time.thread_time()
                self._inside.now = False
                with self._lock:
                    self.seconds += end - start
                    self.cpu += cpu_end - cpu

        return counted


def timed(codec: Codec, name: str, clock: Clock) -> Codec:
    """Return a codec like ``codec`` that makes the same bytes and counts its time on ``clock``.

    It is registered as ``name``: engines make their codecs anew from the names in the fusion plan.
    """
    base = type(codec)

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update({verb: clock.count(getattr(base, verb)) for verb in VERBS})

    # fill() runs before the new class has a name; what it takes from the base is looked up there.
    kind = types.new_class(f"Timed{base.__name__}", (base,), {"name": name}, fill)
    copy: Codec = fl.codecs.get(name, **codec.options)
    assert type(copy) is kind
    return copy
