"""Metrics of communication, waiting and compression, for Prometheus, TensorBoard and functions of the program.

Nothing is counted twice: bytes and steps come from engines and process groups, seconds from the timeline's spans, and
    stalls from ``fusionlayer.watch``.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from ..base.errors import ConfigError
from ..process import forks
from . import counts, timeline

_logger = logging.getLogger("fusionlayer")


class Metric(NamedTuple):
    """The description of a number.

    Attributes:
        kind: "counter", which only rises, "gauge" or "histogram".
        unit: "" for plain numbers.
        meaning: one sentence.
    """

    kind: str
    unit: str
    meaning: str


METRICS: Mapping[str, Metric] = {
    "steps": Metric("counter", "", "steps of optimizers and hooks that have ended"),
    "bytes_raw": Metric("counter", "bytes", "what a ring would have sent of their gradients uncompressed"),
    "bytes_sent": Metric("counter", "bytes", "payload that this rank has sent for them"),
    "ratio": Metric("gauge", "", "bytes_raw / bytes_sent"),
    "backend_calls": Metric("counter", "", "compressed calls of process groups `fusionlayer`"),
    "backend_bytes_sent": Metric("counter", "bytes", "payload that this rank has sent for them"),
    "codec_seconds": Metric("counter", "seconds", "encoding, decoding and recoding, on communication threads"),
    "wire_seconds": Metric("counter", "seconds", "messages in flight, with waiting for stragglers"),
    "waiting_seconds": Metric("counter", "seconds", "in which training waited for results"),
    "step_seconds": Metric("histogram", "seconds", "from the end of a step's communication to that of the next"),
    "message_seconds": Metric("histogram", "seconds", "of each exchange"),
    "compression_error": Metric("gauge", "", "share of a bucket that its codec loses, by `bucket`, `codec`, `tensor`"),
    "retransmits": Metric("counter", "", "TCP segments of this process's connections that were sent again"),
    "stalls": Metric("counter", "", "reports by this rank of a late, stopped or failed rank"),
    "followers": Metric("gauge", "", "followers that are connected to publishers of this process"),
    "callers_refused": Metric("counter", "", "callers of publishers that did not become followers"),
    "ranks": Metric("gauge", "", "ranks of the job that is watched"),
    "ranks_to_blame": Metric("gauge", "", "of these, those that straggle, are stopped, failed or in another call now"),
}
"""All metrics by name."""

_SECONDS = {"ENCODE": "codec_seconds", "DECODE": "codec_seconds", "RECODE": "codec_seconds"}
_SECONDS |= {"WIRE": "wire_seconds", "WAIT": "waiting_seconds"}
_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Histogram:
    """How often values lay where.

    Attributes:
        bounds: the bounds of the buckets, upper ones; the last bucket has none.
        counts: the counts of the values in each bucket; one more than bounds.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Meter:
    """Adds up the seconds of the timeline's spans. It hears them only while it is used."""

    def __init__(self) -> None:
        # Guards all below: spans end on any thread.
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = dict.fromkeys(_SECONDS.values(), 0.0)
        self._in_bucket: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        self._step: tuple[int, float] | None = None
        self._users = 0

    def use(self) -> None:
        """Hear the spans until ``leave`` is called as often."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
        timeline.hear(self.note)

    def leave(self) -> None:
        """Undo one ``use``."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        timeline.unhear(self.note)

    def note(self, name: str, seconds: float, details: Mapping[str, Any]) -> None:
        """Take a span that is over."""
        with self._lock:
            kind = _SECONDS.get(name)
            if kind is not None:
                self._seconds[kind] += seconds
            if name == "WIRE":
                self._observe("message_seconds", seconds)
            if name == "WAIT" and (self._step is None or details.get("step") != self._step[0]):
                now = time.perf_counter()
                if self._step is not None:
                    self._observe("step_seconds", now - self._step[1])
                self._step = details.get("step", 0), now

    def _observe(self, name: str, value: float) -> None:
        self._in_bucket.setdefault(name, [0] * (len(_BOUNDS) + 1))[bisect_left(_BOUNDS, value)] += 1
        self._sums[name] = self._sums.get(name, 0.0) + value

    def seconds(self) -> dict[str, float]:
        """Return the seconds by metric."""
        with self._lock:
            return dict(self._seconds)

    def histograms(self) -> dict[str, Histogram]:
        """Return the histograms by metric."""
        with self._lock:
            return {name: Histogram(_BOUNDS, tuple(found), self._sums[name]) for name, found in self._in_bucket.items()}


meter = Meter()


