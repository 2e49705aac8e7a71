import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionlayer as fl
from fusionlayer.cli import main
from fusionlayer.cli.breakdown import break_down
from fusionlayer.cli.verdict import verdict
from tests.integrations.training import make_model, train
from tests.loops import looped


def span(name: str, ts: float, dur: float, tid: str = "MainThread", **details: object) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 3, "tid": tid, "args": details}


def step_spans(step: int, begin: float) -> list[dict[str, Any]]:
    """Return a step of 1000 us: two buckets, one on each lane, the second waited for."""
    first, second = {"step": step, "bucket": 0}, {"step": step, "bucket": 1}
    return [
        span("FORWARD", begin, 200, step=step),
        span("BACKWARD", begin + 200, 400, step=step),
        span("ENCODE", begin + 300, 30, step=step),
        span("ENCODE", begin + 400, 20, step=step),
        span("QUEUE", begin + 340, 10, tid="bucket 0", **first),
        span("ALLREDUCE", begin + 350, 200, tid="lane", **first),
        span("MEMCPY_IN_FUSION_BUFFER", begin + 360, 40, tid="lane", **first),
        span("ALLREDUCE", begin + 500, 300, tid="lane 1", **second),
        span("ONE_SHOT", begin + 510, 250, tid="lane 1", codec="int(bits=8)", elements=1000, **second),
        span("ENCODE", begin + 510, 100, tid="lane 1", **second),
        span("WIRE", begin + 630, 100, tid="lane 1", bytes=4000, **second),
        span("DECODE", begin + 735, 25, tid="lane 1", **second),
        span("WAIT", begin + 610, 0, **first),
        span("WAIT", begin + 610, 190, **second),
        span("UPDATE", begin + 800, 100, step=step),
    ]


def whole_steps(steps: int) -> list[dict[str, Any]]:
    return [event for step in range(steps) for event in step_spans(step, 1000.0 * step)]


def microseconds(found: Mapping[Any, float]) -> dict[Any, int]:
    return {name: round(1e6 * seconds) for name, seconds in found.items() if round(1e6 * seconds)}


def test_phases_add_up_to_the_step() -> None:
    found = break_down(whole_steps(5)[::-1], 1, "t")
    assert (found.rank, found.steps, found.lanes) == (3, 3, 2), "the last step has no end"
    assert found.step == pytest.approx(1e-3)
    assert microseconds(found.phases) == {
        "forward": 200,
        "backward": 350,
        "compression": 50,
        "exposed communication": 190,
        "update": 100,
        "other": 110,
    }
    assert microseconds(found.exposed) == {"network": 100, "codec": 25, "other": 65}, "encoding was over before"
    assert microseconds(found.exposed_by_bucket[1]) == microseconds(found.exposed)
    assert found.communication == pytest.approx(450e-6), "while both lanes are busy time passes once"
    first, second = found.buckets
    assert [round(1e6 * value) for value in (first.ready, first.start, first.end, first.waited)] == [140, 150, 350, 0]
    assert [round(1e6 * value) for value in (second.start, second.end, second.waited)] == [300, 600, 190]
    assert microseconds(first.phases) == {"packing": 40, "other": 160}
    assert microseconds(second.phases) == {"network": 100, "codec": 125, "other": 75}
    assert (second.sent, second.elements, second.codec, second.algorithm) == (4000, 1000, "int(bits=8)", "ONE_SHOT")


def test_what_waits_for_a_late_rank_does_not_wait_for_the_network() -> None:
    late = {(step, 1, 0): 1000.0 * step + 690 for step in range(5)}
    found = break_down(whole_steps(5), 1, "t", late)
    assert microseconds(found.exposed) == {"stragglers": 60, "network": 40, "codec": 25, "other": 65}


def test_a_bucket_in_line_waits_for_what_is_done_for_the_one_before() -> None:
    spans = []
    for step in range(3):
        begin = 1000.0 * step
        one, two = {"step": step, "bucket": 0}, {"step": step, "bucket": 1}
        spans += [
            span("BACKWARD", begin, 100, step=step),
            span("ALLREDUCE", begin + 50, 350, tid="lane", **one),
            span("WIRE", begin + 50, 350, tid="lane", bytes=1, **one),
            span("ALLREDUCE", begin + 400, 200, tid="lane", **two),
            span("ENCODE", begin + 400, 200, tid="lane", **two),
            span("WIRE", begin + 450, 50, tid="helper", bytes=1, **two),
            span("WAIT", begin + 100, 500, **two),
        ]
    found = break_down(spans, 0, "t")
    assert microseconds(found.exposed_by_bucket[0]) == {"network": 300}
    assert microseconds(found.exposed_by_bucket[1]) == {"network": 50, "codec": 150}, "a helper sends meanwhile"


