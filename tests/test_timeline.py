from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fusionlayer
from fusionlayer.errors import ConfigError
from fusionlayer.timeline import Timeline
from tests.disk import room_for

pytestmark = pytest.mark.short


def test_spans_become_complete_events(tmp_path: Path) -> None:
    timeline = Timeline(str(tmp_path / "trace"), rank=3)
    with timeline.span("OUTER", step=1), timeline.span("INNER", codec=fusionlayer.codecs.get("bf16")):
        pass
    with pytest.raises(KeyError), timeline.span("FAILED"):
        raise KeyError
    timeline.close()
    timeline.close()
    inner, outer, failed, process = json.loads((tmp_path / "trace.3").read_text())
    assert [inner["name"], outer["name"], failed["name"]] == ["INNER", "OUTER", "FAILED"]
    assert inner["args"] == {"codec": "bf16()"} and outer["args"] == {"step": 1}
    for event in (inner, outer, failed):
        assert (event["ph"], event["pid"], event["tid"]) == ("X", 3, "MainThread")
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3
    assert 0 <= inner["tdur"] <= outer["tdur"], "the thread's own CPU time"
    assert process == {"name": "process_name", "ph": "M", "pid": 3, "args": {"name": "rank 3"}}


def test_a_disabled_timeline_does_nothing_and_asks_nothing_of_its_details() -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError

    timeline = Timeline(None, rank=0)
    assert not timeline.enabled
    with timeline.span("SPAN", codec=Unprintable()) as entered:
        assert entered is None
    timeline.record("RECORD", 0, 1, codec=Unprintable())


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
    inner, queue, exact, _ = json.loads((tmp_path / "trace.0").read_text())
    assert (exact["ts"], exact["dur"]) == (5.0, 7.5), "microseconds"
    assert (queue["name"], queue["ph"], queue["tid"], queue["args"]) == ("QUEUE", "X", "bucket 7", {"step": 1})
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
    events = json.loads((tmp_path / "trace.0").read_text())
    assert sorted(event["args"]["number"] for event in events[:-1]) == sorted([0, 1, 2, 3] * 50)


def test_a_closed_timeline_takes_no_more(tmp_path: Path) -> None:
    timeline = Timeline(str(tmp_path / "trace"), rank=0)
    with timeline.span("CUT"):
        timeline.close()
    with timeline.span("LATE"):
        pass
    assert len(json.loads((tmp_path / "trace.0").read_text())) == 1


def test_timelines_of_one_file_share_it(tmp_path: Path) -> None:
    def names() -> list[str]:
        return [event["name"] for event in json.loads((tmp_path / "trace.0").read_text())]

    first, second = (Timeline(str(tmp_path / "trace"), rank=0) for _ in range(2))
    with first.span("A"):
        pass
    first.close()
    with first.span("LATE"), second.span("B"):
        pass
    second.close()
    assert names() == ["A", "B", "process_name"]
    third = Timeline(str(tmp_path / "trace"), rank=0)
    with third.span("C"):
        pass
    third.close()
    assert names() == ["A", "B", "C", "process_name"]


def test_without_a_file_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    timeline = Timeline(None, rank=0)
    with timeline.span("SPAN"):
        pass
    timeline.close()
    assert not list(tmp_path.iterdir())


def test_a_process_that_forgets_to_close_leaves_a_whole_file(tmp_path: Path) -> None:
    code = "import sys; from fusionlayer.timeline import Timeline\nwith Timeline(sys.argv[1], 0).span('A'): pass"
    subprocess.run([sys.executable, "-c", code, tmp_path / "trace"], check=True)
    assert [event["name"] for event in json.loads((tmp_path / "trace.0").read_text())] == ["A", "process_name"]


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
