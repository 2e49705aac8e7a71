"""The demonstration runs, tells the truth, fails loudly and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.tiers import exhaustive

from .places import EXAMPLES, NAMESPACES_WORK, marked

pytestmark = [pytest.mark.medium, pytest.mark.netns]

DEMO = [sys.executable, str(EXAMPLES / "demo.py"), "--quick"]
ROW = re.compile(
    r"^ +(?P<method>DDP, f32|fusionlayer, int[48]) +(?P<loss>\d+\.\d{4})(?: +(?P<against>[+-]\d+\.\d\d) %)?"
    r" +\d+ ms(?: +\d+\.\d\dx)? +(?P<sent>\d+\.\d\d) MB +(?P<ratio>\d+\.\d\d)x *$",
    re.MULTILINE,
)


@exhaustive(guarded_by="tests/test_documents.py::test_the_commands_of_the_readme_run")
def test_table() -> None:
    done = subprocess.run(DEMO, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    rows = [match.groupdict() for match in ROW.finditer(done.stdout)]
    methods = ["DDP, f32", "fusionlayer, int8"]
    scenes = 2 if NAMESPACES_WORK else 1
    assert [row["method"] for row in rows] == methods * scenes, done.stdout
    assert ("100 Mbit/s, emulated" in done.stdout) == NAMESPACES_WORK
    assert ("not emulated" in done.stdout) != NAMESPACES_WORK
    for dense, int8 in zip(rows[::2], rows[1::2], strict=True):
        assert dense["against"] is None
        assert abs(float(int8["against"])) <= 0.5
        if NAMESPACES_WORK:
            assert 0.95 < float(dense["ratio"]) < 1.01
            assert 3.5 < float(int8["ratio"]) < 4.0
    assert "both workers had the same bits in all 834,304 parameters" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_a_run_that_does_not_end_is_a_failure_with_its_last_lines() -> None:
    done = subprocess.run([*DEMO, "--timeout", "3"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "The demo failed: DDP, f32 ended with status 124; its last lines:" in done.stdout
    assert "the workers were ended after 3 s" in done.stdout
    assert '.py", line ' in done.stdout  # a line of the stack, wherever the workers were; a terminal would cut it


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=exhaustive)])
def test_nothing_outlives_the_demo(number: signal.Signals) -> None:
    key, value = "FUSIONLAYER_TEST_MARK", f"{os.getpid()}-{time.monotonic_ns()}"
    demo = subprocess.Popen(DEMO, stdout=subprocess.PIPE, text=True, env={**os.environ, key: value})
    assert demo.stdout is not None
    try:
        end = time.monotonic() + 180
        while sum(is_worker(process) for process in marked(f"{key}={value}")) < 2:
            assert time.monotonic() < end, "no workers came"
            time.sleep(0.1)
        demo.send_signal(number)
        output = demo.stdout.read()
        status = demo.wait(180)
    finally:
        demo.kill()
        demo.wait()
        demo.stdout.close()
    assert status == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert ("Interrupted; nothing is left running." in output) == (number == signal.SIGINT)
    end = time.monotonic() + 180
    while left := marked(f"{key}={value}"):
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.1)


def is_worker(process: int) -> bool:
    try:
        with open(f"/proc/{process}/cmdline") as file:
            return "\0--json\0" in file.read().split("agent.py")[0]
    except OSError:
        return False
