"""Labs that stay up between runs, and go away as a whole; as root and as another user."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.lab import Network, Obstacle, kept, launch

from .labs import ROOT, command_of, mark, marked, needs_mpi, needs_switch, netns, state_of_machine, thorough, wait_until

NOBODY = 65534


def python_of_nobody() -> str | None:
    """Return an interpreter that every user may run; the one of an environment may lie in a closed folder."""
    for program in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        script = "import sys; sys.exit(sys.version_info < (3, 10))"
        if program and subprocess.run([*as_nobody(), program, "-c", script], capture_output=True).returncode == 0:
            return program
    return None


def closed_to_nobody(device: str) -> bool:
    """Return whether there is such a device, and the user of ``TestCommandLine`` may not write to it."""
    if os.geteuid():
        return os.path.exists(device) and not os.access(device, os.W_OK)
    return os.path.exists(device) and not os.stat(device).st_mode & stat.S_IWOTH


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

    @needs_mpi
    def test_open_mpi(self, user: User) -> None:
        script = "echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE on $(hostname)"
        status, output, errors = user.lab("run", "--mpi", "--rate", "100mbit", "--", "sh", "-c", script)
        assert status == 0, errors
        assert sorted(output.splitlines()) == ["0 of 2 on node0", "1 of 2 on node1"]

    def test_run_beside_the_network_options_is_refused(self, user: User, name: str) -> None:
        status, _, errors = user.lab("run", "--name", name, "--loss", "0.1", "--", "true")
        assert status == 2
        assert errors.splitlines()[-1].endswith("--loss with --name; the network of a lab that is up is settled")

    def test_what_is_not_there_cannot_be_used(self, user: User, name: str) -> None:
        complaint = (1, "", f"there is no lab '{name}'; make one (up --name {name})\n")
        assert user.lab("down", "--name", name) == complaint
        assert user.lab("run", "--name", name, "--", "true") == complaint

    def test_network_that_cannot_be_made(self, user: User, name: str) -> None:
        status, _, errors = user.lab("up", "--name", name, "--congestion", "nonsense")
        assert status == 1
        assert errors.startswith("no such network here: congestion='nonsense' is not allowed by this kernel")
        assert not marked(user.word)

    @pytest.mark.skipif(not closed_to_nobody("/dev/net/tun"), reason="needs a closed /dev/net/tun")
    def test_user_who_may_make_no_tap_devices_is_told(self, name: str) -> None:
        start = [sys.executable] if os.geteuid() else [*as_nobody(), str(python_of_nobody())]
        status, _, errors = User(start).lab("up", "--name", name, "--corruption", "0.1")
        assert status == 1
        assert errors.startswith("no such network here: /dev/net/tun may not be opened by this user; ")


class TestLab:
    pytestmark = [*netns, thorough]

    @pytest.fixture
    def lab(self, name: str) -> kept.Lab:
        return kept.up(Network(2), name)

    def test_ends_what_runs_in_it(self, lab: kept.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        word = mark_children(monkeypatch)
        with launch(["sleep", "600"], lab) as process:
            wait_until(lambda: sleepers(word) == 2)
            kept.down(lab.name)
            wait_until(lambda: sleepers(word) == 0)
            assert process.wait(180) != 0

    def test_outlives_what_runs_in_it(self, lab: kept.Lab) -> None:
        word, environment = mark()
        command = [sys.executable, "-m", "benchmarks.lab", "run", "--name", lab.name, "--", "sh", "-c"]
        driver = subprocess.Popen([*command, "setsid sleep 600 & wait"], cwd=ROOT, env=environment)
        try:
            wait_until(lambda: sleepers(word) == 2)
        finally:
            driver.kill()
            driver.wait()
        wait_until(lambda: not marked(word))
        assert kept.find(lab.name) == lab

    def test_leaves_nothing_when_it_is_killed(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        before = state_of_machine(name)
        word = mark_children(monkeypatch)
        lab = kept.up(Network(3, "10mbit"), name)
        os.kill(lab.process, signal.SIGKILL)
        wait_until(lambda: not marked(word) and state_of_machine(name) == before)
        with pytest.raises(Obstacle, match=f"there is no lab '{name}'"):
            kept.find(name)

    @needs_switch
    def test_ends_with_its_switch(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        word = mark_children(monkeypatch)
        kept.up(Network(2, delay="1ms"), name)
        switch = next(process for process in marked(word) if command_of(process).startswith("switch-"))
        os.kill(switch, signal.SIGKILL)
        wait_until(lambda: not marked(word))
        wait_until(lambda: name not in kept.names())


@pytest.mark.short
def test_impossible_labs_are_refused() -> None:
    with pytest.raises(ValueError, match="name='a b'; expected 1 to 40 letters"):
        kept.up(Network(), "a b")
    with pytest.raises(ValueError, match="without namespaces cannot be kept"):
        kept.up(Network(1, isolated=False))


def mark_children(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a word that the processes which this one starts have in their environment, and no other."""
    word, environment = mark()
    key = word.partition("=")[0]
    monkeypatch.setenv(key, environment[key])
    return word


def sleepers(word: str) -> int:
    return sum(command_of(process) == "sleep" for process in marked(word))