def read() -> dict[str, float]:
    """Return all counters and gauges of this process by name; seconds count from the first use of this module's others.

    A gauge that means nothing yet, such as a ratio of no bytes, is left out. A metric with several values has the
    values of its labels after its name: "compression_error/3/int4/layer.weight".
    """
    found: dict[str, float] = {"steps": 0.0, "bytes_raw": 0.0, "bytes_sent": 0.0, **counts.read(), **meter.seconds()}
    if found["bytes_sent"]:
        found["ratio"] = found["bytes_raw"] / found["bytes_sent"]
    several = {"/".join((name, *(text for _, text in labels))): value for name, labels, value in counts.labelled()}
    return found | counts.gauges() | several


def histograms() -> dict[str, Histogram]:
    """Return the histograms of this process by name; those that have no value yet are left out."""
    return meter.histograms()


class Closable(Protocol):
    """Something that continues until it is closed."""

    def close(self) -> None:
        """End it; a second call does nothing."""


class _Repeated:
    """Calls a function repeatedly, on a thread of its own."""

    def __init__(self, seconds: float, work: Callable[[], object]) -> None:
        self._seconds, self._work = seconds, work
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fusionlayer metrics", daemon=True)
        meter.use()
        self._thread.start()
        forks.at_exit(self.close)

    def close(self) -> None:
        if not self._over.is_set():
            self._over.set()
            meter.leave()
            forks.not_at_exit(self.close)
            if threading.current_thread() is not self._thread:
                self._thread.join(2.0)

    def _run(self) -> None:
        complained = False
        while not self._over.wait(self._seconds):
            try:
                self._work()
            except Exception:
                if not complained:
                    _logger.exception("a function that takes metrics has failed; it is called again")
                complained = True


def every(seconds: float, callback: Callable[[Mapping[str, float]], object]) -> Closable:
    """Call ``callback(read())`` every ``seconds`` on a thread of its own, until the result is closed."""
    _check(seconds)
    return _Repeated(seconds, lambda: callback(read()))


def to_tensorboard(writer: Any, seconds: float = 10.0) -> Closable:
    """Write all metrics every ``seconds``, as ``fusionlayer/<name>`` by step, until the result is closed.

    Args:
        writer: a ``SummaryWriter`` of ``torch.utils.tensorboard`` or tensorboardX.
        seconds: between two writes.
    """
    _check(seconds)
    if not callable(getattr(writer, "add_scalar", None)):
        raise ConfigError(f"writer is {type(writer).__name__}, which has no add_scalar; give a SummaryWriter")

    def write() -> None:
        found = read()
        for name, value in found.items():
            writer.add_scalar(f"fusionlayer/{name}", value, int(found["steps"]))

    return _Repeated(seconds, write)


def serve(port: int = 9401, host: str = "127.0.0.1") -> Closable:
    """Serve the metrics of this process to Prometheus at ``http://host:port/metrics`` until the result is closed.

    Names are ``fusionlayer_<name>``, with ``_total`` appended for counters. Give each rank of a host another port.

    Raises:
        ConfigError: prometheus_client is not installed, or the port is taken.
    """
    try:
        client = importlib.import_module("prometheus_client")
        families = importlib.import_module("prometheus_client.metrics_core")
    except ImportError:
        raise ConfigError(
            'metrics.serve needs prometheus_client, which is not installed: pip install "fusionlayer[metrics]"'
        ) from None
    registry = client.CollectorRegistry()
    registry.register(_Collector(families))
    try:
        server, thread = client.start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"metrics.serve port {port}: {error.strerror}; give each rank of a host another port"
        ) from error
    return _Served(server, thread)


class _Served:
    """A running server."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self._is_closed = False
        self.port: int = server.server_port
        meter.use()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            meter.leave()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(2.0)


class _Collector:
    """Gives Prometheus the present numbers when it asks."""

    def __init__(self, families: Any) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        found = read()
        for name, metric in METRICS.items():
            if name in found:
                kind = (
                    self._families.CounterMetricFamily if metric.kind == "counter" else self._families.GaugeMetricFamily
                )
                yield kind(f"fusionlayer_{name}", metric.meaning, value=found[name])
        several: dict[str, Any] = {}
        for name, labels, value in counts.labelled():
            if name not in several:
                gauge = self._families.GaugeMetricFamily
                several[name] = gauge(f"fusionlayer_{name}", METRICS[name].meaning, labels=[key for key, _ in labels])
            several[name].add_metric([text for _, text in labels], value)
        yield from several.values()
        for name, histogram in histograms().items():
            bounds = [*map(str, histogram.bounds), "+Inf"]
            rising: Sequence[int] = list(accumulate(histogram.counts))
            buckets = list(zip(bounds, rising, strict=True))
            family = self._families.HistogramMetricFamily
            yield family(f"fusionlayer_{name}", METRICS[name].meaning, buckets=buckets, sum_value=histogram.total)


def _check(seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"seconds={seconds!r}; expected a number above 0")
