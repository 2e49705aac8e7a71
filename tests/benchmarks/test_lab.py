"""The network lab: hosts that are namespaces, links that are shaped, workers that end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import Flap, Network, launch, namespaces, why_not
from benchmarks.lab.__main__ import main
from benchmarks.lab.check import measure
from tests.tiers import exhaustive

from .labs import ROOT, command_of, mark, marked, needs_switch, netns, run, thorough, wait_until

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
            peer = socket.create_connection((master, 4000), timeout=180)
            break
        except ConnectionRefusedError:
            pass
    peer.sendall(bytes(100_000))
    peer.close()
print(subprocess.run(["tc", "class", "show", "dev", "eth0"], capture_output=True, text=True).stdout)
"""

NOT_SHAPED = 200e6
"""Bits per second. A link that is not shaped has ten times more; one that is may seem to have twice as many as asked,
where the process that counts them does not run while they come."""

PASS_ON = """
import os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = "10.77.0.%d"
if rank > 0:
    with socket.create_server((address % (rank // 2 + 1), 4000 + rank)) as server:
        peer, _ = server.accept()
        assert len(peer.makefile("rb").read()) == 1_000_000
if rank + 1 < size:
    end = time.monotonic() + 180
    while True:
        try:
            peer = socket.create_connection((address % ((rank + 1) // 2 + 1), 4001 + rank), timeout=180)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.05)
    peer.sendall(bytes(1_000_000))
    peer.close()
"""


GATHER = """
import concurrent.futures, os, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server(("10.77.0.1", 4000)) as server:
        peers = [server.accept()[0] for _ in range(2)]
    begin = time.monotonic()  # before anything is sent: a busy machine only makes the rate lower
    for peer in peers:
        peer.sendall(b"!")
    with concurrent.futures.ThreadPoolExecutor(2) as readers:
        got = sum(readers.map(lambda peer: len(peer.makefile("rb").read()), peers))
    print("bits per second", int(got * 8 / (time.monotonic() - begin)))
else:
    end = time.monotonic() + 180
    while True:
        try:
            peer = socket.create_connection(("10.77.0.1", 4000), timeout=180)
            break
        except (ConnectionRefusedError, TimeoutError):
            assert time.monotonic() < end
            time.sleep(0.05)
    peer.recv(1)
    peer.sendall(bytes(1_000_000))
    peer.close()
"""

WATCH = """
import os, pathlib, socket, subprocess, time
def is_up():
    told = subprocess.run(["ip", "link", "show", "eth1"], capture_output=True, text=True).stdout
    return "UP" in told.partition("<")[2].partition(">")[0].split(",")
def wait(up):
    end = time.monotonic() + 180
    while is_up() != up:
        assert time.monotonic() < end
        time.sleep(0.02)
def hello(interface):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind((f"10.77.{interface}.2", 4000))
        listener.settimeout(180)
        print(f"over eth{interface}:", listener.recv(100).decode())
if os.environ["RANK"] == "1":
    assert is_up()
    pathlib.Path(os.environ["LAB_EVENTS"], "now").touch()
    wait(False)
    print("eth1 is down after now")
    hello(0)
    wait(True)
    print("eth1 is up again")
    hello(1)
    pathlib.Path(os.environ["LAB_EVENTS"], "end").touch()
else:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaker:
        while not pathlib.Path(os.environ["LAB_EVENTS"], "end").exists():
            for interface in (0, 1):
                speaker.sendto(b"hello", (f"10.77.{interface}.2", 4000))
            time.sleep(0.05)
"""


def links() -> str:
    """Return the network devices of this machine."""
    return "\n".join(line.split(":")[0] for line in Path("/proc/net/dev").read_text().splitlines())


