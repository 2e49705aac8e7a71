"""The numbers of `fusionlayer.metrics`: they are those of engines, timelines and watchers."""

import threading
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError
from fusionlayer.health.tcp import Links, TcpCounters
from fusionlayer.observe import metrics, timeline
from fusionlayer.transport import local
from tests.tiers import needs

STEPS, WIDTH = 6, 64


def train(rank: int) -> int:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, codec="int8")
    for _ in range(STEPS):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = sum(lane.transport.bytes_sent for lane in optimizer.reducer.engine.lanes.all)
    return sent


def test_counters_are_those_of_the_engines() -> None:
    before = metrics.read()
    sent = local.run(train, 2)
    after = metrics.read()
    assert after["steps"] - before["steps"] == 2 * STEPS
    assert after["bytes_raw"] - before["bytes_raw"] == 2 * STEPS * WIDTH * WIDTH * 4
    assert after["bytes_sent"] - before["bytes_sent"] == pytest.approx(sum(sent), rel=0.01)
    assert set(after) <= set(metrics.METRICS)


def test_nothing_is_timed_unless_somebody_takes_the_metrics() -> None:
    local.run(train, 2)
    assert not any(line.enabled for line in timeline._timelines)
    before = metrics.read()
    meter = metrics.every(1000.0, print)
    try:
        local.run(train, 2)
        after = metrics.read()
    finally:
        meter.close()
    assert after["codec_seconds"] > before["codec_seconds"] and after["wire_seconds"] > before["wire_seconds"]
    assert sum(metrics.histograms()["message_seconds"].counts) >= STEPS
    still = metrics.read()
    local.run(train, 2)
    assert metrics.read()["codec_seconds"] == still["codec_seconds"]


def test_callbacks_are_called_again_and_one_that_fails_too() -> None:
    calls, twice = [], threading.Event()

    def take(found: object) -> None:
        calls.append(found)
        if len(calls) == 2:
            twice.set()
        raise ValueError("the user's")

    meter = metrics.every(0.01, take)
    assert twice.wait(180)
    meter.close()
    assert "bytes_sent" in calls[0]  # type: ignore[operator]


def test_a_writer_of_tensorboard_gets_scalars_by_step() -> None:
    written, done = [], threading.Event()

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))
            done.set()

    meter = metrics.to_tensorboard(Writer(), 0.01)
    assert done.wait(180)
    meter.close()
    assert written[0][0].startswith("fusionlayer/")
    with pytest.raises(ConfigError, match="add_scalar"):
        metrics.to_tensorboard(3)


@needs("prometheus_client")
def test_prometheus_reads_them_from_a_port() -> None:
    server = metrics.serve(0)
    try:
        local.run(train, 2)
        url = f"http://127.0.0.1:{server.port}/metrics"  # type: ignore[attr-defined]
        with urllib.request.urlopen(url, timeout=60) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert "# TYPE fusionlayer_bytes_sent_total counter" in text
    assert "# TYPE fusionlayer_message_seconds histogram" in text and 'le="+Inf"' in text


def test_every_metric_is_documented_with_its_unit() -> None:
    page = (Path(__file__).parents[1] / "docs" / "watching.md").read_text()
    for name, metric in metrics.METRICS.items():
        assert f"| `{name}` | {metric.kind} | {metric.unit} |" in page, name


def test_a_link_is_slow_if_it_carries_far_less_while_it_has_data_to_send() -> None:
    ends, links = ("a:1", "b:2"), Links()

    def look(now: float, total: float, busy: float) -> bool:
        return bool(links.look(now, {ends: TcpCounters(int(total), 0, busy)}))

    for second in range(1, 6):
        assert not look(second, 1e7 * second, 0.5 * second)  # 20 MB/s while busy
    assert not look(6, 5.1e7, 2.51)  # idle, and as fast
    assert not look(7, 5.2e7, 3.51)  # 1 MB/s, once
    assert not look(8, 5.3e7, 4.51)
    assert look(9, 5.4e7, 5.51)
    assert not look(10, 6.4e7, 6.01)


def test_a_port_that_is_taken_is_told() -> None:
    pytest.importorskip("prometheus_client")
    server = metrics.serve(0)
    try:
        with pytest.raises(ConfigError, match="another port"):
            metrics.serve(server.port)  # type: ignore[attr-defined]
    finally:
        server.close()
