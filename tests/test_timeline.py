import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusionlayer
from fusionlayer import native
from fusionlayer.base.errors import ConfigError
from fusionlayer.observe.timeline import Timeline, hear, unhear
from fusionlayer.process.clock import HOST
from fusionlayer.transport import LocalTransport, Transport
from tests.disk import room_for
from tests.fake_device import FakeDevice
from tests.packaging.project_tree import ROOT
from tests.ranks import over_threads
from tests.spans import spans_of


def test_listeners_that_come_and_go_open_no_timeline_that_was_closed(tmp_path: Path) -> None:
    closed, written, heard = (Timeline(path and str(tmp_path / path), 0) for path in ("a", "b", None))
    closed.close()
    listeners: list[Callable[..., None]] = [lambda *span: None, lambda *span: None]
    for change, listener, on in (
        (hear, listeners[0], True),
        (hear, listeners[1], True),
        (unhear, listeners[0], True),
        (unhear, listeners[1], False),
    ):
        change(listener)
        assert [each.enabled for each in (closed, written, heard)] == [False, True, on]
    written.close()


def test_spans_become_complete_events(tmp_path: Path) -> None:
    timeline = Timeline(str(tmp_path / "trace"), rank=3)
    timeline.note_clock(-1500, 20, ranks=4)
    with timeline.span("OUTER", step=1), timeline.span("INNER", codec=fusionlayer.codecs.get("bf16")):
        pass
    with pytest.raises(KeyError), timeline.span("FAILED"):
        raise KeyError
    timeline.close()
    timeline.close()
    events = json.loads((tmp_path / "trace.3").read_text())
    process, clock, row, inner, outer, failed, end = events
    assert [inner["name"], outer["name"], failed["name"]] == ["INNER", "OUTER", "FAILED"]
    assert inner["args"] == {"codec": "bf16()"} and outer["args"] == {"step": 1}
    for event in (inner, outer, failed):
        assert (event["ph"], event["pid"], event["tid"]) == ("X", 3, row["tid"])
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3
    assert 0 <= inner["tdur"] <= outer["tdur"], "the thread's own CPU time"
    assert process == end == {"name": "process_name", "ph": "M", "pid": 3, "tid": 0, "args": {"name": "rank 3"}}
    assert clock["args"] == {"offset_us": -1.5, "error_us": 0.02, "ranks": 4}
    assert (row["name"], row["args"]) == ("thread_name", {"name": "MainThread"})
    assert all(type(event["tid"]) is int for event in events), "viewers sort and name rows by numbers"


def test_spans_of_a_device_have_its_times_and_are_written_when_it_has_reached_them(tmp_path: Path) -> None:
    device = FakeDevice()
    timeline = Timeline(str(tmp_path / "trace"), rank=0)
    timeline.time_by(HOST)
    with timeline.span("HOST"):
        pass
    timeline.time_by(device)
    waits, step = device.waits, 5.0
    for number in range(3):
        with timeline.span("OUTER", step=number):
            device.work(step)
            with timeline.span("INNER"):
                device.work(0.25)
        began = timeline.now()
        device.work(0.5)
        timeline.record("RECORDED", began, timeline.now(), row="row")
    device.now = 2 * (step + 0.75)  # so far the device has come
    timeline.settle()
    assert device.waits == waits, "only to place its time on that of the host"
    timeline.close()
    events = json.loads((tmp_path / "trace.0").read_text())
    assert [event["args"] for event in events if event["name"] == "device"] == [{"name": "cpu"}]
    host, *spans = [event for event in events if event["ph"] == "X"]
    assert host["name"] == "HOST" and "tdur" in host
    assert [span["name"] for span in spans] == ["INNER", "OUTER", "RECORDED"] * 2, "the third step is not over"
    assert [round(span["dur"] / 1e6, 6) for span in spans] == [0.25, 5.25, 0.5] * 2
    first = spans[1]["ts"]
    assert [round((span["ts"] - first) / 1e6, 6) for span in spans] == [5.0, 0.0, 5.25, 10.75, 5.75, 11.0]
    assert all("tdur" not in span for span in spans)


def test_what_began_on_another_thread_has_a_row_of_its_own(tmp_path: Path) -> None:
    timeline = Timeline(str(tmp_path / "trace"), rank=0)
    start = time.perf_counter_ns()
    with timeline.span("INNER"):
        pass
    end = time.perf_counter_ns()
    timeline.record("QUEUE", start, end, row="bucket 7", step=1)
    timeline.record("SET", 5_000, 12_500)
    timeline.close()
    timeline.record("LATE", start, end, row="bucket 7")
    inner, queue, exact = spans_of(tmp_path / "trace.0")
    assert (exact["ts"], exact["dur"]) == (5.0, 7.5), "microseconds"
    assert (queue["name"], queue["ph"], queue["row"], queue["args"]) == ("QUEUE", "X", "bucket 7", {"step": 1})
    assert inner["row"] == exact["row"] == "MainThread"
    assert queue["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= queue["ts"] + queue["dur"] + 1e-3


def test_threads_write_whole_events(tmp_path: Path) -> None:
    timeline = Timeline(str(tmp_path / "trace"), rank=0)

    def work(number: int) -> None:
        for _ in range(50):
            with timeline.span("SPAN", number=number):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    timeline.close()
    assert sorted(span["args"]["number"] for span in spans_of(tmp_path / "trace.0")) == sorted([0, 1, 2, 3] * 50)


def test_timelines_of_one_file_share_it(tmp_path: Path) -> None:
    def names() -> list[str]:
        return [span["name"] for span in spans_of(tmp_path / "trace.0")]

    first, second = (Timeline(str(tmp_path / "trace"), rank=0) for _ in range(2))
    with first.span("A"):
        pass
    first.close()
    with first.span("LATE"), second.span("B"):
        pass
    second.close()
    assert names() == ["A", "B"]
    third = Timeline(str(tmp_path / "trace"), rank=0)
    with third.span("C"):
        pass
    third.close()
    assert names() == ["A", "B", "C"]


def test_a_process_that_forgets_to_close_leaves_a_whole_file(tmp_path: Path) -> None:
    code = (
        "import sys; from fusionlayer.observe.timeline import Timeline\nwith Timeline(sys.argv[1], 0).span('A'): pass"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "trace"], check=True)
    assert [span["name"] for span in spans_of(tmp_path / "trace.0")] == ["A"]