def test_a_span_that_begins_where_one_ends_does_not_lie_in_it() -> None:
    begin = 81234567890.123
    spans = []
    for step in range(300):
        start = begin + 1000.1 * step
        spans.append(span("FORWARD", start, 300.7, step=step))
        spans.append(span("BACKWARD", start + 300.7 - 2e-5, 600.3, step=step))
    phases = break_down(spans, 0, "t").phases
    assert phases["forward"] == pytest.approx(300.7e-6, rel=1e-3)
    assert phases["backward"] == pytest.approx(600.3e-6, rel=1e-3)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_with_a_timeline_is_broken_down(
    overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSIONLAYER_TIMELINE", str(tmp_path / "trace"))

    def body(rank: int) -> None:
        model = make_model()
        optimizer: Any = fl.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model.named_parameters(),
            codec="int8",
            planner="wfbp",
            overlap_forward=model if overlap else None,
        )
        train(model, optimizer, rank, range(8))
        with torch.no_grad():
            model(torch.zeros(1, 24))
        optimizer.close()

    fl.transport.local.run(body, 2)
    more = ["--merge", str(tmp_path / "both.json")]
    assert main(["trace", str(tmp_path / "trace"), "--skip", "2", "--json", *more]) == 0
    printed = json.loads(capsys.readouterr().out)
    ranks = printed["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["steps"] == 5, "the forward without gradients is none"
        assert [bucket["index"] for bucket in rank["buckets"]] == [0, 1, 2, 3]
        assert all(rank["phases"][name] > 0 for name in ("forward", "backward", "exposed communication", "update"))
        assert sum(rank["phases"].values()) == pytest.approx(rank["step"])
        assert sum(rank["exposed"].values()) == pytest.approx(rank["phases"]["exposed communication"])
        for bucket in rank["buckets"]:
            assert bucket["phases"]["codec"] > 0 and bucket["phases"]["network"] > 0 and bucket["sent"] > 0
    assert {event["pid"] for event in json.loads((tmp_path / "both.json").read_text())} == {0, 1}
    assert main(["trace", str(tmp_path / "trace.1")]) == 0
    printed = capsys.readouterr().out
    assert "exposed communication" in printed and "Buckets of rank 1" in printed
    assert "1 of 2 ranks" in printed and max(map(len, printed.splitlines())) <= 80


# ---- verdict --------------------------------------------------------------------------------------------------------


def test_the_verdict_names_what_is_waited_for_and_where() -> None:
    found = break_down(whole_steps(5), 1, "t")
    assert verdict([found]) == (
        "10% of a step (0.1 of 1.0 ms) waits for the network, in bucket 1. "
        "It waits 6% for communication threads, outside codec and network, 2% for the codec."
    )
    hidden = [event for event in whole_steps(5) if event["name"] != "WAIT"]
    assert verdict([break_down(hidden, 1, "t")]).startswith("Communication is hidden: 0% of a step")


# ---- files ----------------------------------------------------------------------------------------------------------


def write(path: Path, rank: int, offset: float | None, spans: Sequence[Mapping[str, Any]]) -> None:
    clock = {"offset_us": offset, "error_us": 1.0, "ranks": 2} if offset is not None else {}
    events = [{"name": "clock", "ph": "M", "pid": rank, "tid": 0, "args": clock}] if clock else []
    lines = [json.dumps({**event, "pid": rank}) for event in [*events, *spans]]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def test_ranks_of_hosts_with_other_clocks_are_put_on_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 comes 60 us late to each exchange; its clock is two seconds behind."""
    later = [{**each, "ts": each["ts"] - 2e6 + (60 if each["name"] == "WIRE" else 0)} for each in whole_steps(6)]
    write(tmp_path / "x.0", 0, 0.0, whole_steps(6))
    write(tmp_path / "x.1", 1, 2e6, later)
    both = tmp_path / "both.json"
    assert main(["trace", str(tmp_path / "x"), "--json", "--merge", str(both)]) == 0
    first, second = json.loads(capsys.readouterr().out)["ranks"]
    assert microseconds(first["exposed"])["stragglers"] == 60 and "stragglers" not in microseconds(second["exposed"])
    starts = {event["pid"]: event["ts"] for event in json.loads(both.read_text()) if event["name"] == "FORWARD"}
    assert starts[0] == starts[1] == 5000
    write(tmp_path / "x.1", 1, None, later)
    assert main(["trace", str(tmp_path / "x")]) == 0
    assert "The clocks of the ranks were not measured" in capsys.readouterr().out


def test_a_file_that_was_cut_off_tells_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "x", 0, 0.0, whole_steps(9))
    text = (tmp_path / "x").read_text()
    (tmp_path / "x").write_text(text[: text.index('"step": 7') + 4])
    assert main(["trace", str(tmp_path / "x")]) == 0
    printed = capsys.readouterr().out
    assert "Incomplete: x ends in the middle: the run was killed or still goes on." in printed
    assert "Mean of 3 steps" in printed, "steps 3 to 5; step 6 has no end"


@looped(
    "text, told",
    [
        (None, "no timeline .*x and none of a rank, .*x.0; run with FUSIONLAYER_TIMELINE"),
        ("", "x is empty: the run ended before it wrote a span, or has just begun"),
        ("[\n{}", "is no timeline"),
        ("[\n{", "is no timeline of fusionlayer, or holds no whole event"),
        ("[\nname: a\nb", "line 2 is no event"),
        ("{}", "is no timeline"),
        ('{"traceEvents": []}', "is no timeline"),
        ("[]", "is no timeline"),
        ("[1]", "is no timeline"),
        ('[{"ph": "X", "name": "A"}]', "is no timeline"),
        ('[{"ph": "X", "name": "A", "ts": 1, "dur": 1, "pid": 0, "tid": 0, "args": {}}]', "has 0 steps"),
        ('[{"ph": "X", "name": "BACKWARD", "ts": 1, "dur": 1, "pid": 0, "tid": 0, "args": {}}]', "of this version"),
    ],
)
def test_what_is_no_timeline_is_told(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "x").write_text(text)
    assert main(["trace", str(tmp_path / "x")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(told, line)
