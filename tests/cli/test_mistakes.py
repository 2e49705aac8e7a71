"""What users get wrong at the command line: one line that says so, an exit status, and never a traceback."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from fusionlayer.cli import fusionrun, main
from fusionlayer.cli.arguments import check_file
from tests.cli.test_trace import step_spans
from tests.loops import looped
from tests.planning.profiles import write_example


def write(folder: Path) -> dict[str, str]:
    """Return the files that command lines name, by the word that stands for each."""
    profile = write_example(folder)
    data = yaml.safe_load(profile.read_text())
    plan = folder / "plan.yaml"
    assert main(["plan", "--profile", str(profile), "--workers", "4", "-o", str(plan)]) == 0
    steps = [span for step in range(5) for span in step_spans(step, 1000.0 * step)]
    texts: dict[str, str | bytes] = {
        "EMPTY": "",
        "LIST": "- 1\n- 2\n",
        "TEXT": "hello\n",
        "TAB": "title: x\n\tmodel: y\n",
        "QUOTE": 'title: "x\n',
        "BINARY": bytes(range(256)),
        "NO_TITLE": yaml.safe_dump({key: value for key, value in data.items() if key != "title"}),
        "NO_VERSION": yaml.safe_dump({key: value for key, value in data.items() if key != "version"}),
        "VERSION": yaml.safe_dump({**data, "version": 99}),
        "UNKNOWN": yaml.safe_dump({**data, "tilte": "x"}),
        "NO_LINKS": yaml.safe_dump({**data, "links": {}}),
        "BAD_RATE": yaml.safe_dump({**data, "links": {"fast": next(iter(data["links"].values()))}}),
        "BAD_LINE": yaml.safe_dump({**data, "copy": {"alpha": -1.0, "beta": 0.0}}),
        "NAN": yaml.safe_dump({**data, "copy": {"alpha": float("nan"), "beta": 0.0}}),
        "BAD_CURVE": yaml.safe_dump({**data, "copy": [[1, 2]]}),
        "NEGATIVE": yaml.safe_dump({**data, "model": {**data["model"], "backward": -1}}),
        "NO_TENSORS": yaml.safe_dump({**data, "model": {**data["model"], "tensors": []}}),
        "KEYS": "{1: 2, 3: 4}\n",
        "PLAN_WORLD": plan.read_text().replace("world_size: 4", "world_size: 0"),
        "PLAN_CODEC": plan.read_text().replace("codec: raw", "codec: int44"),
        "PLAN_OPTION": plan.read_text().replace("options: {}", "options: {bits: 9}"),
        "PLAN_SLOT": plan.read_text().replace("numel:", "number:"),
        "TRACE": json.dumps(steps),
        "TRACE_CUT": json.dumps(steps)[:-40],
        "TRACE_NAMES": json.dumps([{"ph": "X"}]),
        "TRACE_ARGS": json.dumps([{**span, "args": 3} for span in steps]),
        "TRACE_STEP": json.dumps([{**span, "args": {}} for span in steps]),
        "TRACE_TIME": json.dumps([{**span, "ts": "now"} for span in steps]),
        "TRACE_NUMBER": "7",
        "TRACE_OBJECT": "{}",
        "TRACE_EMPTY": "[]",
        "HOSTS_TEXT": "node1 four\n",
        "HOSTS_SLOTS": "node1 slots=x\n",
        "PROGRAM": "print()\n",
    }
    words = {
        "PROFILE": str(profile),
        "PLAN": str(plan),
        "FOLDER": str(folder),
        "NONE": str(folder / "none.yaml"),
        "OUT": str(folder / "out.yaml"),
    }
    for word, text in texts.items():
        path = folder / f"{word}.file"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        words[word] = str(path)
    return words


PLAN = "plan --workers 4 -o OUT --profile "
SIMULATE = "simulate --workers 2,4 "
FILES = (
    *("NONE", "FOLDER", "EMPTY", "LIST", "TEXT", "TAB", "QUOTE", "BINARY", "NO_TITLE", "NO_VERSION", "VERSION"),
    *("UNKNOWN", "NO_LINKS", "BAD_RATE", "BAD_LINE", "NAN", "BAD_CURVE", "NEGATIVE", "NO_TENSORS", "KEYS"),
)
PLAN_FILES = ("NONE", "EMPTY", "LIST", "TAB", "BINARY", "PLAN_WORLD", "PLAN_CODEC", "PLAN_OPTION", "PLAN_SLOT")
PLAN_OPTIONS = (
    *("--workers 0", "--workers -1", "--workers 2.5", "--workers x", "--rate fast", "--rate 0gbit", "--rate -1gbit"),
    *("--per-host 0", "--per-host 3", "--codec int44", "--codec thc", "--codec int4 --codec-option bits=9"),
    *("--codec int4 --codec-option bist=4", "--codec int4 --codec-option bits", "--codec int4 --codec-option bits=x"),
    *("--density 2", "--codec topk --density 2", "--codec topk --density nan", "--density x", "--planner best"),
    *("--planner-option scheme=none", "--planner-option buffers=-1", "--planner-option x=1"),
    *("--planner wfbp --planner-option x=1", "--algorithm magic", "--fidelity best", "--fidelity lossless"),
    *("--policy NONE", "--policy EMPTY", "--policy KEYS", "--policy TAB", "--rates 1gbit", "--compare --rates x"),
    *("-o FOLDER", "-o PLAN/x.yaml", "-o /proc/plan.yaml"),
)
SIMULATE_OPTIONS = (
    *("--workers 0", "--workers 2,x", "--workers ,", "--rate fast", "--codec int44", "--codec ,", "--algorithm magic"),
    *("--planner best", "--per-host 3", "--cores 0", "--cores x", "--latency -1", "--latency nan"),
    "--latency 1 --curves",
)
TRACES = (
    *("", "NONE", "EMPTY", "BINARY", "TEXT", "TRACE_CUT", "TRACE_NAMES", "TRACE_ARGS", "TRACE_STEP", "TRACE_TIME"),
    *("TRACE_NUMBER", "TRACE_OBJECT", "TRACE_EMPTY", "TRACE --skip -1", "TRACE --skip 99", "TRACE --skip x"),
)
PROFILES = (
    *("--model none.such:thing", "--model none", "--model os:path", "--model os:nothing", "--model :", "--codec int44"),
    *("--rate x", "--steps 0", "--repeats -1", "--largest 0", "--out PLAN", "--out PLAN/x", "--out /proc/x"),
)
BENCHES = (
    *("", "-np 0", "-np 1", "-np x", "-np 2 --min 0", "-np 2 --min 8K --max 4K", "-np 2 --factor 1"),
    *("-np 2 --collectives all", "-np 2 --collectives ,", "-np 2 --codecs int44", "-np 2 --codecs ,"),
    *("-np 2 --algorithms magic", "-np 2 --dtype f64", "-np 2 --calls 0", "-np 2 --out FOLDER"),
    *("-np 2 --out PLAN/x", "-np 2 --out /proc/x"),
)
LINES = (
    *("", "frobnicate", "--frobnicate", "plan", "plan --workers 4", "bench", "bench nothing", "doctor --frobnicate"),
    *(PLAN + word for word in FILES),
    *(SIMULATE + word for word in FILES),
    *(f"explain PLAN --profile {word}" for word in ("NONE", "EMPTY", "BINARY", "NO_TITLE")),
    *(f"explain {word} --profile PROFILE" for word in PLAN_FILES),
    *(f"explain PLAN --profile PROFILE {option}" for option in ("--rate x", "--per-host 3", "--plot OUT")),
    *("explain PLAN --profile PROFILE --timeline FOLDER", "explain", "explain --nodes 2 --rate 1gbit --step 1"),
    *("explain PLAN --profile PROFILE --nodes 2", "explain --profile PROFILE --nodes 2 --timeline OUT"),
    *(f"explain --nodes 2 --step 1 --parameters {words}" for words in ("0 --rate 1gbit", "1e6 --rate x")),
    *(f"{PLAN}PROFILE {option}" for option in PLAN_OPTIONS),
    *(f"{SIMULATE}PROFILE {option}" for option in SIMULATE_OPTIONS),
    *(f"trace {words}" for words in TRACES),
    *(f"profile {words}" for words in PROFILES),
    *(f"bench collectives {words}" for words in BENCHES),
    *("simulate PROFILE --plot OUT", "simulate PROFILE --columns stpe", "--verison", "help", "Plan --profile PROFILE"),
    *("doctor all", "plan PROFILE", "explain PLAN", "simulate --worker 2 NONE", "trace TRACE --plot OUT"),
    *("trace TRACE --merge FOLDER", "bench collective -np 2", "bench collectives 2"),
)
RUNS = (
    *("", "-np", "-np 0 python", "-np x python", "-np 2", "-np 2 --", "python x", "-np 2 -H python", "-np 2 -H a:b p"),
    *("-np 2 -H : python", "-np 2 -H localhost:1 python", "-np 2 -H localhost:2 --hostfile NONE python"),
    *(f"-np 2 --hostfile {word} p" for word in ("NONE", "FOLDER", "EMPTY", "BINARY", "HOSTS_TEXT", "HOSTS_SLOTS")),
    *("-np 2 --min-np 3 python", "-np 2 --max-np 1 python", "-np 2 --min-np 1 --reset-limit -1 python"),
    *("-np 2 --reset-limit x python", "-np 2 --fusion-threshold-mb nan python", "-np 2 --log-level loud python"),
    *("-np 2 --cycle-time-ms 3 python", "-np 2 --mpi python", "-np 2 --frobnicate python", "-np 2 -p 99999 python"),
    *("-np 2 --network-interface none9 python", "-np 2 --output-filename PLAN python", "-np 2 -H n:2 -i NONE python"),
    *("-np 2 --codec int44 python", "-np 2 --plan NONE python", "-np 2 --plan LIST python"),
    *("-np 2 --timeline-filename PLAN/x python", "-np 2 --autotune python"),
)
PROGRAMS = {"none-such-program": 127, "./none-such": 127, "PROGRAM": 126, "FOLDER": 126, "python PROGRAM.py": 2}
# What belongs to Python, and says nothing to a user.
LEAKS = ("Traceback", "Error(", "__init__", "<unicode string>", "Errno", " object at 0x", "<class", "NoneType")


def check(status: int, told: str, line: str) -> None:
    assert status != 0, line
    assert len(told.splitlines()) == 1 and told.endswith("\n"), f"{line}\n{told}"
    assert not [leak for leak in LEAKS if leak in told], f"{line}\n{told}"


class TestMistakes:
    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        words = write(tmp_path)
        capsys.readouterr()

        def run(command: Callable[[Sequence[str]], int], line: str) -> int:
            try:
                status = command([words.get(word, word).replace("PLAN/", f"{words['PLAN']}/") for word in line.split()])
            except SystemExit as ended:
                status = int(ended.code or 0)
            check(status, capsys.readouterr().err, line)
            return status

        self.run = run

    def test_of_a_subcommand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fusionlayer.planning.profiler.job.measure_step", no_start)
        monkeypatch.setattr("fusionlayer.cli.bench.run_on_ranks", no_start)
        assert {self.run(main, line) for line in LINES} == {2}

    def test_of_fusionrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subprocess, "Popen", no_start)
        assert {self.run(fusionrun.main, line) for line in RUNS} == {2}
        for program, status in PROGRAMS.items():
            assert self.run(fusionrun.main, f"-np 2 {program}") == status

    def test_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"FUSIONLAYER_CONFIG": "none.yaml", "FUSIONLAYER_TIMEOUT": "x", "RANK": "x"}.items():
            with monkeypatch.context() as changed:
                changed.setenv(name, value)
                changed.setenv("WORLD_SIZE", "2" if name == "RANK" else "1")
                changed.setenv("RANK", value if name == "RANK" else "0")
                assert self.run(main, "profile") == 2


def no_start(*args: object, **options: object) -> None:
    raise AssertionError("it started to work before it had looked at the command line")


@looped(
    "line, words",
    [
        ("explian", "unknown 'explian'; did you mean 'explain'? known: doctor, "),
        (
            "bench collectives --codcs raw",
            "bench collectives: unknown argument '--codcs'; did you mean '--codecs'? see",
        ),
        ("plan --profile x --workers 2 --planner safuson", "unknown 'safuson'; did you mean 'safusion'?"),
        ("simulate x --algorithm two_shto", "unknown 'two_shto'; did you mean 'two_shot'?"),
    ],
)
def test_the_word_that_was_meant_is_named(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(line.split())
    assert words in capsys.readouterr().err


def test_help_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("", "doctor", "bench", "bench collectives", "profile", "plan", "explain", "simulate"):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        told = capsys.readouterr().out
        assert max(map(len, told.splitlines())) <= 80, command
        assert command == "bench" or "    fusionlayer " in told, f"{command}: no example"


def test_an_interrupted_command_ends_with_the_status_of_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionlayer.cli.doctor.diagnose", Mock(side_effect=KeyboardInterrupt))
    assert main(["doctor"]) == 130


@pytest.mark.medium
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    simulate = [sys.executable, "-m", "fusionlayer", "simulate", str(write_example(tmp_path))]
    with open("/dev/full", "w") as full:
        done = subprocess.run(simulate, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "fusionlayer simulate: output: No space left on device\n")


def test_ranks_that_try_a_file_at_the_same_time_can_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def removed_meanwhile(self: Path, mode: str) -> Any:
        file = opened(self, mode)
        self.unlink()
        return file

    monkeypatch.setattr(Path, "open", removed_meanwhile)
    check_file(tmp_path / "profile.yaml", "--out")