@pytest.mark.parametrize("spans", [1, 1000])  # found when it is closed, and while it records
def test_a_full_disk_ends_the_timeline_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spans: int
) -> None:
    timeline = Timeline(str(tmp_path / "trace"), rank=0)
    with room_for(10):
        for _ in range(spans):
            timeline.record("SPAN", 0, 1)
        timeline.close()
        again = Timeline(str(tmp_path / "trace"), rank=0)
        again.record("SPAN", 0, 1)
        again.close()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == f"timeline {tmp_path / 'trace'}.0 ends here: File too large; training goes on without it"


def test_a_device_that_is_full_ends_the_timeline_and_nothing_else(tmp_path: Path) -> None:
    """It can be neither cut off nor written to."""
    (tmp_path / "trace.0").symlink_to("/dev/full")
    for _ in range(2):
        timeline = Timeline(str(tmp_path / "trace"), rank=0)
        timeline.record("SPAN", 0, 1)
        timeline.close()


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="timeline .*none/trace.0 cannot be written: No such file or directory"):
        Timeline(str(tmp_path / "none" / "trace"), rank=0)


# ---- what a bucket's time goes into ---------------------------------------------------------------------------------


class ClockOfWork(threading.local):
    """A clock of each thread that only work moves: no test waits for it."""

    now = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def thread_time_ns(self) -> int:
        return 0

    def works(self, milliseconds: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, which takes so long by this clock."""

        def timed(*args: Any, **options: Any) -> Any:
            self.now += 1_000_000 * milliseconds
            return call(*args, **options)

        return timed


@pytest.mark.parametrize("algorithm, pieces", [("two_shot", 1), ("ring", 2)])
def test_encoding_is_not_taken_for_sending(
    algorithm: str, pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ClockOfWork()
    monkeypatch.setattr("fusionlayer.observe.timeline.time", clock)
    for verb, milliseconds in (("encode", 5), ("recode", 30), ("decode", 200)):
        monkeypatch.setattr(native, verb, clock.works(milliseconds, getattr(native, verb)))
    monkeypatch.setattr(LocalTransport, "_begin", clock.works(7000, LocalTransport._begin))
    codec = fusionlayer.codecs.get("int8")
    numel = pieces * 3 * (1 << 16)

    def body(transport: Transport) -> None:
        timeline = Timeline(str(tmp_path / "trace"), transport.rank)
        reduce = fusionlayer.collectives.get(algorithm)
        with timeline.bucket_span(transport, step=1, bucket=2):
            reduce(torch.ones(numel), codec, transport)
        timeline.close()

    over_threads(3, body)
    for rank in range(3):
        spans = spans_of(tmp_path / f"trace.{rank}")
        lengths = {(span["name"], span["dur"] / 1000) for span in spans if span["name"] != "ALLREDUCE"}
        assert lengths == {("ENCODE", 5), ("RECODE", 30), ("DECODE", 200), ("WIRE", 7000)}, "milliseconds"
        assert all({"step": 1, "bucket": 2}.items() <= span["args"].items() for span in spans), "also of a helper's"
        assert len([span for span in spans if span["name"] == "ALLREDUCE"]) == 1


@pytest.mark.parametrize("tells", [True, False])
def test_torchs_profiler_sees_what_is_done_for_which_bucket(
    tells: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a torch that does not tell whether a profiler is active."""
    if not tells:
        monkeypatch.setattr("fusionlayer.observe.timeline.profiler", SimpleNamespace())

    def body(transport: Transport) -> None:
        timeline = Timeline(None, transport.rank)
        with timeline.bucket_span(transport, step=0, bucket=3):
            fusionlayer.collectives.get("one_shot")(torch.ones(256), fusionlayer.codecs.get("int8"), transport)

    def train(steps: int) -> None:
        over_threads(2, body)
        fusionlayer.codecs.get("int8").compress(torch.ones(256))

    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/timeline.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(code, {"train": train})
    events = json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["name"].startswith("fusionlayer")]
    of_bucket = [f"fusionlayer: {what} bucket 3" for what in ("all-reduce", "encode", "wire", "decode")]
    assert sorted(names) == sorted([*of_bucket, *of_bucket, "fusionlayer: encode"])
