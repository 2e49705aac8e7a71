"""Labs that stay up between runs, and go away as a whole; as root and as another user."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.lab import kept

from .labs import ROOT, mark, marked, netns, state_of_machine, thorough

NOBODY = 65534


def python_of_nobody() -> str | None:
    """Return an interpreter that every user may run; the one of an environment may lie in a closed folder."""
    for program in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        script = "import sys; sys.exit(sys.version_info < (3, 10))"
        if program and subprocess.run([*as_nobody(), program, "-c", script], capture_output=True).returncode == 0:
            return program
    return None


def as_nobody() -> list[str]:
    identity = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return [*identity, "env", "HOME=/nonexistent", "PYTHONDONTWRITEBYTECODE=1"]


class User:
    """Somebody at a command line."""

    def __init__(self, start: list[str]) -> None:
        self.start = [*start, "-m", "benchmarks.lab"]
        self.word, self.environment = mark()

    def lab(self, *arguments: str) -> tuple[int, str, str]:
        """Return status, output and errors of a command."""
        done = subprocess.run(
            [*self.start, *arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(params=["self", "nobody"])
def user(request: pytest.FixtureRequest) -> Iterator[User]:
    """Yield who runs the tests, and, if that is root, somebody who is not."""
    start = [sys.executable]
    if request.param == "nobody":
        if os.geteuid() != 0:
            pytest.skip("who runs the tests is not root already")
        program = python_of_nobody()
        assert program is not None, "no interpreter that every user may run"
        start = [*as_nobody(), program]
    someone = User(start)
    yield someone
    for process in marked(someone.word):
        os.kill(process, signal.SIGKILL)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{os.getpid()}"
    yield name
    if name in kept.names():
        kept.down(name)


class TestCommandLine:
    pytestmark = [*netns, thorough]

    def test_life_of_a_lab(self, user: User, name: str) -> None:
        before = state_of_machine(name)
        assert user.lab("up", "--name", name, "--hosts", "2", "--rate", "100mbit") == (
            *(0, f"{name}: 2 hosts, 100mbit, reno\n", ""),
        )
        assert f"{name}: 2 hosts, 100mbit, reno; process " in user.lab("list")[1]

        status, output, errors = user.lab("up", "--name", name)
        assert (status, output) == (1, "")
        assert errors == f"there is a lab '{name}' already; take it away (down) or choose another --name\n"

        script = "echo $RANK of $WORLD_SIZE, $MASTER_ADDR; tc class show dev eth0; pwd"
        status, output, errors = user.lab("run", "--name", name, "--workers", "2", "--", "sh", "-c", script)
        assert status == 0, errors
        assert output.count("rate 100Mbit") == 4
        assert output.count(f"{ROOT}\n") == 4
        assert sorted(line for line in output.splitlines() if " of " in line) == [
            f"{rank} of 4, 10.77.0.1" for rank in range(4)
        ]

        status, output, _ = user.lab("run", "--name", name, "--host", "1", "--", "ip", "-brief", "address")
        assert "10.77.0.2/24" in output
        assert "10.77.0.1/24" not in output

        assert user.lab("down", "--name", name) == (0, "", "")
        assert not marked(user.word)  # not even for a moment
        assert state_of_machine(name) == before
