"""The network lab: hosts that are namespaces, links that are shaped, workers that end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.lab.link import Network, launch, why_not

from .places import marked, needs_namespaces

netns = [pytest.mark.medium, pytest.mark.netns, needs_namespaces]

GREET = """
import os, socket, subprocess
rank, master = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
if rank == 0:
    with socket.create_server((master, 4000)) as server:
        for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
            peer, (address, _) = server.accept()
            print(address, len(peer.makefile("rb").read()))
else:
    while True:
        try:
            peer = socket.create_connection((master, 4000), timeout=10)
            break
        except ConnectionRefusedError:
            pass
    peer.sendall(bytes(100_000))
    peer.close()
print(subprocess.run(["tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True).stdout)
"""


def run(command: list[str], network: Network, *, workers: int = 1, timeout: float = 30) -> tuple[int, str]:
    """Return exit status and output of ``command`` in ``network``."""
    with launch(
        command, network, workers=workers, timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        return process.wait(), output


def links() -> str:
    """Return the network devices of this machine."""
    return "\n".join(line.split(":")[0] for line in Path("/proc/net/dev").read_text().splitlines())


class TestLink:
    pytestmark = netns

    def test_hosts_reach_each_other_over_shaped_links(self) -> None:
        before = links()
        status, output = run([sys.executable, "-c", GREET], Network(3, "20mbit"))
        assert status == 0, output
        assert sorted(line for line in output.splitlines() if line.endswith(" 100000")) == [
            "10.77.0.2 100000",
            "10.77.0.3 100000",
        ]
        assert output.count("rate 20Mbit") == 3
        assert links() == before

    def test_one_host_has_a_loopback_of_its_own(self) -> None:
        status, output = run(["cat", "/proc/net/dev"], Network(1), workers=2)
        assert status == 0, output
        devices = [line.split()[0] for line in output.splitlines() if ":" in line]
        assert devices.count("lo:") == 2
        assert "eth0:" not in devices

    def test_a_network_that_can_be_made_has_no_obstacle(self) -> None:
        assert why_not(Network(2, "100mbit")) is None

    def test_obstacle_is_what_the_failing_program_says(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        tc = tmp_path / "tc"
        tc.write_text("#!/bin/sh\necho 'Specified qdisc kind is unknown.' >&2\necho usage >&2\nexit 2\n")
        tc.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        reason = why_not(Network(2, "100mbit"))
        assert reason is not None
        assert reason.startswith("tc qdisc add dev port0 root tbf rate 100mbit")
        assert reason.endswith("Specified qdisc kind is unknown.")

    def test_command_line(self) -> None:
        link = str(Path(__file__).parents[2] / "benchmarks" / "lab" / "link.py")
        network = ["--hosts", "2", "--rate", "1gbit"]
        command = [sys.executable, link, *network, "--", "sh", "-c", "echo $MASTER_ADDR $RANK"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["10.77.0.1 0", "10.77.0.1 1"]


@pytest.mark.medium
@pytest.mark.parametrize(
    "network",
    [
        pytest.param(Network(1, isolated=False), id="plain"),
        pytest.param(Network(2), id="namespaces", marks=netns),
    ],
)
class TestWorkers:
    def workers(self, network: Network) -> int:
        return 2 // network.hosts

    def test_environment_is_that_of_a_launcher(self, network: Network) -> None:
        command = ["sh", "-c", "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE"]
        status, output = run(command, network, workers=self.workers(network))
        here = self.workers(network)
        assert status == 0
        assert sorted(output.splitlines()) == [f"{rank} of 2, {rank % here} of {here}" for rank in range(2)]

    def test_first_failure_ends_the_others_and_comes_last(self, network: Network) -> None:
        script = "echo rank $RANK >&2; test $RANK = 0 && exit 7; sleep 0.5; exit 8"
        status, output = run(["sh", "-c", script], network, workers=self.workers(network))
        assert status == 7
        assert output.splitlines() == ["rank 1", "rank 0", "worker 0 failed first, with exit status 7"]

    def test_workers_that_hang_are_ended_and_say_where(self, network: Network) -> None:
        script = "import time\ndef sleepy():\n    time.sleep(600)\nsleepy()"
        status, output = run([sys.executable, "-c", script], network, workers=self.workers(network), timeout=1)
        assert status == 124
        assert output.count("in sleepy") == 2
        assert output.splitlines()[-1] == "the workers were ended after 1 s; above is where they were"

    def test_missing_program_is_named(self, network: Network) -> None:
        status, output = run(["no-such-program"], network, workers=self.workers(network))
        assert status != 0
        assert "no-such-program" in output

    def test_nothing_outlives_the_launcher(self, network: Network) -> None:
        mark = f"FUSIONLAYER_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
        key, value = mark.split("=")
        script = (
            "import subprocess, sys\n"
            "from benchmarks.lab.link import Network, launch\n"
            f"with launch(['sh', '-c', 'sleep 600 & wait'], {network!r}, workers={self.workers(network)}) as process:\n"
            "    print('up', flush=True)\n"
            "    process.wait()\n"
        )
        starter = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parents[2],
            env={**os.environ, key: value},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert starter.stdout is not None
        try:
            assert starter.stdout.readline() == "up\n"
            wait_until(lambda: sum(command_of(process) == "sleep" for process in marked(mark)) == 2)
        finally:
            starter.kill()
            starter.wait()
            starter.stdout.close()
        wait_until(lambda: not marked(mark))


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.mark.short
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"hosts": 0}, "hosts=0; expected 1 to 250"),
        ({"hosts": 2, "rate": "0mbit"}, "rate='0mbit'; expected a number"),
        ({"hosts": 2, "rate": "fast"}, "rate='fast'; expected a number with kbit, mbit or gbit"),
        ({"hosts": 1, "rate": "1gbit"}, "needs two"),
        ({"hosts": 2, "isolated": False}, "more than one host needs them"),
    ],
)
def test_impossible_networks_are_refused(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Network(**arguments)  # type: ignore[arg-type]


@pytest.mark.short
def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not(Network()) == "the program unshare is missing (install util-linux)"
    assert why_not(Network(1, isolated=False)) is None
