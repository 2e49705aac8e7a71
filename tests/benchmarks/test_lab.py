"""The network lab: hosts that are namespaces, links that are shaped, workers that end."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import Network, launch
from benchmarks.lab.check import measure
from tests.examples.places import needs_namespaces
from tests.loops import looped
from tests.tiers import exhaustive

from .labs import (
    ROOT,
    command_of,
    mark,
    marked,
    needs_mpi,
    needs_switch,
    netns,
    run,
    state_of_machine,
    thorough,
    wait_until,
)

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
    def test_each_interface_has_a_network_and_a_rate_of_its_own(self) -> None:
        script = "ip -brief -4 address; tc class show dev eth0; tc class show dev eth1"
        status, output = run(["sh", "-c", script], Network(2, interfaces=("30mbit", "90mbit")))
        assert status == 0, output
        addresses = sorted(re.findall(r"10\.77\.\d\.\d/24", output))
        assert addresses == [f"10.77.{interface}.{host}/24" for interface in (0, 1) for host in (1, 2)]
        assert (output.count("rate 30Mbit"), output.count("rate 90Mbit")) == (2, 2)


@looped(
    "arguments, complaint",
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


@needs_switch
class TestLinks:
    pytestmark = [*netns, thorough]

    def test_delayed(self) -> None:
        seen = measure(Network(2, "20mbit", delay="5ms"), seconds=1)
        assert seen.round_trip[1] >= 0.010
        assert seen.after_idle[1] >= 0.010 + (65536 - 2 * 4608) * 8 / 20e6
        assert all(rate < NOT_SHAPED for rate in (seen.single, *seen.both))

    def test_lost_and_reordered_frames_are_as_many_as_asked(self) -> None:
        seen = measure(Network(2, "20mbit", delay="1ms", loss=0.05, reordering=0.1), seconds=1)
        # Of 2000 datagrams, give or take four standard deviations.
        assert 0.03 < seen.lost < 0.07
        assert 0.07 < seen.overtaken < 0.13

    def test_workers_end_with_the_switch(self) -> None:
        script = "test $RANK = 1 || kill -9 $(grep -l ^switch- /proc/[0-9]*/comm | cut -d/ -f3); sleep 600"
        with launch(
            ["sh", "-c", script], Network(2, delay="1ms"), timeout=180, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            output = process.stdout.read()
            assert process.wait() == 1
        assert output.splitlines()[-1] == "the switch between the hosts has ended; the workers were ended too"


@pytest.mark.medium
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_switch_builds_without_warnings(tmp_path: Path) -> None:
    source = ROOT / "benchmarks" / "lab" / "switch.c"
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(tmp_path / "switch"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


# Each kind of lab and each ending once.
FAST, OTHERS = (0, "kill"), ((0, "exit"), (1, "failure"), (1, "terminate"), (2, "interrupt"))
CASES = [pytest.param(*LABS[FAST[0]].values, FAST[1], id="bridge-kill")]
CASES += [
    pytest.param(*LABS[lab].values, end, id=f"{LABS[lab].id}-{end}", marks=[*LABS[lab].marks, exhaustive])
    for lab, end in OTHERS
]


@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
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