class TestLink:
    pytestmark = netns

    @pytest.mark.parametrize("hosts", [2, pytest.param(8, marks=exhaustive)])
    def test_hosts_reach_each_other_over_shaped_links(self, hosts: int) -> None:
        before = links()
        status, output = run([sys.executable, "-c", GREET], Network(hosts, "20mbit"))
        assert status == 0, output
        greeted = sorted(line for line in output.splitlines() if line.endswith(" 100000"))
        assert greeted == [f"10.77.0.{host} 100000" for host in range(2, hosts + 1)]
        assert output.count("rate 20Mbit") == hosts
        assert links() == before

    @thorough
    def test_one_host_has_a_loopback_of_its_own(self) -> None:
        status, output = run(["cat", "/proc/net/dev"], Network(1), workers=2)
        assert status == 0, output
        devices = [line.split()[0] for line in output.splitlines() if ":" in line]
        assert devices.count("lo:") == 2
        assert "eth0:" not in devices

    @thorough
    def test_a_network_that_can_be_made_has_no_obstacle(self) -> None:
        assert why_not(Network(2, "100mbit")) is None

    @thorough
    def test_obstacle_is_what_the_failing_program_says(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        tc = tmp_path / "tc"
        tc.write_text("#!/bin/sh\necho 'Specified qdisc kind is unknown.' >&2\necho usage >&2\nexit 2\n")
        tc.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        reason = why_not(Network(2, "100mbit"))
        assert reason is not None
        assert reason.startswith("tc qdisc add dev port0 root handle 1: htb")
        assert reason.endswith("Specified qdisc kind is unknown.")

    @thorough
    def test_congestion_control_that_the_kernel_does_not_allow_is_refused(self) -> None:
        reason = why_not(Network(2, congestion="nonsense"))
        assert reason is not None
        assert reason.startswith("congestion='nonsense' is not allowed by this kernel; expected one of: ")
        assert "reno" in reason

    @thorough
    def test_check_sees_no_more_than_was_asked(self) -> None:
        seen = measure(Network(2, "20mbit", congestion="reno"), seconds=1)
        assert seen.congestion == "reno"
        assert all(rate < NOT_SHAPED for rate in (seen.single, *seen.both))
        # The shaper owes nothing after a pause, and lets one packet pass at once; the rest of 64 KiB takes its time.
        assert seen.after_idle[1] > (65536 - 2 * 4608) * 8 / 20e6
        table = {row[""]: row for row in seen.rows()}
        assert table["congestion control"]["seen"] == "reno"
        assert table["one stream"]["asked"] == "19.1 Mbit/s"

    @thorough
    @pytest.mark.parametrize("delay", [None, pytest.param("1ms", marks=needs_switch)])
    def test_two_hosts_that_send_to_a_third_share_its_link(self, delay: str | None) -> None:
        status, output = run([sys.executable, "-c", GATHER], Network(3, "20mbit", delay=delay))
        assert status == 0, output
        assert int(output.removeprefix("bits per second ")) < 20.5e6

    @thorough
    def test_each_interface_has_a_network_and_a_rate_of_its_own(self) -> None:
        script = "ip -brief -4 address; tc class show dev eth0; tc class show dev eth1"
        status, output = run(["sh", "-c", script], Network(2, interfaces=("30mbit", "90mbit")))
        assert status == 0, output
        addresses = sorted(re.findall(r"10\.77\.\d\.\d/24", output))
        assert addresses == [f"10.77.{interface}.{host}/24" for interface in (0, 1) for host in (1, 2)]
        assert (output.count("rate 30Mbit"), output.count("rate 90Mbit")) == (2, 2)

    @thorough
    def test_hosts_differ_in_rate(self) -> None:
        seen = measure(Network(3, rates=("40mbit", "40mbit", "20mbit")), seconds=1, peer=2)
        assert seen.rate == 20e6
        assert seen.datagrams < NOT_SHAPED
        assert seen.overtaken == 0
        status, output = run(["tc", "class", "show", "dev", "eth0"], Network(3, rates=("40mbit", "40mbit", "20mbit")))
        assert status == 0 and (output.count("rate 40Mbit"), output.count("rate 20Mbit")) == (2, 1), output

    @thorough
    @pytest.mark.parametrize("delay", [None, pytest.param("1ms", marks=[needs_switch])])
    def test_an_interface_is_down_for_as_long_as_it_was_said(self, delay: str | None) -> None:
        network = Network(2, delay=delay, interfaces=("100mbit", "100mbit"))
        with launch(
            [sys.executable, "-c", WATCH],
            network,
            timeout=180,
            flaps=[Flap.parse("1:eth1:0s-1s:now")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            assert process.stdout is not None
            output = process.stdout.read()
            assert process.wait() == 0, output
        changes = ["eth1 is down after now", "over eth0: hello", "eth1 is up again", "over eth1: hello"]
        assert [line for line in output.splitlines() if "node1:" not in line] == changes
        assert output.count("node1: eth1 is down") == output.count("node1: eth1 is up") == 1

    @thorough
    def test_workers_of_one_host_do_not_load_its_link(self) -> None:
        status, output = run([sys.executable, "-c", PASS_ON], Network(2, "100mbit"), workers=2, count_bytes=True)
        assert status == 0, output
        sent = dict(re.findall(r"^(node\d) \(\S+\) sent (\d+) bytes$", output, re.MULTILINE))
        # Worker 0 sends to 1, its neighbour, 1 to 2, on the other host, and 2 to 3.
        assert 1_000_000 < int(sent["node0"]) < 1_200_000
        assert int(sent["node1"]) < 200_000


@pytest.mark.medium
@pytest.mark.parametrize(
    "network",
    [
        pytest.param(Network(1, isolated=False), id="plain"),
        pytest.param(Network(2), id="namespaces", marks=[*netns, exhaustive]),
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

    def test_first_failure_ends_the_others_and_comes_last(self, network: Network, tmp_path: Path) -> None:
        fails = f"echo $$ > {tmp_path}/draft; mv {tmp_path}/draft {tmp_path}/first; exit 7"
        comes_second = f"until p=$(cat {tmp_path}/first 2>&-); do :; done; while kill -0 $p 2>&-; do :; done; exit 8"
        script = f"echo rank $RANK >&2; test $RANK = 0 && {{ {fails}; }}; {comes_second}"
        status, output = run(["sh", "-c", script], network, workers=self.workers(network))
        assert status == 7
        assert output.splitlines() == ["rank 1", "rank 0", "worker 0 failed first, with exit status 7"]

    def test_workers_that_hang_are_ended_and_say_where(self, network: Network) -> None:
        script = "import time\ndef sleepy():\n    time.sleep(600)\nsleepy()"
        # Without site-packages, since Python has to be up within this time.
        status, output = run([sys.executable, "-Sc", script], network, workers=self.workers(network), timeout=2)
        assert status == 124
        assert output.count("in sleepy") == 2
        assert output.splitlines()[-1] == "the workers were ended after 2 s; above is where they were"

    def test_missing_program_is_named(self, network: Network) -> None:
        status, output = run(["no-such-program"], network, workers=self.workers(network))
        assert status != 0
        assert "no-such-program" in output

    def test_nothing_outlives_the_launcher(self, network: Network) -> None:
        word, environment = mark()
        script = (
            "import subprocess, sys\n"
            "from benchmarks.lab import Network, launch\n"
            f"with launch(['sh', '-c', 'sleep 600 & wait'], {network!r}, workers={self.workers(network)}) as process:\n"
            "    print('up', flush=True)\n"
            "    process.wait()\n"
        )
        starter = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert starter.stdout is not None
        try:
            assert starter.stdout.readline() == "up\n"
            wait_until(lambda: sum(command_of(process) == "sleep" for process in marked(word)) == 2)
        finally:
            starter.kill()
            starter.wait()
            starter.stdout.close()
        wait_until(lambda: not marked(word))


@pytest.mark.short
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"hosts": 0}, "hosts=0; expected 1 to 250"),
        ({"hosts": 2, "rate": "0mbit"}, "rate='0mbit'; expected a number"),
        ({"hosts": 2, "rate": "fast"}, "rate='fast'; expected a number with kbit, mbit or gbit"),
        ({"hosts": 1, "rate": "1gbit"}, "needs two"),
        ({"hosts": 1, "delay": "1ms"}, "delay='1ms' with one host; a link needs two"),
        ({"rate": "10gbit"}, "above 1gbit the cores of this machine limit an emulated link"),
        ({"delay": "1"}, "delay='1'; expected a number with us, ms or s"),
        ({"loss": 1.0}, "loss=1; expected a chance from 0 to below 1"),
        ({"corruption": -0.1}, "corruption=-0.1; expected a chance from 0 to 1"),
        ({"congestion": "not one"}, "congestion='not one'; expected the kernel's name"),
        ({"reordering": 2.0}, "reordering=2; expected a chance from 0 to 1"),
        ({"hosts": 3, "rates": ("1mbit", "2mbit")}, "rates of 2 hosts, and hosts=3; give one for each host"),
        ({"rate": "1mbit", "interfaces": ("1mbit",)}, "rate='1mbit' and interfaces=.*; give one of them"),
        ({"interfaces": ("1mbit", "fast")}, "interfaces='fast'; expected a number with kbit, mbit or gbit"),
        ({"interfaces": ("1mbit",) * 9}, "9 interfaces; expected at most 8"),
        ({"interfaces": ("2gbit", "1mbit")}, "interfaces='2gbit'; above 1gbit the cores"),
        ({"rate": ""}, "rate=''; expected a number"),
        ({"hosts": 2, "isolated": False}, "more than one host needs them"),
    ],
)
def test_impossible_networks_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Network(**arguments)


@pytest.mark.short
def test_a_rate_that_the_cores_limit_can_be_allowed() -> None:
    assert Network(2, "10gbit", allow_cpu_bound=True).bits_per_second == 10e9


@pytest.mark.short
def test_flaps_are_read_or_refused() -> None:
    assert Flap.parse("1:eth1:2s-2500ms") == Flap(1, "eth1", 2.0, 2.5)
    assert Flap.parse("0:eth0:0s-:half-way") == Flap(0, "eth0", 0.0, None, "half-way")
    refused = {
        "eth1": "expected HOST:DEVICE:FROM-TO",
        "1:eth1:3s-2s": "a time to come back that is after 3s",
        "1:eth1:3-4": "a number with us, ms or s",
    }
    for text, complaint in refused.items():
        with pytest.raises(ValueError, match=complaint):
            Flap.parse(text)
    for flap, complaint in {
        "2:eth0:1s-": "a flap of host 2; expected 0 to 1",
        "1:eth1:1s-": "these hosts have eth0",
    }.items():
        with pytest.raises(ValueError, match=complaint), launch(["true"], Network(2), flaps=[Flap.parse(flap)]):
            pass


@pytest.mark.short
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("run --rtt 2ms --delay 1ms -- true", "--delay 1ms and --rtt 2ms; give one of them"),
        ("run --rtt soon -- true", "rtt='soon'; expected a number with us, ms or s"),
        ("run --rates 1mbit,2mbit --flap 2:eth0:1s- -- true", "a flap of host 2; expected 0 to 1"),
        ("check --interfaces 1mbit,x", "interfaces='x'; expected a number"),
    ],
)
def test_commands_that_cannot_be_are_refused(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.lab.__main__.why_not", lambda network, mpi=False: None)
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert complaint in capsys.readouterr().err


@pytest.mark.short
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"host": 2}, "host=2; expected 0 to 1"),
        ({"workers": 0}, "workers=0; expected 1 or more"),
        ({"mpi": True, "network": Network(1, isolated=False)}, "mpi without namespaces"),
    ],
)
def test_impossible_runs_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint), launch(["true"], **{"network": Network(2), **arguments}):
        pass


