"""However a run ends, nothing of its lab is left: no process, device, shaper, namespace or file."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers import exhaustive, long

from .labs import ROOT, command_of, mark, marked, needs_mpi, needs_switch, netns, state_of_machine, wait_until

pytestmark = netns

LABS = [
    pytest.param(["--rate", "10mbit"], id="bridge"),
    pytest.param(["--rate", "10mbit", "--delay", "1ms"], id="switch", marks=needs_switch),
    pytest.param(["--mpi"], id="mpi", marks=needs_mpi),
]
ENDINGS = {"exit": 0, "failure": 7, "interrupt": 130, "terminate": -signal.SIGTERM, "kill": -signal.SIGKILL}
SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}


@pytest.fixture
def marks() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what ``mark`` gives; end what a failed test leaves."""
    word, environment = mark()
    yield word, environment
    for process in marked(word):
        os.kill(process, signal.SIGKILL)


FAST = ("bridge", "kill")
# Each kind of lab and each ending once; the long tier has all pairs.
CI = {("bridge", "exit"), ("switch", "failure"), ("switch", "terminate"), ("mpi", "interrupt")}


def tier_of(lab: str, ending: str) -> list[pytest.MarkDecorator]:
    return [] if (lab, ending) == FAST else [exhaustive] if (lab, ending) in CI else [long]


CASES = [
    pytest.param(*lab.values, end, id=f"{lab.id}-{end}", marks=[*lab.marks, *tier_of(str(lab.id), end)])
    for lab in LABS
    for end in ENDINGS
]


@pytest.mark.parametrize("lab, ending", CASES)
def test_nothing_is_left(lab: list[str], ending: str, marks: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    before = state_of_machine()
    word, environment = marks
    # The worker's own child leaves its session, so that signals to the group of the worker do not reach it.
    last = {"exit": "exit 0", "failure": "exit 7"}.get(ending, "wait")
    script = f"setsid sleep 600 > /dev/null 2>&1 & while ! test -e {tmp_path}/go; do sleep 0.05; done; {last}"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.lab", "run", "--hosts", "2", *lab, "--", "sh", "-c", script],
        cwd=ROOT,
        env={**environment, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: sum(is_child_of_worker(process) for process in marked(word)) == 2)
        (tmp_path / "go").touch()
        if ending in SIGNALS:
            driver.send_signal(SIGNALS[ending])
        status = driver.wait(180)
    finally:
        driver.kill()
        driver.wait()
    assert status == ENDINGS[ending]
    wait_until(lambda: not marked(word) and not list(temporary.iterdir()) and state_of_machine() == before)


def is_child_of_worker(process: int) -> bool:
    try:
        return command_of(process) == "sleep" and b"600" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