@pytest.mark.short
def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not(Network()) == "the program unshare is missing (install util-linux)"
    assert why_not(Network(1, isolated=False)) is None


@pytest.mark.short
def test_programs_are_found_in_folders_that_a_user_s_path_lacks() -> None:
    """Debian has ``ip`` and ``tc`` in /usr/sbin, which is on root's PATH alone."""
    program = "import benchmarks.lab, os; os.execvp('sh', ['sh', '-c', 'echo $PATH'])"
    for path in ("/usr/bin:/bin", "/sbin:/usr/bin:/usr/sbin"):
        variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
        )
        folders = done.stdout.strip().split(":")
        assert folders[: path.count(":") + 1] == path.split(":")
        assert sorted(folders) == sorted({*path.split(":"), "/usr/sbin", "/sbin"})


@pytest.mark.short
@pytest.mark.parametrize(
    ("user", "zero", "told", "reason"),
    [
        (
            1000,
            "max_user_namespaces",
            "unshare failed: No space left on device",
            "the kernel's limit user.max_user_namespaces is 0: raise it (sysctl -w user.max_user_namespaces=10000)",
        ),
        (
            1000,
            "",
            "unshare failed: No space left on device",
            "the kernel's limit of namespaces is reached: raise the user.max_*_namespaces of sysctl",
        ),
        (
            1000,
            "",
            "write failed /proc/self/uid_map: Operation not permitted",
            "the system lets only root make namespaces: run as root, or allow unprivileged user namespaces",
        ),
        (
            0,
            "",
            "unshare failed: Operation not permitted",
            "root of this container may make no namespaces: start the container with --cap-add SYS_ADMIN",
        ),
        (0, "", "mount /proc failed: Operation not permitted", "unshare: mount /proc failed: Operation not permitted"),
    ],
)
def test_refusals_of_the_kernel_have_a_plain_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: int, zero: str, told: str, reason: str
) -> None:
    for name in ("unshare", "nsenter", "ip", "tc"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho 'unshare: {told}' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(namespaces, "_is_zero", lambda limit: limit == zero)
    assert why_not(Network()) == reason
